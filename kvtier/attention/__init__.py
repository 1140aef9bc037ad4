"""Paged attention over the pools: ``reference`` in plain torch, for any device; ``flashinfer`` for GPUs."""
