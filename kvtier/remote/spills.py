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
from kvtier.remote.objects import Name, ObjectPlan, Objects

MOST_TEXTS = 1024
"""That wait; the oldest are given up."""
MOST_OBJECTS = 32
MOST_NAMES = 1024
"""Objects that are stored, and names that are looked at, in one call: a fraction of a millisecond."""


class _Text:
    def __init__(self, keys: KeyArray, parts: Iterator[Objects]) -> None:
        self.keys = keys
        self.parts = parts
        self.next: Objects | None = None
        """Some of them, which are not stored yet."""


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
        self._names_left = 0
        self._rest: Objects | None = None

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
        self._texts.append(_Text(keys, self._plan.parts(keys, n, MOST_OBJECTS)))
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

    def ready(self) -> Iterator[tuple[Objects, Ids]]:
        """Objects, and their host blocks, to be stored now. ``take`` follows each time, or they come again."""
        self._names_left, objects_left = MOST_NAMES, MOST_OBJECTS
        for _ in range(len(self._texts)):
            text = self._texts[0]
            while (batch := text.next or self._batch(text)) is not None:
                hosts = self._host.find(batch.groups, batch.keys)
                lacks = batch.have(hosts == 0)  # the host has them no longer, or never had them
                self._counts.dropped_objects += int(lacks.sum())
                batch, hosts = batch.only(~lacks), hosts[~lacks[batch.of]]
                marks = self._host.arrays.mark[self._host.entries(batch.groups, hosts)]
                waits = batch.have(marks != Mark.READY)
                text.next, self._rest = batch, batch.only(waits)
                if not waits.all():
                    objects_left -= int((~waits).sum())
                    if objects_left < 0:
                        return
                    yield batch.only(~waits), hosts[~waits[batch.of]]
                text.next = self._rest or None
                if text.next:
                    break
            if self._names_left <= 0:
                return
            self._texts.popleft()
            if text.next:  # it waits for copies into the host
                self._texts.append(text)

    def take(self) -> None:
        """What ``ready`` has told is being stored."""
        self._texts[0].next = self._rest or None

    def _batch(self, text: _Text) -> Objects | None:
        """The next objects of a text that are not known to be stored; None if there are none, or no names are left."""
        while self._names_left > 0 and (part := next(text.parts, None)) is not None:
            self._names_left -= len(part)
            wanted = np.array([not self._is_known(name) for name in part.names], bool)
            if wanted.any():
                return part.only(wanted)
        return None

    def _is_known(self, name: Name) -> bool:
        return name in self._known or bool(self._disowned and self._disowned.has(name[1]))
