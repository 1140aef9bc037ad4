"""Which objects to store next: the texts that were offered, cut into objects, as soon as their blocks are in the host.

Owns       the texts that wait.
Promises   an object that is known to be stored is not stored again. Each call looks at a bounded number of names. A
           text whose copies into the host are under way waits; others pass it.
Does not   store: ``RemoteTier`` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from kvtier.keys import KeyArray
from kvtier.pools.block_pool import BlockPools, Ids, Mark
from kvtier.remote.counts import RemoteCounts
from kvtier.remote.disowned import Disowned
from kvtier.remote.known import Known
from kvtier.remote.objects import ObjectPlan, Planned, StoredObject

MOST_TEXTS = 1024
"""That wait; the oldest are given up."""
MOST_OBJECTS = 32
MOST_NAMES = 1024
"""Objects that are stored, and names that are looked at, in one call: a fraction of a millisecond."""


class _Text:
    def __init__(self, keys: KeyArray, objects: Iterator[Planned]) -> None:
        self.keys = keys
        self.objects = objects
        self.next: StoredObject | None = None


class Spills:
    """For one store, from these host pools."""

    def __init__(
        self, plan: ObjectPlan, host: BlockPools, known: Known, disowned: Disowned, counts: RemoteCounts
    ) -> None:
        self._plan = plan
        self._host = host
        self._known = known
        self._disowned = disowned
        self._counts = counts
        self._texts: deque[_Text] = deque()
        self._settled_seen = -1

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def has_due(self) -> bool:
        """Whether the first text is not known to wait for anything."""
        return bool(self._texts) and self._texts[0].next is None

    def is_idle(self, settled: int) -> bool:
        """Whether there is nothing to do: the first text waits, and nothing has ended since (``settled``)."""
        idle = not self._texts or (settled == self._settled_seen and self._texts[0].next is not None)
        self._settled_seen = settled
        return idle

    def offer(self, keys: KeyArray, n: int) -> int:
        """What a hit at boundary n of this text needs is to be stored. Returns the number of texts given up for it."""
        signs = self._plan.signs_of_end(keys, n) or self._plan.names_at(keys, n)
        if signs and all(name in self._known for name in signs):
            return 0
        self._texts.append(_Text(keys, self._plan.planned(keys, n)))
        if len(self._texts) <= MOST_TEXTS:
            return 0
        self._texts.popleft()
        return 1

    def clear(self) -> int:
        """Gives up all texts; returns their number."""
        count = len(self._texts)
        self._texts.clear()
        return count

    def drop(self, keys: KeyArray) -> None:
        """Gives up texts that begin as this one does."""
        head = keys[0].tobytes()
        self._texts = deque(text for text in self._texts if text.keys[0].tobytes() != head)

    def ready(self) -> Iterator[tuple[StoredObject, Ids]]:
        """Objects, and their host blocks, that can be stored now. After each one comes ``take``, or it comes again."""
        names = [MOST_NAMES]
        objects = MOST_OBJECTS
        for _ in range(len(self._texts)):
            text = self._texts[0]
            while (what := self._next(text, names)) is not None:
                hosts = self._host.find(what.groups, what.keys)
                if np.any(hosts == 0):
                    self._counts.dropped_objects += 1  # the host has it no longer, or never had it
                    text.next = None
                elif np.any(self._host.arrays.mark[self._host.entries(what.groups, hosts)] != Mark.READY):
                    break
                elif not objects:
                    return
                else:
                    objects -= 1
                    yield what, hosts
            if names[0] <= 0:
                return
            self._texts.popleft()
            if text.next is not None:  # it waits for copies into the host
                self._texts.append(text)

    def take(self) -> None:
        """The object that ``ready`` has told is being stored."""
        self._texts[0].next = None

    def _next(self, text: _Text, names: list[int]) -> StoredObject | None:
        """The next object of a text that is not known to be stored; None too after ``names`` names."""
        if text.next is None and names[0] > 0:
            for name, make in text.objects:
                names[0] -= 1
                if name not in self._known and not (self._disowned and self._disowned.has(name[1])):
                    text.next = make()
                    break
                if names[0] <= 0:
                    break
        return text.next
