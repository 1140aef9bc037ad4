"""Decisions over all groups and both tiers: how much of a prompt is there, who gets blocks, what runs next."""
