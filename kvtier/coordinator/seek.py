"""Whether a waiting request's prefix is in the remote, and whether to fetch it.

Owns       the questions, and the choice.
Promises   a request asks once. It waits for answers for a share of the time that its prefill would take, and not at all
           if answers take longer than that. A late answer counts while the request still waits for something else. It
           fetches only what a hit needs that neither tier here has, and only if that is estimated to take less time
           than computing. Others pass it. What the answers say is there is not stored again.
Does not   admit: once a fetch has landed, the request finds its blocks in the host tier as any other.

The first question asks for the end of the longest hit, and for some of the tiles before it. Tiles are there up to some
point, which further questions enclose. If the longest hit's end is not there, the last question asks for the ends of
shorter hits, from that point downwards. A remote that has lost single tiles may say too much: the fetch then fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvtier.coordinator.match import Match
from kvtier.geometry.keys import KeyArray
from kvtier.pools.block_pool import BlockPools, Mark
from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.moves import Seek, SeekState
from kvtier.remote.objects import Name, Objects
from kvtier.remote.tier import RemoteTier

LEAST_S = 0.02
"""A request waits so long for each answer, however short its prefill: engines take answers between their steps."""
UNKNOWN_S = 1.0
"""It waits so long for all answers before anybody has told how long a prefill takes. There are two for a turn of a
conversation, four for a long text."""
MOST_SAMPLES = 64
"""Tiles in a question."""
MOST_ENDS = 256
"""Shorter hits that are asked for."""
SPEED_S = 60.0
"""The speed of a fetch keeps others from being tried for so long."""
CALL_S = 0.005
"""What a fetch takes beside its bytes, until the first one has told."""

ComputeSeconds = Callable[[int, int], float | None]


class Asking(Protocol):
    """A request, as far as the remote is concerned."""

    seek: Seek | None

    @property
    def keys(self) -> KeyArray:
        """uint64 [units, 2]: of its tokens."""

    @property
    def tokens(self) -> Sized:
        """All of them; at least one is left to compute."""


A = TypeVar("A", bound=Asking)


class Seeker(Generic[A]):
    """Asks for the requests of one cache. ``device``: its device pools."""

    def __init__(self, remote: RemoteTier, device: BlockPools, match: Callable[[A], Match]) -> None:
        """``match``: what the two tiers here have of a request."""
        self._match = match
        self._remote = remote
        self._plan = remote.plan
        self._device = device
        self.compute_s: ComputeSeconds = lambda start, end: None
        """How long tokens take to compute, if somebody knows; an engine may set it."""

    def next_look_s(self, seek: Seek | None) -> float:
        """When the request stops to wait for an answer; infinite if it waits for none."""
        looks = seek is not None and seek.state is SeekState.LOOKING and not seek.is_late
        return seek.until_s if seek is not None and looks else float("inf")

    def is_waiting(self, seq: A) -> bool:
        """Whether the request should wait for the remote: for an answer, or for its fetch. Starts either."""
        seek = seq.seek
        if seek is None:
            match = self._match(seq)
            if match.pending:
                return False  # it waits for that first, and asks then
            seek = seq.seek = self._begin(seq, match)
        if seek.state is SeekState.FOUND:
            self._fetch(seq, seek)
        if seek.state is SeekState.LOOKING:
            return self._waits_for_answer(seek)
        if seek.state is SeekState.FETCHING and not self._remote.is_live(seek.ticket):
            seek.state = SeekState.OVER
        return seek.state is SeekState.FETCHING

    def _waits_for_answer(self, seek: Seek) -> bool:
        if not self._remote.is_on:  # the cache was reset since
            seek.state = SeekState.OVER
            return False
        now = self._remote.now()
        if now >= seek.until_s and not seek.is_late:
            seek.is_late = True  # from now on its answers count only as long as it waits for something else
            self._remote.note_late(now - seek.asked_s)
        return not seek.is_late

    # --- questions --------------------------------------------------------------------------------

    def _begin(self, seq: A, match: Match) -> Seek:
        unit, stride, remote = self._plan.unit, self._plan.stride, self._remote
        bound = (len(seq.tokens) - 1) // unit * unit
        seek = Seek(SeekState.OVER, bound=bound, have=match.num_tokens, low=match.full_tokens // stride)
        if bound <= match.num_tokens or not remote.is_on or not remote.breaker.allows(remote.now()):
            return seek
        whole = len(seq.tokens) // unit * unit  # no hit of its own ends there, but what it stores does
        seek.here, seek.high = seek.low, max(seek.low, whole // stride)
        if not self._plan.has_full:
            seek.low = seek.high
        seek.state = SeekState.LOOKING
        took = self.compute_s(match.num_tokens, bound)
        wait_s = UNKNOWN_S if took is None else remote.patience * took
        seek.until_s = remote.now() + wait_s
        seek.is_late = remote.answer_s > max(wait_s, LEAST_S)
        self._ask(seq.keys, seek, sorted({bound, whole}))
        return seek

    def _ask(self, keys: KeyArray, seek: Seek, ends: list[int]) -> None:
        """Asks for some of the tiles that may be there, and for the ends of hits at these boundaries."""
        plan, names = self._plan, list[Name]()
        count = min(MOST_SAMPLES, seek.high - seek.low)
        seek.samples = [seek.low + -(-(seek.high - seek.low) * (k + 1) // count) for k in range(count)]
        seek.ends, seek.sizes = ends, []
        for at in seek.samples:
            names += plan.names_at(keys, at * plan.stride)
        per_sample = len(names) // max(1, count)
        for n in ends:
            signs = plan.signs_of_end(keys, n)
            seek.sizes.append(len(signs))
            names += signs
        if not names:
            self._go_on(keys, seek, [])
            return

        def answered(answer: Answer) -> None:
            if not answer.outcomes or not self._remote.is_on:
                self._remote.end_look(seek, SeekState.OVER)
                return
            self._remote.learn(names, answer.outcomes)
            there = [outcome is Outcome.OK for outcome in answer.outcomes]
            samples = [all(there[k * per_sample : (k + 1) * per_sample]) for k in range(count)]
            self._go_on(keys, seek, samples + there[count * per_sample :])

        seek.asked_s = self._remote.now()
        seek.until_s = max(seek.until_s, seek.asked_s + LEAST_S)
        seek.ticket = self._remote.ask(names, answered)

    def _go_on(self, keys: KeyArray, seek: Seek, found: list[bool]) -> None:
        """An answer has come: for each sample, then for each name of an end."""
        for at, there in zip(seek.samples, found, strict=False):
            if not there:
                seek.high = at - 1
                break
            seek.low = at
        signs, first = found[len(seek.samples) :], 0
        for n, size in zip(seek.ends, seek.sizes, strict=True):
            (seek.there if all(signs[first : first + size]) else seek.lacking).add(n)
            first += size
        if seek.low < seek.high:
            self._ask(keys, seek, [])
            return
        tried = self._shorter(seek) if seek.is_second else [seek.bound]
        reach = seek.low * self._plan.stride
        n = next((n for n in tried if n not in seek.lacking and self._plan.tiles_of(n) <= reach), 0)
        if n > seek.have:
            seek.end = n
            self._end_look(keys, seek, SeekState.FOUND)
        elif not seek.is_second:
            seek.is_second = True
            self._ask(keys, seek, self._shorter(seek))
        else:
            self._end_look(keys, seek, SeekState.OVER)

    def _end_look(self, keys: KeyArray, seek: Seek, state: SeekState) -> None:
        """All is known that answers can tell."""
        plan, reach = self._plan, seek.low * self._plan.stride
        if any(plan.tiles_of(n) > reach for n in seek.there):  # the remote has lost what stands before these ends
            self._remote.forget(plan.names_at(keys, reach + plan.stride), were_believed=True)
        if seek.is_late or state is SeekState.OVER:
            self._believe(keys, seek)
        self._remote.end_look(seek, state)

    def _believe(self, keys: KeyArray, seek: Seek) -> None:
        """The tiles that the remote has are not fetched, and need not be stored."""
        for at in range(seek.here + 1, seek.low + 1) if self._plan.has_full else ():
            self._remote.believe(self._plan.names_at(keys, at * self._plan.stride))

    def _shorter(self, seek: Seek) -> list[int]:
        """Boundaries below the bound that the tiles reach, the longest first."""
        unit, plan = self._plan.unit, self._plan
        top = min(seek.bound - unit, plan.most_with(seek.low * plan.stride))
        return list(range(top, max(seek.have, top - MOST_ENDS * unit), -unit))

    # --- the fetch --------------------------------------------------------------------------------

    def _fetch(self, seq: A, seek: Seek) -> None:
        seek.state = SeekState.FETCHING if self._remote.is_on and self._starts_fetch(seq, seek) else SeekState.OVER
        if seek.state is SeekState.OVER:
            self._believe(seq.keys, seek)

    def _starts_fetch(self, seq: A, seek: Seek) -> bool:
        remote, n = self._remote, seek.end
        needed = self._plan.of_hit(seq.keys, n)
        missing = self._are_absent(needed)
        wanted = needed.have(missing)
        objects, absent = needed.only(wanted), missing[wanted[needed.of]]
        num_bytes = int(remote.bytes_of(objects.groups).sum())
        speed, took = remote.recent_speed(SPEED_S), self.compute_s(seek.have, n)
        if took is not None and speed and max(CALL_S, remote.answer_s) + num_bytes / speed >= took:
            remote.counts.not_worth += 1
            return False
        if not len(objects):
            return False
        groups = needed.groups[~missing]
        hosts = remote.host.find(groups, needed.keys[~missing])
        ticket = remote.fetch(objects, absent, (groups[hosts > 0], hosts[hosts > 0]))
        if not ticket:
            remote.counts.no_room += 1
            return False
        seek.ticket, seek.fetched = ticket, objects.keys[absent]
        return True

    def _are_absent(self, what: Objects) -> np.ndarray:
        """bool [n]: which of their blocks neither tier here has, or is about to have."""
        device = self._device.find(what.groups, what.keys)
        ready = self._device.arrays.mark[self._device.entries(what.groups, device)] == Mark.READY
        absent: np.ndarray = ~((device > 0) & ready) & (self._remote.host.find(what.groups, what.keys) == 0)
        return absent
