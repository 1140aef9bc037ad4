"""Which requests' blocks pushed cached content out of either tier.

Owns       the counters of evictions as they were at the last look.
Promises   the events of a journal add up to the pools' counters. Without a journal, nothing is looked at.
Does not   evict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvtier.coordinator.roster import Roster
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.machine.journal import Journal, PushedOut
from kvtier.pools.block_pool import BlockPools, Col

T = TypeVar("T")

TOGETHER_S = 1.0
"""For how long an event takes in what follows it."""


class EvictionWatch:
    """Of the device tier, whose rows are ``tables``, and of ``host``, None if there is no host tier."""

    def __init__(self, journal: Journal, tables: BlockTables, host: BlockPools | None) -> None:
        self._journal = journal
        self._tables = tables
        self._names = tables.spec.names
        tiers = [("device", tables.pools)] if host is None else [("device", tables.pools), ("host", host)]
        self._tiers = [(tier, pools.column(Col.EVICTED)) for tier, pools in tiers]
        self._seen = [now.tobytes() for _, now in self._tiers]
        self._last: list[tuple[int, float, PushedOut | None]] = [(0, 0.0, None) for _ in self._tiers]

    @property
    def _has_news(self) -> bool:
        return any(now.tobytes() != seen for (_, now), seen in zip(self._tiers, self._seen, strict=True))

    def note(self, by: Sequence[str]) -> None:
        """What was evicted since the last look was evicted for these requests."""
        if not self._journal.is_on:
            return
        for i, (tier, now) in enumerate(self._tiers):
            if now.tobytes() != self._seen[i]:
                more = (now - np.frombuffer(self._seen[i], np.int64)).tolist()
                blocks = {name: n for name, n in zip(self._names, more, strict=True) if n}
                self._seen[i] = now.tobytes()
                self._tell(i, PushedOut(tier, blocks, tuple(by)))

    def _tell(self, i: int, fact: PushedOut) -> None:
        """Batches that push out content step after step share an event a second, unless something else happens."""
        number, at_s, last = self._last[i]
        now = time.perf_counter()
        if len(fact.by) > 1 and last is not None and self._journal.count - number <= 2 and now - at_s < TOGETHER_S:
            names = dict.fromkeys((*last.blocks, *fact.blocks))
            blocks = {name: last.blocks.get(name, 0) + fact.blocks.get(name, 0) for name in names}
            last = PushedOut(fact.tier, blocks, tuple(dict.fromkeys((*last.by, *fact.by))))
            self._journal.replace(number, last)
            self._last[i] = number, at_s, last
            return
        is_shared = len(fact.by) > 1
        self._last[i] = self._journal.count, now, fact if is_shared else None
        self._journal.add("", fact)

    def around(self, take: Callable[[], T], roster: Roster) -> T:
        """Runs ``take``. What is evicted meanwhile is evicted for the rows that have taken blocks."""
        if not self._journal.is_on:
            return take()
        held = self._tables.arrays.hi.copy()
        result = take()
        if self._has_news:
            takers = np.flatnonzero((self._tables.arrays.hi > held).any(0))
            self.note(roster.ids(takers.astype(np.int32)))
        return result
