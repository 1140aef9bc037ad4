"""Requests over all groups and tiers: cached prefixes, who gets blocks, what stays warm, and the next step."""
