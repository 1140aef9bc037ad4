"""Paged attention over the pools: ``reference`` in plain torch, for any device; ``flashinfer`` for GPUs.

A backend makes its arguments of a step once (``PagedBatch.from_step``), then for each layer ``write_kv`` and
``attend`` on the views of its group. One that can attend to latents (MLA) has ``attend_latent``, too, and
``attend_picked`` if it can attend to those that an index has picked.
"""
