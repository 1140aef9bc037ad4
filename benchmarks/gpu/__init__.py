"""What only a GPU can tell: ``python -m benchmarks.gpu``, or ``make gpu``."""
