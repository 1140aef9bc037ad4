"""Names that are known to be stored, the newest of them; and those that were believed to be, and are not."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from kvtier.keys import KeyArray
from kvtier.remote.objects import Name

MOST_KNOWN = 2**18
MOST_LOST = 1024


class Known:
    """Bounded sets of names. What it has forgotten is stored once more than it need be."""

    def __init__(self) -> None:
        self._names: OrderedDict[Name, None] = OrderedDict()
        self._lost: OrderedDict[Name, None] = OrderedDict()

    def __contains__(self, name: Name) -> bool:
        return name in self._names

    def add(self, name: Name) -> None:
        """The store has it, or is about to."""
        self._names[name] = None
        self._names.move_to_end(name)
        self._lost.pop(name, None)
        if len(self._names) > MOST_KNOWN:
            self._names.popitem(last=False)

    def forget(self, name: Name, was_believed: bool = False) -> None:
        """The store may not have it. ``was_believed``: somebody may hold that it has."""
        was_believed |= name in self._names
        self._names.pop(name, None)
        if was_believed:
            self._lost[name] = None
            if len(self._lost) > MOST_LOST:
                self._lost.popitem(last=False)

    def has_gap(self, keys: KeyArray) -> bool:
        """Whether an object of the text with these keys, uint64 [n, 2], was believed to be stored, and is not."""
        if not self._lost:
            return False
        lost = np.frombuffer(b"".join(key for _, key in self._lost), np.uint64)[::2]
        return bool(np.isin(keys[:, 0], lost).any())
