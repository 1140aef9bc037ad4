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
from kvtier.gpu_pool.pool_state import Col, Mark
from kvtier.gpu_pool.row_state import Phase, row_at
from kvtier.spec import Kind

Counts = npt.NDArray[np.int64]


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
    in_vain: bool = False  # for a request that then is not admitted, or is short again

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


def _held(coordinator: Coordinator, rows: Sequence[int], g: int) -> list[list[int]]:
    """The blocks of group g that each of these rows holds."""
    t = coordinator.tables.arrays
    spans = [(row_at(t.geometry, g, r), *t.span[r, g]) for r in rows]
    return [t.table[at + lo : at + hi].tolist() for at, lo, hi in spans]


def _count(coordinator: Coordinator, gone: Sequence[int] = (), hit: Match | None = None) -> tuple[Counts, Counts]:
    """Blocks by group, by a plain count: that are held, and that are promised to those with tokens to compute which
    they know, once the rows ``gone`` have left; what is part of a ``hit`` stays held in full-attention groups.

    What is promised is a row's most blocks, less those that it holds. In windows and chunks, which give up blocks as
    they move on, less those that no other row holds, or only such rows: then they are the last one's of these.
    """
    p, t = coordinator.pools.arrays, coordinator.tables.arrays
    known = [r for r in np.flatnonzero(np.isin(t.phase, (Phase.PREFILL, Phase.LOADING))).tolist() if r not in gone]
    live, promised = coordinator.pools.live.copy(), np.zeros(len(p.meta), np.int64)
    for g, group in enumerate(coordinator.spec.groups):
        blocks, full = p.blocks[p.meta[g, Col.BASE] :], group.attention.kind is Kind.FULL
        holders = Counter(
            {b: int(blocks["refs"][b]) for row in _held(coordinator, range(len(t.phase)), g) for b in row}
        )
        if hit is not None and full:
            holders.update(hit.of_group(g)[0].tolist())
        for b in (b for row in _held(coordinator, gone, g) for b in row):
            holders[b] -= 1
            live[g] -= holders[b] == 0 and blocks["fence"][b] >= 0
        for r, row in zip(known, _held(coordinator, known, g), strict=True):
            holders.subtract(row)
            own = len(row) if full else sum(holders[b] == 0 or blocks["mark"][b] == Mark.PENDING for b in row)
            promised[g] += max(0, group.peak_blocks(int(t.total[r])) - own)
    return live, promised


def _with_holders(coordinator: Coordinator, hit: Match | None, refs: int) -> Counts:
    """Blocks of the hit, by group, that so many hold."""
    p, count = coordinator.pools.arrays, np.zeros(len(coordinator.spec.groups), np.int64)
    for g in range(len(count)) if hit is not None else ():
        device = hit.of_group(g)[0]
        count[g] = (p.blocks[p.meta[g, Col.BASE] + device[device > 0]]["refs"] == refs).sum()
    return count


def _held_and_wanted(coordinator: Coordinator, hit: Match | None, idle: Counts) -> Counts:
    """Blocks of the hit that count twice while it is held: as live, and in what its request wants.

    It wants blocks of full-attention groups that were ``idle`` as the victims were chosen, and of other groups all
    that nobody else holds now.
    """
    full = [group.attention.kind is Kind.FULL for group in coordinator.spec.groups]
    return np.where(full, idle, _with_holders(coordinator, hit, 1))


@contextmanager
def recorded(seen: list[Preemption]) -> Iterator[None]:
    """Adds the preemptions of while it lasts to ``seen``, in order.

    Fails where a request is let in that does not fit, with all that it knows, beside what is promised to others.
    """
    preempt, choose = Scheduler._preempt, Coordinator.choose_victims
    make_way, admit = Admission._make_way, Coordinator.admit
    plan, answer = Scheduler._plan_running, Scheduler._answer_shortage
    chosen: dict[str, Any] = {"needed": {}}

    @functools.wraps(preempt)
    def _preempt(self: Scheduler, seq: Tracked) -> None:
        name, ran, row_free = seq.request.request_id, seq.ran, self._roster.has_free_row
        before = frozenset(s.request.request_id for s in (*self.running, *self.waiting) if s.order < seq.order)
        preempt(self, seq)
        event = Preemption(name, ran, not before, row_free, before)
        if name in chosen["needed"]:
            needed = chosen["needed"].pop(name)
            live, promised = _count(self._coordinator)
            want = chosen["want"] + promised * chosen["promises"]
            wanted = _held_and_wanted(self._coordinator, chosen["match"], chosen["idle"])
            gained, lack = self._pools.free + wanted - chosen["free"], np.maximum(want - chosen["free"], 0)
            event = replace(event, lack=tuple(lack.tolist()), gained=tuple(gained.tolist()), needed=needed)
            event = replace(event, left=len(chosen["needed"]), enough=self._pools.fits(live + want - wanted))
        seen.append(event)

    @functools.wraps(choose)
    def choose_victims(
        self: Coordinator, candidates: Sequence[Tracked], want: Any, match: Match | None = None
    ) -> list[Tracked]:
        victims = choose(self, candidates, want, match)
        chosen.update(free=self.pools.free.copy(), want=want.copy(), promises=match is not None, needed={})
        chosen.update(match=match, idle=_with_holders(self, match, 0))
        for victim in victims:
            live, promised = _count(self, [other.row for other in victims if other is not victim], match)
            fits = self.pools.fits(live + want + promised * chosen["promises"])
            chosen["needed"][victim.request.request_id] = not fits
        return victims

    @functools.wraps(plan)
    def _plan_running(self: Scheduler) -> None:
        chosen["helped"] = {}
        plan(self)

    @functools.wraps(answer)
    def _answer_shortage(self: Scheduler, position: int) -> None:
        name, before = self.running[position].request.request_id, len(seen)
        way = chosen["helped"].get(name, slice(0))  # those who have given way to it, as this step was planned
        seen[way] = [replace(event, in_vain=True) for event in seen[way]]
        answer(self, position)
        if len(seen) > before:
            chosen["helped"][name] = slice(before, len(seen))

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
            live, promised = _count(self)
            fits, way = self.pools.fits(live + promised), chosen["way"]
            seen[way] = [replace(event, in_vain=not (admitted and fits)) for event in seen[way]]
            outcome = "is let in" if admitted else "is sent back for overdue reads"
            assert fits or seen[way], f"{seq.request.request_id} {outcome}, and too few blocks are left"
        return admitted

    Scheduler._plan_running, Scheduler._answer_shortage = _plan_running, _answer_shortage
    Scheduler._preempt, Coordinator.choose_victims = _preempt, choose_victims
    Admission._make_way, Coordinator.admit = _make_way, _admit
    try:
        yield
    finally:
        Scheduler._plan_running, Scheduler._answer_shortage = plan, answer
        Scheduler._preempt, Coordinator.choose_victims = preempt, choose
        Admission._make_way, Coordinator.admit = make_way, admit
