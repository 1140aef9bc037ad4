"""Prompts for models with nothing known except the vocabulary."""

from __future__ import annotations

import numpy as np


def ordinary_tokens(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Random token ids that mean ordinary words: the beginning and the end of a vocabulary hold special tokens."""
    high = min(vocab_size, 30_000)
    ids: list[int] = np.random.default_rng(seed).integers(min(100, high - 1), high, num_tokens).tolist()
    return ids
