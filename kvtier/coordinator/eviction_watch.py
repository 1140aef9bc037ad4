"""Which requests' blocks pushed cached content out of either tier.

Owns       the counters of evictions as they were at the last look.
Promises   the events of a journal add up to the pools' counters. Without a journal, nothing is looked at. Of many
           requests, names are looked up only if the event does not name them yet.
Does not   evict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.roster import Roster
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.machine.journal import Journal, PushedOut
from kvtier.pools.block_pool import BlockPools, Col

T = TypeVar("T")

TOGETHER_S = 1.0
"""An event takes in what follows it for so long."""


@dataclass(slots=True)
class _Shared:
    """An event of several requests, which takes in what follows it."""

    number: int
    at_s: float
    by: tuple[str, ...]
    total: npt.NDArray[np.int64]
    """[groups], blocks."""
    told: npt.NDArray[np.int64]
    """[num_rows], which request of the row it names (``Roster.numbers``)."""
    named: set[str]
    """The requests that it names; one that got another row is named once."""
    all_until: int = -1
    """It names all requests of a roster in which so many have entered (``Roster.entered``); -1: of none."""

    def name(self, rows: npt.NDArray[np.int32], roster: Roster) -> None:
        """Names the requests of these rows, too."""
        if self.all_until == roster.entered:
            return
        numbers = roster.numbers[rows]
        are_new = self.told[rows] != numbers
        if are_new.any():
            fresh = dict.fromkeys(name for name in roster.ids(rows[are_new]) if name not in self.named)
            self.by = (*self.by, *fresh)
            self.named.update(fresh)
            self.told[rows] = numbers
            if np.array_equal(self.told, roster.numbers):
                self.all_until = roster.entered


class EvictionWatch:
    """Watches the device tier, whose rows are ``tables``, and of ``host``, None if there is no host tier."""

    def __init__(self, journal: Journal, tables: BlockTables, host: BlockPools | None) -> None:
        self._journal = journal
        self._tables = tables
        self._names = tables.spec.names
        tiers = [("device", tables.pools)] if host is None else [("device", tables.pools), ("host", host)]
        self._tiers = [(tier, pools.column(Col.EVICTED)) for tier, pools in tiers]
        self._seen = [now.tobytes() for _, now in self._tiers]
        self._last: dict[str, _Shared] = {}

    @property
    def _has_news(self) -> bool:
        return any(now.tobytes() != seen for (_, now), seen in zip(self._tiers, self._seen, strict=True))

    def _news(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """The tiers that have evicted something since the last look, and how many blocks [groups]."""
        for i, (tier, now) in enumerate(self._tiers):
            if (bytes_now := now.tobytes()) != self._seen[i]:
                more = np.frombuffer(bytes_now, np.int64) - np.frombuffer(self._seen[i], np.int64)
                self._seen[i] = bytes_now
                yield tier, more

    def _fact(self, tier: str, blocks: npt.NDArray[np.int64], by: tuple[str, ...]) -> PushedOut:
        return PushedOut(tier, {name: n for name, n in zip(self._names, blocks.tolist(), strict=True) if n}, by)

    def note(self, by: str) -> None:
        """What was evicted since the last look was evicted for this request."""
        if self._journal.is_on:
            for tier, blocks in self._news():
                self._last.pop(tier, None)
                self._journal.add("", self._fact(tier, blocks, (by,)))

    def note_rows(self, rows: npt.NDArray[np.int32], roster: Roster) -> None:
        """What was evicted since the last look was evicted for the requests that have these rows, or had them last."""
        if self._journal.is_on:
            for tier, blocks in self._news():
                if len(rows) > 1:
                    self._tell(tier, blocks, rows, roster)
                else:
                    self._last.pop(tier, None)
                    self._journal.add("", self._fact(tier, blocks, tuple(roster.ids(rows))))

    def _tell(self, tier: str, blocks: npt.NDArray[np.int64], rows: npt.NDArray[np.int32], roster: Roster) -> None:
        """Batches that push out content step after step share an event a second, unless something else happens."""
        last, now = self._last.get(tier), time.perf_counter()
        if last is None or self._journal.count - last.number > 2 or now - last.at_s >= TOGETHER_S:
            last = _Shared(self._journal.count, now, (), blocks, np.zeros_like(roster.numbers), set())
            last.name(rows, roster)
            self._last[tier] = last
            self._journal.add("", self._fact(tier, blocks, last.by))
            return
        last.name(rows, roster)
        last.total += blocks
        self._journal.replace(last.number, self._fact(tier, last.total, last.by))

    def around(self, take: Callable[[], T], roster: Roster) -> T:
        """Runs ``take``. What is evicted meanwhile is evicted for the rows that have taken blocks."""
        if not self._journal.is_on:
            return take()
        held = self._tables.arrays.hi.copy()
        result = take()
        if self._has_news:
            takers = np.flatnonzero((self._tables.arrays.hi > held).any(0))
            self.note_rows(takers.astype(np.int32), roster)
        return result
