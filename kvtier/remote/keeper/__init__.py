"""What lies in a remote tier, listed, verified and removed (``kvtier remote``)."""
