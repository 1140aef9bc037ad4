"""Who gives way, for what, and what it brings: recorded while a scheduler plans (I10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest.mock import patch

import inside
import numpy as np
import numpy.typing as npt

from kvtier import Scheduler
from kvtier.coordinator.admission import Admission
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.counts import SentBack
from kvtier.coordinator.extension import Extension
from kvtier.coordinator.match import Match
from kvtier.coordinator.room import Room
from kvtier.coordinator.tracked import Tracked
from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.row_state import Phase, row_at
from kvtier.pools import slab_loops
from kvtier.pools.pool_state import Col, Mark

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


def _held(coordinator: Coordinator | Room, rows: Sequence[int], g: int) -> list[list[int]]:
    """The blocks of group g that each of these rows holds."""
    t = coordinator.tables.arrays
    spans = [(row_at(t.geometry, g, r), *t.span[r, g, :2]) for r in rows]
    held = [t.table[at + lo : at + hi] for at, lo, hi in spans]
    return [blocks[blocks > 0].tolist() for blocks in held]  # states have gaps


def _count(
    coordinator: Coordinator | Room,
    gone: Sequence[int] = (),
    hit: Match | None = None,
    held: Match | None = None,
) -> tuple[Counts, Counts]:
    """Blocks by group, by a plain count: that are held, and that are promised to those with tokens to compute which
    they know, once the rows ``gone`` have left; what is part of a ``hit`` stays held in full-attention groups. A hit
    that is ``held`` meanwhile is nobody's in the other groups.

    What is promised is a row's most blocks, less those that it holds. In windows and chunks, which give up blocks as
    they move on, less those that no other row holds, or only such rows: then they are the last one's of these.
    """
    p, t = coordinator.pools.arrays, coordinator.tables.arrays
    known = [
        r
        for r in np.flatnonzero(np.isin(t.phase, (Phase.LOADING, Phase.FRESH, Phase.PREFILL))).tolist()
        if r not in gone
    ]
    live, promised = coordinator.pools.live.copy(), np.zeros(len(p.meta), np.int64)
    for g, group in enumerate(coordinator.spec.groups):
        blocks, full = p.blocks[p.meta[g, Col.BASE] :], group.attention.kind is Kind.FULL
        holders = Counter(
            {b: int(blocks["refs"][b]) for row in _held(coordinator, range(len(t.phase)), g) for b in row}
        )
        if hit is not None and full:
            holders.update(hit.of_group(g)[0].tolist())
        if held is not None and not full:
            holders.subtract(held.of_group(g)[0].tolist())
        for b in (b for row in _held(coordinator, gone, g) for b in row):
            holders[b] -= 1
            live[g] -= holders[b] == 0 and blocks["fence"][b] >= 0
        for r, row in zip(known, _held(coordinator, known, g), strict=True):
            holders.subtract(row)
            own = len(row) if full else sum(holders[b] == 0 or blocks["mark"][b] == Mark.PENDING for b in row)
            promised[g] += max(0, group.peak_blocks(int(t.total[r])) - own)
    return live, promised


def would_fit(coordinator: Coordinator, used: Counts, stuck: Counts) -> bool:
    """Whether so many blocks fit, once copies hold no more slabs fast than ``stuck`` [G].

    A load holds fast what it writes, in whichever slabs that lies; whoever needs those waits for its end
    (docs/LIVENESS.md).
    """
    meta = coordinator.pools.arrays.meta.copy()
    np.minimum(meta[:, Col.STUCK], stuck, out=meta[:, Col.STUCK])
    return bool(slab_loops.room(meta, len(coordinator.pools.arrays.slabs), used, np.empty_like(used)))


def _num_overdue(coordinator: Coordinator) -> int:
    return coordinator.connector.ledger.num_live - coordinator.connector.ledger.num_progressing


def _with_holders(coordinator: Coordinator | Room, hit: Match | None, refs: int) -> Counts:
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


@dataclass
class _Choice:
    """What victims were chosen for, and how full the pools were then (blocks by group)."""

    free: Counts
    want: Counts
    match: Match | None  # the hit of a waiting request; None: victims of a shortage, for whom no promise is kept
    idle: Counts  # blocks of the hit that nobody held
    needed: dict[str, bool]  # by victim that has not given way yet: without it the others do not make room


class _Watch:
    """Stands around what a scheduler does to plan a step: each method takes the original first, then its arguments."""

    def __init__(self, seen: list[Preemption]) -> None:
        self.seen = seen
        self._choice: _Choice | None = None
        self._helped: dict[str, tuple[slice, int]] = {}  # in this step, by request: who gave way to it; overdue copies
        self._way = slice(0)  # those who have given way to the request that is let in next

    def send_back(
        self, original: Callable[..., None], scheduler: Scheduler, seq: Tracked, reason: str, cause: SentBack
    ) -> None:
        if reason != "preempted":
            original(scheduler, seq, reason, cause)
            return
        name, row_free = seq.request.request_id, scheduler.roster.has_free_row
        ran = inside.coordinator(scheduler).has_run(seq)
        everyone = (*scheduler.running, *scheduler.waiting)
        before = frozenset(other.request.request_id for other in everyone if other.order < seq.order)
        original(scheduler, seq, reason, cause)
        event = Preemption(name, ran, not before, row_free, before)
        if self._choice is not None and name in self._choice.needed:
            event = self._gained(inside.coordinator(scheduler), self._choice, event)
        self.seen.append(event)

    def _gained(self, coordinator: Coordinator, choice: _Choice, event: Preemption) -> Preemption:
        """The event, with what the victims so far have brought."""
        needed = choice.needed.pop(event.request_id)
        live, promised = _count(coordinator, held=choice.match)
        want = choice.want if choice.match is None else choice.want + promised
        wanted = _held_and_wanted(coordinator, choice.match, choice.idle)
        return replace(
            event,
            left=len(choice.needed),
            needed=needed,
            enough=coordinator.pools.fits(live + want - wanted),
            lack=tuple(np.maximum(want - choice.free, 0).tolist()),
            gained=tuple((coordinator.pools.free + wanted - choice.free).tolist()),
        )

    def choose_victims(
        self,
        original: Callable[..., list[Tracked]],
        room: Room,
        candidates: Sequence[Tracked],
        want: Counts,
        match: Match | None = None,
    ) -> list[Tracked]:
        victims = original(room, candidates, want, match)
        free, idle = room.pools.free.copy(), _with_holders(room, match, 0)
        self._choice = choice = _Choice(free, want.copy(), match, idle, {})
        for victim in victims:
            live, promised = _count(room, [other.row for other in victims if other is not victim], match)
            fits = room.pools.fits(live + want if match is None else live + want + promised)
            choice.needed[victim.request.request_id] = not fits
        return victims

    def plan_running(self, original: Callable[..., None], extension: Extension) -> None:
        self._helped.clear()
        original(extension)

    def answer_shortage(self, original: Callable[..., None], extension: Extension, position: int) -> None:
        name, before = inside.running(extension).roster.running[position].request.request_id, len(self.seen)
        overdue = _num_overdue(inside.coordinator(inside.running(extension)))
        way, until_then = self._helped.get(name, (slice(0), overdue))
        if overdue == until_then:  # else blocks were lost meanwhile
            self._mark_in_vain(way, True)
        original(extension, position)
        if len(self.seen) > before:
            self._helped[name] = slice(before, len(self.seen)), overdue

    def make_way(
        self, original: Callable[..., Match], admission: Admission, seq: Tracked, match: Match, *way: Any
    ) -> Match:
        before = len(self.seen)
        match = original(admission, seq, match, *way)
        self._way = slice(before, len(self.seen))
        return match

    def admit(
        self, original: Callable[..., bool], coordinator: Coordinator, seq: Tracked, match: Match, row: int
    ) -> bool:
        overdue = _num_overdue(coordinator)
        stuck = coordinator.pools.arrays.meta[:, Col.STUCK].copy()
        admitted = original(coordinator, seq, match, row)
        if _num_overdue(coordinator) == overdue:  # else blocks were lost meanwhile
            fits = would_fit(coordinator, sum(_count(coordinator)), stuck)
            self._mark_in_vain(self._way, not (admitted and fits))
            outcome = "is let in" if admitted else "is sent back for overdue reads"
            assert fits or self.seen[self._way], f"{seq.request.request_id} {outcome}, and too few blocks are left"
        return admitted

    def _mark_in_vain(self, way: slice, in_vain: bool) -> None:
        self.seen[way] = [replace(event, in_vain=in_vain) for event in self.seen[way]]


@contextmanager
def recorded(seen: list[Preemption]) -> Iterator[None]:
    """Adds the preemptions of while it lasts to ``seen``, in order.

    Fails where a request is let in that does not fit, with all that it knows, beside what is promised to others.
    """
    watch = _Watch(seen)
    places = [
        (Scheduler, "_back_to_waiting", watch.send_back),
        (Extension, "plan", watch.plan_running),
        (Extension, "_answer_shortage", watch.answer_shortage),
        (Room, "choose_victims", watch.choose_victims),
        (Coordinator, "admit", watch.admit),
        (Admission, "_make_way", watch.make_way),
    ]
    with ExitStack() as stack:
        for owner, name, method in places:
            stack.enter_context(patch.object(owner, name, _around(getattr(owner, name), method)))
        yield


def _around(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """The original's stand-in, which calls ``method`` with it; a bound one can be pickled by its name."""

    @wraps(original)
    def call(self: object, *args: Any) -> Any:
        return method(original, self, *args)

    return call
