"""Who shares the engine's steps: a caller of many answers does not slow down callers of few.

A step of 65 rows can take three times as long as a step of one. So each row that a caller adds slows all others down.
If callers with fewer answers run beside it, all of its answers rest in some steps:

    budget   in the mean, a step may take ``STRETCH`` times as long as one without these answers
    debt     what steps have taken beyond their budget; while there is any, the answers rest

Where rows cost next to nothing, as on a GPU with room, there is never a debt, and nobody rests.

Owns       which requests are answers to which share, and the debt.
Promises   beside callers of many answers, the others keep more than half of the rate that they have without these
           callers. No answer rests for ever: all go on together once the debt is paid.
Does not   look at prompts: the scheduler shares out a step's tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

STRETCH = 1.5
"""The mean step may take so many times as long as one without the answers that rest. Two would leave the others half of
their rate in the engine; to write many answers out takes a part of that."""
LOOK_EVERY = 64
"""Steps without debt, after which one tells anew how long it takes without these answers."""
KEPT = 8
"""Steps without them, of which the shortest counts: others were held up by what had gone before."""
LONGEST_DEBT_S = 1.0
"""A stall of the machine is nobody's answers."""


class Shares:
    """The shares of one engine's callers; all calls come from its thread."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}
        self._open: dict[str, int] = {}
        """Requests of each share that are not reported yet."""
        self._sizes: dict[str, int] = {}
        """Requests that each share has had: the last one of many does not make it a share of one."""
        self._by_size: Counter[int] = Counter()
        """How many shares there are of each size."""
        self._alone: deque[float] = deque(maxlen=KEPT)
        self._debt_s = 0.0
        self._since_look = 0
        self._is_beside = self._rested = False

    def add(self, name: str, share: str) -> None:
        """The request ``name`` is of this share."""
        size = self._sizes.get(share, 0)
        self._of[name] = share
        self._open[share] = self._open.get(share, 0) + 1
        self._sizes[share] = size + 1
        if size:
            self._count(size, -1)
        self._count(size + 1, 1)

    def drop(self, name: str) -> None:
        """The request has ended."""
        share = self._of.pop(name)
        self._open[share] -= 1
        if not self._open[share]:
            self._count(self._sizes.pop(share), -1)
            del self._open[share]

    def _count(self, size: int, more: int) -> None:
        self._by_size[size] += more
        if not self._by_size[size]:
            del self._by_size[size]

    @property
    def are_even(self) -> bool:
        """Whether all shares have equally many requests: then none rests."""
        return len(self._by_size) <= 1

    def resting(self, running: Sequence[str]) -> Collection[str]:
        """The requests that sit the next step out, of those that are running."""
        sizes = {name: self._sizes[self._of[name]] for name in running}
        least = min(sizes.values(), default=0)
        self._is_beside = any(size > least for size in sizes.values())
        self._rested = self._is_beside and (self._debt_s > 0 or not self._alone or self._since_look >= LOOK_EVERY)
        if not self._rested:
            return ()
        return {name for name, size in sizes.items() if size > least}

    def note(self, took_s: float, has_prompts: bool) -> None:
        """The step has taken ``took_s`` seconds. ``has_prompts``: also for parts of prompts, nobody's debt."""
        if self.are_even or not self._is_beside:
            self._debt_s = 0.0
            return
        self._since_look += 1
        if self._rested and not has_prompts:
            self._alone.append(took_s)
            self._since_look = 0
        if self._alone:
            alone_s = min(self._alone)
            if has_prompts:
                took_s = alone_s if self._rested else STRETCH * alone_s
            self._debt_s = min(max(0.0, self._debt_s + took_s - STRETCH * alone_s), LONGEST_DEBT_S)
