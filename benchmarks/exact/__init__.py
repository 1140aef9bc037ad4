"""Whether answers depend on the cache, and what it costs that they do not: episodes of tool turns, exact and not."""
