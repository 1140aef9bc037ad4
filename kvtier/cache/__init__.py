"""The facade: one KV cache, as an engine holds it, and the views of it: events for routers, explanations."""
