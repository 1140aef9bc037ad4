"""``kvtier demo``: the main job, and what a remote tier is for."""
