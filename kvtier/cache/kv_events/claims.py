"""Which blocks a listener is told of: full-attention blocks, as far as a hit can use them.

Owns       where each key can be found, for keys with a known text and for others; what listeners were told.
Promises   a block is claimed if a hit can end at it or at a block that follows it. So all before it is there in the
           full-attention groups. At the hit's end every local group has what its mask needs. A listener who
           looks for the longest prefix of a text finds at least the hit that ``match`` would, up to its last block.
           A block that is claimed has all blocks before it claimed (I25). With a remote, hits that fetch from it count
           as well, while it is used.
Does not   tell when: ``take`` says what has changed since it was called last.

A router knows full attention alone. Where windows lie is folded into this one claim: what they rule out is not told.
A block is claimed in one medium. It is the device's as long as the block and all before it are there. It is the host's
as long as all of them are in either tier. Else it is the remote's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtier.cache.events import EventKind, KVEvent
from kvtier.cache.kv_events import wire
from kvtier.cache.kv_events.stored import Needs, RemoteRule, runs_of
from kvtier.cache.kv_events.texts import Ordered, Run, Texts
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from kvtier.remote.objects import Name, ObjectPlan

NOWHERE, DEVICE, HOST, STORE = 0, 1, 2, 3
MEDIA = {DEVICE: wire.GPU, HOST: wire.CPU, STORE: wire.STORAGE}
"""Values of ``Run.claimed``."""

Mask = npt.NDArray[np.bool_]
Claimed = npt.NDArray[np.uint8]


class Claims:
    """Claims on one cache whose groups have blocks of one size."""

    def __init__(self, spec: CacheSpec, most_blocks: int, plan: ObjectPlan | None = None) -> None:
        """``most_blocks``: of texts that are known, at most. ``plan``: of the objects in the remote, if any."""
        self.block_tokens = spec.hit_tokens
        self._bits = {
            (name, tier): 1 << (2 * g + side)
            for g, name in enumerate(spec.names)
            for side, tier in enumerate(("device", "host"))
        }
        self._full = [2 * g for g, group in enumerate(spec.groups) if group.attention.kind is Kind.FULL]
        self._local = [2 * g for g, group in enumerate(spec.groups) if group.attention.kind is not Kind.FULL]
        self._needs = [Needs(group) for group in spec.groups if group.attention.kind is not Kind.FULL]
        self._rule = None if plan is None else RemoteRule(plan)
        self._remote_is_used = False
        num_local = len(self._local), 0 if self._rule is None else self._rule.num_big_local
        self.texts = Texts(self.block_tokens, num_local, most_blocks, self._forget)
        self._loose: dict[int, int] = {}  # where keys of no known text can be found
        self._loose_remote: dict[int, int] = {}  # and what the remote has under such keys
        self._changed: set[Run] = set()
        self._gone: list[wire.Event] = []

    def add_text(self, keys: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32]) -> None:
        """A text, int32 [n], and the keys of its full blocks, uint64 [n // block_tokens]."""
        run = self.texts.add(keys, tokens)
        if run is None:
            return
        for bits, loose in ((run.found, self._loose), (run.stored, self._loose_remote)):
            if loose:
                pop = loose.pop
                bits[:] = [pop(key, 0) for key in run.keys]
        self._changed.add(run)

    def note(self, events: Iterable[KVEvent]) -> None:
        """Notes that what can be found has changed."""
        for event in events:
            bit, comes = self._bits[event.group, event.tier], event.kind is EventKind.STORED
            touched: defaultdict[Run, list[int]] = defaultdict(list)
            find = self.texts.find
            for key in event.keys[:, 0].tolist():
                place = find(key)
                if place is None:
                    _note_loose(self._loose, key, bit, comes)
                else:
                    touched[place[0]].append(place[1])
            for run, at in touched.items():
                if comes:
                    run.found[at] |= np.uint64(bit)
                else:
                    run.found[at] &= ~np.uint64(bit)
            self._changed.update(touched)

    def note_remote(self, changes: Mapping[Name, bool], is_used: bool) -> None:
        """Objects that the remote has now, or may not have any more; and whether requests are asked for there."""
        assert self._rule is not None
        if is_used != self._remote_is_used:
            self._remote_is_used = is_used
            self._changed.update(self.texts.runs)
        for name, comes in changes.items():
            key, bit = self._rule.place(name)
            place = self.texts.find(key)
            if place is None:
                _note_loose(self._loose_remote, key, bit, comes)
                continue
            run, at = place
            bits = int(run.stored[at])
            run.stored[at] = bits | bit if comes else bits & ~bit
            self._changed.add(run)

    def _forget(self, run: Run) -> None:
        """A run is known no more; it has no followers."""
        for found, loose in ((run.found, self._loose), (run.stored, self._loose_remote)):
            loose |= {key: bits for key, bits in zip(run.keys, found.tolist(), strict=True) if bits}
        self._gone += self._removed(run, np.zeros(len(run), np.uint8))
        self._changed.discard(run)
        if run.after is not None:
            self._changed.add(run.after)

    # --- what a hit can use -----------------------------------------------------------------------

    def take(self) -> list[wire.Event]:
        """The changes to be told: parents come before the blocks that follow them, and go after them."""
        gone, self._gone = self._gone, []
        touched = sorted(self._settle(), key=lambda run: run.start)
        told: list[wire.Event] = []
        left: list[wire.Event] = []
        for run in touched:
            nearest = np.where(run.on_device, DEVICE, np.where(run.complete, HOST, STORE))
            claims = np.where(run.live, nearest, NOWHERE).astype(np.uint8)
            told += self._stored(run, run.claimed, claims)
            left += self._removed(run, claims)
            run.claimed = claims
        return [*gone, *told, *reversed(left)]

    def everything(self) -> list[wire.Event]:
        """All that was told and still holds, to begin anew."""
        told: list[wire.Event] = [wire.AllBlocksCleared()]
        for run in self.texts.runs:
            told += self._stored(run, np.zeros(len(run), np.uint8), run.claimed)
        return told

    def _settle(self) -> set[Run]:
        """Brings all runs up to date; returns those whose claims may differ."""
        touched, changed = set[Run](), Ordered(self._changed, lambda run: run.start)
        self._changed = set()
        while changed:
            run = changed.pop()
            touched.add(run)
            for follower in self._go_down(run):
                changed.add(follower)
        upward = Ordered(touched, lambda run: -run.start)
        while upward:
            run = upward.pop()
            touched.add(run)
            was_live = bool(run.live[0])
            self._go_up(run)
            if run.after is not None and run.live[0] != was_live:
                upward.add(run.after)
        return touched

    def _there(self, run: Run, shift: int) -> Mask:
        """Whether either tier has the blocks of a group."""
        there: Mask = (run.found & np.uint64(3 << shift)) != 0
        return there

    def _go_down(self, run: Run) -> set[Run]:
        """Works out from what was found what is complete, and how long the ends in local groups are. Returns the
        followers that this concerns."""
        after, at, n = run.after, run.at, len(run)
        complete = np.full(n, after is None or bool(after.complete[at]))
        on_device = np.full(n, after is None or bool(after.on_device[at]))
        for shift in self._full:
            complete &= self._there(run, shift)
            on_device &= (run.found & np.uint64(DEVICE << shift)) != 0
        complete, on_device = np.logical_and.accumulate(complete), np.logical_and.accumulate(on_device)
        runs = np.empty_like(run.runs)
        for k, shift in enumerate(self._local):
            runs[k] = runs_of(self._there(run, shift), 0 if after is None else int(after.runs[k, at]))
        differs = (complete != run.complete) | (on_device != run.on_device) | (runs != run.runs).any(0)
        run.complete, run.on_device, run.runs = complete, on_device, runs
        if self._rule is not None:
            differs |= self._rule.go_down(run, lambda run, g: self._there(run, 2 * g))
        return {follower for follower in run.followers if differs[follower.at]}

    def _go_up(self, run: Run) -> None:
        """Works out at which blocks hits end or pass, from what is complete and from the runs that follow."""
        live = run.complete.copy()
        for k, needs in enumerate(self._needs):
            live &= run.runs[k] >= needs.of(run.start, run.start + len(run))
        if self._remote_is_used:
            live |= run.by_remote
        for follower in run.followers:
            if follower.live[0]:
                live[follower.at] = True
        run.live = np.logical_or.accumulate(live[::-1])[::-1]

    def _stored(self, run: Run, before: Claimed, now: Claimed) -> Iterator[wire.Event]:
        """An event for each stretch of blocks that are claimed elsewhere than before."""
        marks = np.where(now == before, NOWHERE, now)
        edges = np.flatnonzero(np.diff(marks, prepend=NOWHERE, append=NOWHERE)).tolist()
        for first, end in pairwise(edges):
            if marks[first] == NOWHERE:
                continue
            parent = run.keys[first - 1] if first else run.parent_key
            tokens = run.tokens[first:end].reshape(-1).tolist()
            yield wire.stored(run.keys[first:end], parent, tokens, self.block_tokens, MEDIA[int(marks[first])])

    def _removed(self, run: Run, now: Claimed) -> Iterator[wire.Event]:
        """An event for each medium that loses blocks; the last block goes first."""
        for place, medium in MEDIA.items():
            lost = np.flatnonzero((run.claimed == place) & (now != place))[::-1].tolist()
            if lost:
                yield wire.removed([run.keys[i] for i in lost], medium)


def _note_loose(loose: dict[int, int], key: int, bit: int, comes: bool) -> None:
    bits = loose.get(key, 0)
    bits = bits | bit if comes else bits & ~bit
    if bits:
        loose[key] = bits
    else:
        loose.pop(key, None)
