"""The device tier's bookkeeping: arena, block pools, block tables."""
