"""Who gives way, for what, and what it brings: recorded while a scheduler plans (I10)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier import Scheduler
from kvtier.coordinator.admission import Admission
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.match import Match
from kvtier.coordinator.request import Tracked
from kvtier.gpu_pool.pool_state import Col
from kvtier.gpu_pool.row_state import Phase, row_at
from kvtier.spec import Kind


@dataclass(frozen=True)
class Preemption:
    """``lack`` and ``gained`` are blocks by group: of the set that it belongs to, as far as that has given way.

    A request that is not one of a set (``left`` is None) gives way for a row.
    """

    request_id: str
    ran: bool
    first: bool  # in service order, of all requests
    row_free: bool
    before: frozenset[str] = frozenset()  # who comes before it in service order
    left: int | None = None  # of the set, after this one
    enough: bool = True  # what the set was to make room for fits now
    lack: tuple[int, ...] = ()
    gained: tuple[int, ...] = ()
    needed: bool = True  # without it the others of the set do not make room
    in_vain: bool = False  # for a waiting request that then is not admitted

    def wrong(self) -> list[str]:
        """What I10 forbids."""
        name, out = self.request_id, list[str]()
        if self.first:
            out.append(f"I10: {name} is preempted, though it is the first in service order")
        if not self.ran:
            out.append(f"I10: {name} is preempted before it has advanced")
        if self.left is None and self.row_free:
            out.append(f"I10: {name} is preempted for a row while one is free")
        if self.left == 0 and not self.enough:
            lack, gained = list(self.lack), list(self.gained)
            out.append(f"I10: {name} is preempted for {lack} blocks, but only {gained} became free")
        if not self.needed:
            out.append(f"I10: {name} is preempted, though the others who give way suffice")
        if self.in_vain:
            out.append(f"I10: {name} is preempted for a request that finds too few blocks all the same")
        return out


def _gain(coordinator: Coordinator, rows: Sequence[int], match: Match | None) -> npt.NDArray[np.int64]:
    """What the requests of these rows give up together, in blocks by group, by a plain count: what nobody else holds,
    the hit that ``match`` is does not need, and no overdue store may still read; with a match, what was promised them.
    """
    p, t = coordinator.pools.arrays, coordinator.tables.arrays
    gain = np.zeros(len(p.meta), np.int64)
    for g in range(len(gain)):
        held = Counter[int]()
        for r in rows:
            at, (lo, hi) = row_at(t.geometry, g, r), t.span[r, g]
            held.update(t.table[at + lo : at + hi].tolist())
        if match is not None and coordinator.spec.groups[g].attention.kind is Kind.FULL:
            for b in match.of_group(g)[0].tolist():
                held.pop(b, None)
        blocks = p.blocks[p.meta[g, Col.BASE] :]
        gain[g] = sum(blocks["refs"][b] == n and blocks["fence"][b] >= 0 for b, n in held.items())
    return gain if match is None else gain + coordinator.promised(np.array(rows, np.int32))


@contextmanager
def recorded(seen: list[Preemption]) -> Iterator[None]:
    """Adds the preemptions of while it lasts to ``seen``, in order."""
    preempt, choose = Scheduler._preempt, Coordinator.choose_victims
    make_way, admit = Admission._make_way, Coordinator.admit
    chosen: dict[str, Any] = {"names": []}

    @functools.wraps(preempt)
    def _preempt(self: Scheduler, seq: Tracked) -> None:
        name, ran, row_free = seq.request.request_id, seq.ran, self._roster.has_free_row
        before = frozenset(s.request.request_id for s in (*self.running, *self.waiting) if s.order < seq.order)
        preempt(self, seq)
        event = Preemption(name, ran, not before, row_free, before)
        if name in chosen["names"]:
            chosen["names"].remove(name)
            gained = self._pools.free - chosen["free"]
            enough = self._pools.fits(self._pools.live + chosen["want"])
            left, lack = len(chosen["names"]), tuple(chosen["lack"].tolist())
            event = replace(event, left=left, enough=enough, lack=lack, gained=tuple(gained.tolist()))
            event = replace(event, needed=chosen["needed"][name])
        seen.append(event)

    @functools.wraps(choose)
    def choose_victims(
        self: Coordinator, candidates: Sequence[Tracked], want: Any, match: Match | None = None
    ) -> list[Tracked]:
        free = self.pools.free.copy()
        victims = choose(self, candidates, want, match)
        rows = [s.row for s in victims]
        chosen["needed"] = {
            s.request.request_id: not self.pools.fits(
                self.pools.live + want - _gain(self, [r for r in rows if r != s.row], match)
            )
            for s in victims
        }
        if match is not None:  # nobody needs any more what was promised to those who give way
            want = want - self.promised(np.array(rows, np.int32))
        chosen.update(names=[s.request.request_id for s in victims], free=free, want=want.copy())
        chosen["lack"] = np.maximum(want - free, 0)
        return victims

    @functools.wraps(make_way)
    def _make_way(self: Admission, seq: Tracked, match: Match, victims: list[Tracked]) -> Match:
        before = len(seen)
        match = make_way(self, seq, match, victims)
        chosen["way"] = slice(before, len(seen))
        return match

    @functools.wraps(admit)
    def _admit(self: Coordinator, seq: Tracked, match: Match, row: int) -> bool:
        overdue = self.connector.num_live - self.connector.num_progressing
        admitted = admit(self, seq, match, row)
        if self.connector.num_live - self.connector.num_progressing == overdue:  # else blocks were lost meanwhile
            rows = np.append(np.flatnonzero(self.tables.arrays.phase != Phase.FREE), row).astype(np.int32)
            fits = self.pools.fits(self.pools.live + self.promised(np.unique(rows)))
            way = chosen["way"]
            seen[way] = [replace(event, in_vain=not (admitted and fits)) for event in seen[way]]
        return admitted

    Scheduler._preempt, Coordinator.choose_victims = _preempt, choose_victims
    Admission._make_way, Coordinator.admit = _make_way, _admit
    try:
        yield
    finally:
        Scheduler._preempt, Coordinator.choose_victims = preempt, choose
        Admission._make_way, Coordinator.admit = make_way, admit
