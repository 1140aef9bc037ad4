"""The live page of a server: ``/`` and its files, and ``/watch``, the events that feed it."""
