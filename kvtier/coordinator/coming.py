"""What is known to come: the hits of waiting requests stay warm in both tiers.

Owns       which waiting requests were seen to, and when last.
Promises   what waits is pushed out later than what nobody is known to ask for, and the queue's end before its head. A
           step looks at a bounded number of tokens, and at none while nothing changes.
Does not   hold anything: who runs may take it all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.tracked import Tracked
from kvtier.pools.block_pool import BlockPools, Col

MOST_TOKENS = 131_072
"""Tokens of the queue's head that are looked at in a step: a millisecond at most."""
TURNS = 8
"""The hits are touched again once a pool has given up this part of its blocks: few are lost between, and to touch them
costs less than what was pushed out meanwhile."""


class Coming:
    """Of one scheduler. ``pools`` are those of the device and, if there is one, of the host tier."""

    def __init__(self, coordinator: Coordinator, roster: Roster, pools: list[BlockPools]) -> None:
        self._coordinator = coordinator
        self._roster = roster
        self._pools = pools
        self._evicted = self._count()

    def keep_warm(self) -> None:
        """At the end of a step's planning: some requests wait."""
        if self._has_turned():
            todo = [*self._head()]
        else:
            todo = [seq for seq in self._head() if not seq.is_warm]
        for seq in reversed(todo):  # the head of the queue is needed first, so it is touched last
            seq.is_warm = True
            match = self._coordinator.match(seq)
            if match.num_tokens and not match.pending:
                self._coordinator.hold(match)
                self._coordinator.let_go(match)

    def _head(self) -> Iterator[Tracked]:
        tokens = 0
        for seq in self._roster.waiting:
            tokens += len(seq.tokens)
            if tokens > MOST_TOKENS:
                return
            yield seq

    def _count(self) -> npt.NDArray[np.int64]:
        return np.concatenate([pools.column(Col.EVICTED) for pools in self._pools])

    def _has_turned(self) -> bool:
        """Whether a pool has given up an eighth of its blocks since this was last so."""
        evicted = self._count()
        owned = np.concatenate([pools.owned for pools in self._pools])
        if not np.any(TURNS * (evicted - self._evicted) > owned):
            return False
        self._evicted = evicted
        return True
