"""Compiled loops: how they are compiled, and where their machine code is kept."""
