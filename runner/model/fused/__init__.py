"""Parts of a family's forward that run as fewer kernels: ``experts``, ``rope``, ``norms``, ``gates``; ``table`` has all."""
