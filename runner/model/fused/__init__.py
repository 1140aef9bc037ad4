"""Modules of a family's forward that run as fewer kernels: ``experts``, ``rope``, ``norms``; ``table`` has them all."""
