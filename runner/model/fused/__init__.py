"""A family's forward as fewer kernels: ``experts``, ``rope``, ``norms``, ``gates``, ``linears``; ``table`` has them."""
