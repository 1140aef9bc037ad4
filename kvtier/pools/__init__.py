"""Pools of blocks as both tiers have them: memory, books, and the compiled loops over them."""
