"""Which boundaries of prompts are wanted again and again.

Promises   counts, for the boundaries asked about last, how often that was; bounded memory.
Does not   know blocks.

A conversation's boundary is hit once, by its next turn, and then superseded by the one which that turn leaves; that of
a prompt that many share is hit over and over. Windows make the difference costly: for a short turn the window's content
at its end is most of what is kept. So what was hit for the first time goes cold when the request moves on.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

MOST = 65_536
"""Boundaries that are remembered."""


class Wanted:
    """Counts by key, uint64 [2]."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def note(self, key: npt.NDArray[np.uint64]) -> int:
        """Somebody wants this boundary; returns how often that has been so."""
        name = key.tobytes()
        count = self._counts.pop(name, 0) + 1
        self._counts[name] = count
        if len(self._counts) > MOST:
            self._counts.popitem(last=False)
        return count
