"""Decisions over all groups and both tiers: cached prefixes, the distribution of blocks, and the next step."""
