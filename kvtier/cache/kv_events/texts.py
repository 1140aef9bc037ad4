"""The texts of requests, as a tree of runs of blocks: what a key stands for.

Owns       for each block of a known text: the key, the tokens and the block before it; at most ``most_blocks`` blocks.
Promises   a block that is known has all blocks before it known. Of two texts with a common beginning this is kept once.
           The run that was used least recently, and that no other run follows, is forgotten first.
Does not   know where content is (claims).

Keys on the wire have 64 bits: the low half of a cache's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count, repeat

import numpy as np
import numpy.typing as npt


class Run:
    """Blocks of one text, one after the other, that came to be known together."""

    __slots__ = (
        "after",
        "at",
        "big",
        "big_runs",
        "by_remote",
        "claimed",
        "complete",
        "followers",
        "found",
        "keys",
        "live",
        "on_device",
        "reach",
        "runs",
        "signs",
        "start",
        "stored",
        "tokens",
    )

    def __init__(
        self,
        keys: list[int],
        tokens: npt.NDArray[np.int32],
        after: Run | None,
        at: int,
        num_local: int,
        num_big_local: int,
    ) -> None:
        self.keys = keys
        self.tokens = tokens
        """int32 [len(keys), block_tokens]."""
        self.after = after
        """The run with the block before the first one; None at the beginning of a text."""
        self.at = at
        """That block's place there."""
        self.start: int = 0 if after is None else after.start + at + 1
        """Blocks of the text before the first one."""
        self.followers: set[Run] = set()
        n = len(keys)
        self.found = np.zeros(n, np.uint64)
        """Bits of (group, tier) for each block: it can be found there."""
        self.complete = np.zeros(n, bool)
        """Whether it and all blocks before it are there, in the full-attention groups."""
        self.on_device = np.zeros(n, bool)
        """Whether it and all blocks before it are on the device."""
        self.runs = np.zeros((num_local, n), np.int64)
        """Blocks there, one after the other, that end with this one, by local group."""
        self.stored = np.zeros(n, np.uint64)
        """Bits of objects that the remote has under the key of each block (``kvtier.cache.kv_events.stored``)."""
        self.reach = np.zeros(n, bool)
        """Whether the tiles up to here are in the remote, or their blocks in the tiers here."""
        self.big = np.zeros(n, bool)
        """Whether all full-attention blocks up to here that are objects by themselves are there, or here."""
        self.big_runs = np.zeros((num_big_local, n), np.int64)
        """The same as ``runs``, for groups whose blocks are objects by themselves: in the remote or here."""
        self.signs: list[npt.NDArray[np.bool_]] = []
        """Whether the remote has each block of a window before the run, and of its own, for each of these groups."""
        self.by_remote = np.zeros(n, bool)
        """Whether the remote allows a hit that ends here."""
        self.live = np.zeros(n, bool)
        """Whether a hit ends here, or at a block that follows."""
        self.claimed = np.zeros(n, np.uint8)
        """Where listeners believe it to be."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def parent_key(self) -> int | None:
        """The key of the block before the first one."""
        return None if self.after is None else self.after.keys[self.at]


class Ordered:
    """Runs to be looked at, the one of the smallest ``rank`` first, each once as long as it is here."""

    def __init__(self, runs: Iterable[Run], rank: Callable[[Run], int]) -> None:
        self._rank, self._numbers = rank, count()
        self._here = set(runs)
        self._heap = [(rank(run), next(self._numbers), run) for run in self._here]
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._here)

    def add(self, run: Run) -> None:
        """Nothing changes if it is here already."""
        if run not in self._here:
            self._here.add(run)
            heappush(self._heap, (self._rank(run), next(self._numbers), run))

    def pop(self) -> Run:
        """The first one, which leaves."""
        run = heappop(self._heap)[2]
        self._here.remove(run)
        return run


class Texts:
    """The known texts of one cache."""

    def __init__(
        self, block_tokens: int, num_local: tuple[int, int], most_blocks: int, forget: Callable[[Run], None]
    ) -> None:
        """``num_local``: groups that are local, and those of them whose blocks are objects of a remote by themselves.
        ``forget`` is told of each run that goes."""
        self._block_tokens, self._num_local = block_tokens, num_local
        self.most_blocks = most_blocks
        self._forget = forget
        self._places: dict[int, tuple[Run, int]] = {}
        self.find = self._places.get
        """The run with the block of this key, and the block's place there; None if the key is not known."""
        self._runs: dict[Run, None] = {}  # the least recently used first

    def __len__(self) -> int:
        """Blocks that are known."""
        return len(self._places)

    @property
    def runs(self) -> list[Run]:
        """All of them, each after the run that it follows."""
        return sorted(self._runs, key=lambda run: run.start)

    def add(self, keys: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32]) -> Run | None:
        """A text with the keys of its full blocks, uint64 [n]. Returns the run of those that are new, if any."""
        names: list[int] = keys.tolist()
        known = self._num_known(names)
        after, at = self._places[names[known - 1]] if known else (None, 0)
        self._touch(after)
        if known == len(names):
            return None
        self._make_room(len(names) - known, after)
        new = names[known : known + self.most_blocks - len(self._places)]
        if not new:
            return None
        bt = self._block_tokens
        block_ids = np.array(tokens[known * bt : (known + len(new)) * bt], np.int32).reshape(len(new), bt)
        run = Run(new, block_ids, after, at, *self._num_local)
        self._places.update(zip(new, zip(repeat(run), range(len(new)), strict=False), strict=True))
        self._runs[run] = None
        if after is not None:
            after.followers.add(run)
        return run

    def _num_known(self, names: list[int]) -> int:
        """Blocks that are known, from the beginning."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in self._places:
                low = middle + 1
            else:
                high = middle
        return low

    def _touch(self, run: Run | None) -> None:
        """The run, and those before it, were used now; the first of a text counts as the youngest."""
        while run is not None:
            del self._runs[run]
            self._runs[run] = None
            run = run.after

    def _make_room(self, new: int, after: Run | None) -> None:
        """If ``new`` more blocks are too many, forgets down to 7/8 of the most, so that it is seldom done."""
        if len(self._places) + new <= self.most_blocks:
            return
        kept = set[Run]()
        while after is not None:
            kept.add(after)
            after = after.after
        for run in list(self._runs):  # a run stands before the one that it follows
            if len(self._places) + new <= self.most_blocks * 7 // 8:
                return
            if not run.followers and run not in kept:
                self._drop(run)

    def _drop(self, run: Run) -> None:
        self._forget(run)
        del self._runs[run]
        for key in run.keys:
            del self._places[key]
        if run.after is not None:
            run.after.followers.discard(run)
