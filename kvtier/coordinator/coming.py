"""What is known to come: the hits of waiting requests stay warm, on the device and, for what a load would bring, in the
host.

Owns       which waiting requests were seen to, and when last.
Promises   what waits is pushed out later than what nobody is known to ask for, and the queue's end before its head. A
           step looks at a bounded number of requests, and at none while none comes or leaves.
Does not   hold anything: who runs may take it all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.returns import NEVER
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.tracked import Tracked
from kvtier.pools.block_pool import BlockPools, Col

MOST_TOKENS, HEAD = 131_072, 64
"""The queue's head is so many requests, of so many tokens and one request more."""
MOST_REQUESTS = 8
"""As many requests at the head are touched in a step."""


class Coming:
    """The waiting requests of one scheduler. ``pools`` are the device's and, if there is a host tier, its own."""

    def __init__(self, coordinator: Coordinator, roster: Roster, pools: list[BlockPools]) -> None:
        self._coordinator = coordinator
        self._roster = roster
        self._pools = pools
        groups = coordinator.spec.groups
        self._block_tokens = np.array([group.block_tokens for group in groups])
        self._spans = np.array([group.attention.span_tokens or NEVER for group in groups])
        self.has_new = False
        """Whether requests have come that were not looked at."""
        self.is_stale = False
        """Whether a request has left its row since: its content is newer than the hits of those that wait."""

    def before_admission(self) -> None:
        """Some requests wait, and some of them may be admitted: keeps warm what the others will hit."""
        if self.is_stale and self._is_short(sum(len(seq.tokens) for seq in self._head())):
            self.is_stale, self.has_new = False, True  # others may have got to the queue's head
            self._touch([seq for seq in self._head() if seq.is_warm][:MOST_REQUESTS])

    def after_admission(self) -> None:
        """Some requests still wait. Of those that have come, a few are looked at."""
        if self.has_new:
            new = [seq for seq in self._head() if not seq.is_warm]
            self.has_new = len(new) > MOST_REQUESTS
            self._touch(new[:MOST_REQUESTS])

    def _touch(self, requests: list[Tracked]) -> None:
        for seq in reversed(requests):  # the head of the queue is needed first, so it is touched last
            seq.is_warm = True
            match = self._coordinator.match(seq)
            if match.num_tokens and not match.pending:
                self._coordinator.hold(match)
                self._coordinator.let_go(match)

    def _head(self) -> Iterator[Tracked]:
        tokens = 0
        for seq in self._roster.waiting[:HEAD]:
            yield seq
            tokens += len(seq.tokens)
            if tokens > MOST_TOKENS:
                return

    def _is_short(self, num_tokens: int) -> bool:
        """Whether so many tokens would push something out."""
        spare = [(pools.column(Col.EMPTY) + pools.unused) * self._block_tokens for pools in self._pools]
        return any(bool(np.any(tokens < np.minimum(num_tokens, self._spans))) for tokens in spare)
