"""Modules of a family's forward that run as fewer kernels: experts (``experts``), RMS norms (``norms``)."""
