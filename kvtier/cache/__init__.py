"""The facade: one KV cache, as an engine holds it."""
