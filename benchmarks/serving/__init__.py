"""Serving a model, beside transformers' own ways to do that."""
