"""Whether a waiting request's prefix is in the store, and whether to fetch it.

Owns       the questions, and the choice.
Promises   a request asks once, and waits for answers ``look_s`` at most. It fetches only what a hit needs that neither
           tier here has, and only if that is estimated to take less time than computing. Others pass it meanwhile.
Does not   admit: once a fetch has landed, the request finds its blocks in the host tier as any other.

A first question asks for the tiles behind the hit, and for the end of the longest hit. If this end is not there, a
second one asks for the ends of shorter hits, from the last tile downwards.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import numpy as np

from kvtier.coordinator.match import Match
from kvtier.coordinator.request import Tracked
from kvtier.pools.block_pool import BlockPools, Mark
from kvtier.remote.block_store import Answer, Outcome
from kvtier.remote.moves import Seek, SeekState
from kvtier.remote.objects import StoredObject
from kvtier.remote.tier import RemoteTier

LOOK_S = 0.02
"""For all questions of a request together."""
MOST_NAMES = 4096
"""In a question."""
MOST_ENDS = 512
"""Shorter hits that are asked for."""
CALL_S = 0.005
"""What a fetch takes beside its bytes, until the first one has told."""

ComputeSeconds = Callable[[int, int], float | None]

_Named = tuple[int, tuple[str, bytes]]
"""The token at its end, and a name."""


class Seeker:
    """Asks for the requests of one cache. ``device``: its device pools."""

    def __init__(self, remote: RemoteTier, device: BlockPools, match: Callable[[Tracked], Match]) -> None:
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

    def is_waiting(self, seq: Tracked) -> bool:
        """Whether the request should wait for the store: for an answer, or for its fetch. Starts either."""
        seek = seq.seek
        if seek is None:
            seek = seq.seek = self._begin(seq, self._match(seq))
        while seek.state is not SeekState.OVER:
            if seek.state is SeekState.FETCHING:
                if self._remote.is_live(seek.ticket):
                    return True
                seek.state = SeekState.OVER
            elif seek.found is not None:
                self._go_on(seq, seek)
            elif self._remote.now() < seek.until_s:
                return True
            else:
                if not seek.is_late:
                    self._remote.note_late()
                seek.is_late = True
                return False  # if it must wait for something else, a late answer still counts
        return False

    def _begin(self, seq: Tracked, match: Match) -> Seek:
        unit, remote = self._plan.unit, self._remote
        bound = (len(seq.tokens) - 1) // unit * unit
        seek = Seek(SeekState.OVER, bound=bound, have=match.num_tokens, reach=match.full_tokens // unit * unit)
        if match.pending or bound <= match.num_tokens or not remote.is_on or not remote.breaker.allows(remote.now()):
            return seek
        seek.state, seek.until_s = SeekState.LOOKING, remote.now() + LOOK_S
        self._ask(seek, self._next_tiles(seq, seek), self._signs(seq, [bound]))
        return seek

    def _ask(self, seek: Seek, tiles: list[_Named], ends: list[_Named]) -> None:
        seek.tiles, seek.ends = [n for n, _ in tiles], [n for n, _ in ends]
        if not tiles and not ends:
            seek.found = ()
            return
        seek.found = None

        def answered(answer: Answer) -> None:
            if seek.ticket == answer.ticket:
                seek.found = tuple(outcome is Outcome.OK for outcome in answer.outcomes)

        left_s = max(0.001, seek.until_s - self._remote.now())
        seek.ticket = self._remote.ask([name for _, name in tiles + ends], left_s, answered)

    def _next_tiles(self, seq: Tracked, seek: Seek) -> list[_Named]:
        """Tiles and full-attention blocks of their own, beyond what is here, as far as the bound."""
        plan, found = self._plan, list[_Named]()
        if plan.tile_tokens:
            for i in range(seek.reach // plan.tile_tokens, seek.bound // plan.tile_tokens):
                found.append(((i + 1) * plan.tile_tokens, plan.tile_name(seq.keys, i)))
        found += plan.full_singles(seq.keys, seek.reach, seek.bound)
        return found[:MOST_NAMES]

    def _signs(self, seq: Tracked, boundaries: list[int]) -> list[_Named]:
        return [(n, name) for n in boundaries for name in self._plan.signs_of_end(seq.keys, n)]

    def _go_on(self, seq: Tracked, seek: Seek) -> None:
        """An answer has come."""
        found, is_first = seek.found or (), not seek.is_second
        lacking = {n for n, there in zip(seek.tiles, found, strict=False) if not there}
        if seek.tiles:
            seek.reach = max([seek.reach, *takewhile(lambda n: n not in lacking, sorted(set(seek.tiles)))])
        ends = {n for n, there in zip(seek.ends, found[len(seek.tiles) :], strict=True) if not there}
        tried = [seek.bound] if is_first else self._shorter(seek)
        good = (n for n in tried if n not in ends and self._plan.tiles_of(n) <= seek.reach)
        n = next(good, 0)
        if n > seek.have:
            self._fetch(seq, seek, n)
        elif is_first:
            seek.is_second = True
            self._ask(seek, [], self._signs(seq, self._shorter(seek)))
        else:
            seek.state = SeekState.OVER

    def _shorter(self, seek: Seek) -> list[int]:
        """Boundaries below the bound that the tiles reach, the longest first."""
        unit = self._plan.unit
        top = min(seek.bound - unit, self._plan.most_with(seek.reach))
        return list(range(top, max(seek.have, top - MOST_ENDS * unit), -unit))

    def _fetch(self, seq: Tracked, seek: Seek, n: int) -> None:
        seek.state, remote = SeekState.OVER, self._remote
        objects, absent = [], []
        for what in self._plan.of_hit(seq.keys, n):
            missing = self._is_absent(what)
            if missing.any():
                objects.append(what)
                absent.append(missing)
        num_bytes = sum(int(remote.bytes_of(what.groups).sum()) for what in objects)
        speed, took = remote.counts.fetch_bytes_per_s, self.compute_s(seek.have, n)
        if took is not None and speed and CALL_S + num_bytes / speed >= took:
            remote.counts.not_worth += 1
            return
        if not objects:
            return
        here = [(what.groups[~missing], what.keys[~missing]) for what, missing in zip(objects, absent, strict=True)]
        groups, keys = (np.concatenate(part) for part in zip(*here, strict=True))
        hosts = remote.host.find(groups, keys)
        ticket = remote.fetch(objects, absent, (groups[hosts > 0], hosts[hosts > 0]))
        if not ticket:
            remote.counts.no_room += 1
            return
        seek.state, seek.ticket = SeekState.FETCHING, ticket
        seek.fetched = np.concatenate([what.keys[missing] for what, missing in zip(objects, absent, strict=True)])

    def _is_absent(self, what: StoredObject) -> np.ndarray:
        """bool [n]: which of its blocks neither tier here has, or is about to have."""
        device = self._device.find(what.groups, what.keys)
        ready = self._device.arrays.mark[self._device.entries(what.groups, device)] == Mark.READY
        absent: np.ndarray = ~((device > 0) & ready) & (self._remote.host.find(what.groups, what.keys) == 0)
        return absent
