"""Pools of blocks, as device and host tier have them: memory, books, and the compiled loops over them."""
