"""Short words for the tests of the block pools: pools of these sizes, arrays of block ids, keys."""

from __future__ import annotations

import numpy as np

USABLE = (5, 3)
GROUPS = len(USABLE)
INT32 = np.int32


def arr(*values: int) -> np.ndarray:
    return np.array(values, INT32)


def key_of(n: int) -> np.ndarray:
    """Few different words, so that the index has long chains of keys that differ in one word only."""
    return np.array([[n % 3, (n % 2) << 40 | n // 3]], np.uint64)
