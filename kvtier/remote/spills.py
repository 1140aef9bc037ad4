"""Which objects to store next: the texts that were offered, cut into objects, once their blocks are in the host.

Owns       the texts that wait.
Promises   an object that is known to be stored is not stored again. Each call looks at a bounded number of names. A
           text whose copies into the host are under way waits, and one whose questions are; others pass it. A text that
           waits for evictions is due before the host gives up its blocks.
Does not   store: ``RemoteTier`` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.geometry.keys import KeyArray
from kvtier.pools.block_pool import BlockPools, Col, Ids, Mark
from kvtier.remote.backends.uri import SpillWhen
from kvtier.remote.counts import RemoteCounts
from kvtier.remote.disowned import Disowned
from kvtier.remote.known import Known
from kvtier.remote.moves import Seek, SeekState
from kvtier.remote.objects import Name, ObjectPlan, Objects

MOST_TEXTS = 1024
"""Most texts that wait for evictions, and that are due. Beyond it the oldest wait no longer, or are given up."""
MOST_LOOKED = 64
"""Texts that are looked at in one call."""
MOST_HOT = 16
"""Texts that were found too hot to be due, in one call."""
BATCH = 32
"""Objects that are stored together."""
MOST_OBJECTS = 4 * BATCH
MOST_NAMES = 1024
"""Objects that are stored, and names that are looked at, in one call: a millisecond or two."""


@dataclass(eq=False)
class _Text:
    keys: KeyArray
    end: int
    """The boundary of the hit that is spilled, in tokens."""
    key: bytes
    """The key of that boundary."""
    parts: Iterator[Objects]
    seek: Seek | None
    """The seek of its request, whose answers may tell that the remote has it."""
    next: Objects | None = None
    """Some of its objects, which are not stored yet."""

    @property
    def asks(self) -> bool:
        """Whether its answers are still to come."""
        return self.seek is not None and self.seek.state is SeekState.LOOKING


class Spills:
    """Texts that are to be stored in one remote, from these host pools."""

    def __init__(
        self,
        plan: ObjectPlan,
        host: BlockPools,
        known: Known,
        disowned: Disowned,
        counts: RemoteCounts,
        when: SpillWhen,
    ) -> None:
        self._plan = plan
        self._host = host
        self._known = known
        self._disowned = disowned
        self._counts = counts
        self._when = when
        self._later: deque[_Text] = deque()
        """Texts that wait for evictions, the oldest first."""
        self._texts: deque[_Text] = deque()
        """Texts that are due."""
        self._waiting = set[tuple[int, bytes]]()
        """The ends of all texts, with their keys."""
        self._unseen = 0
        """Texts that were not looked at since a copy, a move or a question has ended."""
        self._held = set[Name]()
        """Names that are being deleted."""
        self._settled_seen = -1
        self._names_left = 0
        self._rest: Objects | None = None

    @property
    def num_due(self) -> int:
        """Texts that are being spilled, or wait for their copies alone."""
        return len(self._texts)

    @property
    def has_due(self) -> bool:
        """Whether a text that is due is not known to wait for anything."""
        if not self._texts or self._unseen:
            return bool(self._texts)
        return self._texts[0].next is None and not self._texts[0].asks

    def is_idle(self, settled: int) -> bool:
        """Whether there is nothing to do: the first text waits, and nothing has ended since (``settled``)."""
        is_settled, self._settled_seen = settled == self._settled_seen, settled
        if not is_settled:
            self._unseen = len(self._texts)
            if self._later:
                self._take_due()
        return not self.has_due and (is_settled or not self._texts)

    def _take_due(self) -> None:
        """Texts in the colder half of a group's order of eviction, if it has few empty blocks left."""
        short = self._host.column(Col.EMPTY) + self._host.unused <= self._host.usable // 8
        hot = MOST_HOT
        while short.any() and self._later and hot > 0:
            text = self._later.popleft()
            if self._is_cold(text, short):
                self._texts.append(text)
            else:  # others behind it may be colder: it was used since it came
                hot -= 1
                self._later.append(text)

    def _is_cold(self, text: _Text, short: npt.NDArray[np.bool_]) -> bool:
        """Whether half of a group's content, or more, is younger than its last block; or whether that has gone."""
        groups, keys = self._plan.last_blocks(text.keys, text.end)
        hosts = self._host.find(groups, keys)
        return bool(np.any(short[groups] & (self._host.in_colder_half(groups, hosts) | (hosts == 0))))

    def offer(self, keys: KeyArray, n: int, seek: Seek | None = None) -> None:
        """Stores what a hit at boundary n of this text needs, once ``seek`` looks no more."""
        signs = self._plan.signs_of_end(keys, n) or self._plan.names_at(keys, n)
        if signs and all(map(self._known.is_fresh, signs)) and not self._known.has_gap(keys):
            return
        key = keys[n // self._plan.link - 1].tobytes()
        if (n, key) in self._waiting:
            return
        text = _Text(keys, n, key, self._plan.parts(keys, n, BATCH), seek)
        self._waiting.add((n, key))
        (self._texts if self._when is SpillWhen.LANDING else self._later).append(text)
        if len(self._later) > MOST_TEXTS:
            self._texts.append(self._later.popleft())
        if len(self._texts) > MOST_TEXTS:
            self._done(self._texts.popleft())
            self._counts.dropped_texts += 1

    def _done(self, text: _Text) -> None:
        self._waiting.discard((text.end, text.key))

    def supersede(self, keys: KeyArray, n: int, is_wanted: Callable[[bytes], bool]) -> None:
        """Cancels what is left to spill of this text's prefixes up to boundary n, unless others want them."""
        link = self._plan.link

        def is_left(text: _Text) -> bool:
            if text.end > n or keys[text.end // link - 1].tobytes() != text.key:
                return True
            return text.end < n and is_wanted(text.key)

        self._counts.superseded_texts += self._keep(is_left)

    def hold(self, names: Iterable[Name]) -> None:
        """Nothing is stored under these names until ``let_go``: a delete of them is under way."""
        self._held.update(names)

    def let_go(self, names: Iterable[Name]) -> None:
        """Ends a ``hold``."""
        self._held.difference_update(names)
        self.look_again()

    def look_again(self) -> None:
        """Something that a text may have waited for has ended."""
        self._unseen = len(self._texts)

    def flush(self) -> None:
        """All texts are due."""
        self._texts += self._later
        self._later.clear()

    def clear(self) -> None:
        """Gives up all texts."""
        self._counts.dropped_texts += self._keep(lambda _: False)

    def drop(self, keys: KeyArray) -> None:
        """Gives up texts that begin as this one does."""
        self._keep(lambda text: bool(np.any(text.keys[0] != keys[0])))

    def _keep(self, is_kept: Callable[[_Text], bool]) -> int:
        """Returns the number of texts that were given up."""
        before = len(self._texts) + len(self._later)
        self._texts, self._later = (deque(filter(is_kept, texts)) for texts in (self._texts, self._later))
        self._waiting = {(text.end, text.key) for texts in (self._texts, self._later) for text in texts}
        return before - len(self._texts) - len(self._later)

    def ready(self) -> Iterator[tuple[Objects, Ids]]:
        """Objects, and their host blocks, to be stored now. ``take`` follows each time, or they come again."""
        self._names_left, objects_left = MOST_NAMES, MOST_OBJECTS
        for _ in range(min(len(self._texts), MOST_LOOKED)):
            text = self._texts[0]
            self._unseen = max(0, self._unseen - 1)
            if text.asks:
                self._texts.rotate(-1)
                continue
            while (batch := self._again(text) or self._batch(text)) is not None:
                hosts = self._host.find(batch.groups, batch.keys)
                lacks = batch.have(hosts == 0)  # the host has them no longer, or never had them
                self._drop(batch.only(lacks))
                batch, hosts = batch.only(~lacks), hosts[~lacks[batch.of]]
                marks = self._host.arrays.mark[self._host.entries(batch.groups, hosts)]
                waits = batch.have(marks != Mark.READY)
                if self._held:
                    waits |= np.array([name in self._held for name in batch.names], bool)
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
            if text.next:  # it waits for copies into the host, or for a delete
                self._texts.append(text)
            else:
                self._done(text)

    def take(self) -> None:
        """Notes that what ``ready`` has told is being stored."""
        self._texts[0].next = self._rest or None

    def _batch(self, text: _Text) -> Objects | None:
        """The next objects of a text that are not known to be stored; None if there are none, or no names are left."""
        while self._names_left > 0 and (part := next(text.parts, None)) is not None:
            self._names_left -= len(part)
            wanted = np.array([not self._is_known(name) for name in part.names], bool)
            if wanted.any():
                return part.only(wanted)
        return None

    def _again(self, text: _Text) -> Objects | None:
        """The rest of the objects that a text waits with, without those that another one has stored meanwhile."""
        if text.next:
            self._names_left -= len(text.next)
            text.next = text.next.only(np.array([not self._is_known(name) for name in text.next.names], bool))
        return text.next or None

    def _drop(self, objects: Objects) -> None:
        """Drops objects that cannot be stored now. A later offer of their text fills the gap."""
        self._counts.dropped_objects += len(objects)
        for name in objects.names:
            self._known.forget(name, was_believed=True)

    def _is_known(self, name: Name) -> bool:
        return self._known.is_fresh(name) or bool(self._disowned and self._disowned.has(name[1]))
