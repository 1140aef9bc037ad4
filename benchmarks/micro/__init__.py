"""What the bookkeeping costs, without a model, a GPU or tensors: ``python -m benchmarks.micro``."""
