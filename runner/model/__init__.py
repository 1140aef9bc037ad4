"""A model in memory, and its attention over the pools."""
