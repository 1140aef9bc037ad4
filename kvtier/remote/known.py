"""Names that are known to be stored, the newest of them, and who is told of changes.

Owns       these names, and those that were believed to be stored and are not.
Promises   replaying a listener's changes gives the names known to be stored. One that never takes them costs no more
           than twice the names that are kept. Without a listener nothing is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakSet

import numpy as np

from kvtier.geometry.keys import KeyArray
from kvtier.remote.objects import Name

MOST_KNOWN = 2**18
MOST_LOST = 1024
FRESH_S = 3600.0
"""Age at which an object that somebody offers is stored once more: its keeper may have removed it as an old one."""


class Changes:
    """Names that the remote has now, or may not have any more, since ``take`` was called last."""

    def __init__(self, there: dict[Name, bool]) -> None:
        self._news = there

    def note(self, name: Name, is_there: bool) -> None:
        """One more. A name's changes come and go by turns, so two of them leave it as it was."""
        if self._news.pop(name, None) is None:
            self._news[name] = is_there

    def take(self) -> dict[Name, bool]:
        """All of them; the next call begins anew."""
        news, self._news = self._news, {}
        return news


class Known:
    """Bounded sets of names. What it has forgotten is stored once more than it need be."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._names: OrderedDict[Name, bool] = OrderedDict()  # and whether the remote has said so
        self._since: dict[Name, float] = {}
        self._lost: OrderedDict[Name, None] = OrderedDict()
        self._listeners: WeakSet[Changes] | None = None

    def __contains__(self, name: Name) -> bool:
        return name in self._names

    def is_fresh(self, name: Name) -> bool:
        """Whether the remote has got or told it not long ago."""
        return self._now() < self._since.get(name, float("-inf")) + FRESH_S

    def add(self, name: Name) -> None:
        """The remote is about to have it."""
        self._names.setdefault(name, False)
        self._names.move_to_end(name)
        self._since[name] = self._now()
        self._lost.pop(name, None)
        if len(self._names) > MOST_KNOWN:
            self._drop(next(iter(self._names)))

    def confirm(self, name: Name) -> None:
        """The remote has it; nothing changes if it was forgotten since ``add``."""
        if self._names.get(name) is False:
            self._names[name] = True
            self._tell(name, True)

    def forget(self, name: Name, was_believed: bool = False) -> None:
        """The remote may not have it. ``was_believed``: somebody may hold that it has."""
        if name in self._names or was_believed:
            self._lost[name] = None
            if len(self._lost) > MOST_LOST:
                self._lost.popitem(last=False)
        self._drop(name)

    def _drop(self, name: Name) -> None:
        self._since.pop(name, None)
        if self._names.pop(name, False):
            self._tell(name, False)

    def has_gap(self, keys: KeyArray) -> bool:
        """Whether an object of the text with these keys, uint64 [n, 2], was believed to be stored, and is not."""
        if not self._lost:
            return False
        lost = np.frombuffer(b"".join(key for _, key in self._lost), np.uint64)[::2]
        return bool(np.isin(keys[:, 0], lost).any())

    def listen(self) -> Changes:
        """Changes from now on, the first of which are all names that the remote has. They end with their holder."""
        changes = Changes({name: True for name, is_there in self._names.items() if is_there})
        self._listeners = WeakSet() if self._listeners is None else self._listeners
        self._listeners.add(changes)
        return changes

    def _tell(self, name: Name, is_there: bool) -> None:
        for changes in self._listeners or ():
            changes.note(name, is_there)
