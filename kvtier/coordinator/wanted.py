"""Which boundaries of prompts are wanted by more than one request.

Promises   tells, for the boundaries asked about last, whether anybody else has wanted them; bounded memory.
Does not   know blocks.

A conversation's boundary is hit once, by its next turn, and then superseded by the one which that turn leaves; that of
a prompt that many share is hit over and over. Windows make the difference costly: for a short turn the window's content
at its end is most of what is kept. So where hits are rarely repeated, what a request was the first to hit goes cold
when it moves on; else it stays as hot as the rest.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

MOST = 65_536
"""Boundaries that are remembered."""
RECENT = 256
"""Hits from which is told how many are repeated, the older half counted half."""
DOUBT = 12
"""Hits that must not have been repeated before any is thought not to be."""
RARELY = 4
"""Repeated hits are rare if there are so many times more that are not."""


class Wanted:
    """Hits by key, uint64 [2]."""

    def __init__(self) -> None:
        self._hits: OrderedDict[bytes, int] = OrderedDict()
        self._first = 0.0
        self._repeated = DOUBT / RARELY

    def hit(self, key: npt.NDArray[np.uint64]) -> bool:
        """A request hits this boundary; True if it is the only one that will, as far as can be told."""
        count = self._count(key)
        if count == 1:
            self._first += 1.0
        else:
            self._repeated += 1.0
        if self._first + self._repeated > RECENT:
            self._first, self._repeated = self._first / 2, self._repeated / 2
        return count == 1 and RARELY * self._repeated < self._first

    def share(self, key: npt.NDArray[np.uint64]) -> None:
        """Two prompts part at this boundary: others will want it."""
        self._count(key)

    def _count(self, key: npt.NDArray[np.uint64]) -> int:
        name = key.tobytes()
        count = self._hits[name] = self._hits.pop(name, 0) + 1
        if len(self._hits) > MOST:
            self._hits.popitem(last=False)
        return count
