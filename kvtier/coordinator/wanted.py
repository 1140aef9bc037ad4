"""Which boundaries of prompts are wanted by more than one request.

Promises   tells whether a boundary has been hit, or prompts have parted there, before; bounded memory.
Does not   know blocks.

A conversation's boundary is hit once, by its next turn, and then superseded by the one which that turn leaves; that of
a prompt that many share is hit over and over. Windows make the difference costly: for a short turn the window's content
at its end is most of what is kept. So content that a request is the first to hit, and moves on from, goes cold.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

MOST = 65_536
"""Boundaries that are remembered."""


class Wanted:
    """Boundaries by key, uint64 [2]."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: npt.NDArray[np.uint64]) -> bool:
        """Whether a request has wanted this boundary, as far as is remembered."""
        return key.tobytes() in self._seen

    def is_first(self, key: npt.NDArray[np.uint64]) -> bool:
        """A request wants this boundary; True if none has before, as far as is remembered."""
        name = key.tobytes()
        first = name not in self._seen
        self._seen[name] = None
        self._seen.move_to_end(name)
        if len(self._seen) > MOST:
            self._seen.popitem(last=False)
        return first
