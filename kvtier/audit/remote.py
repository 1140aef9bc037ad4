"""The audit of moves between the host tier and a remote (I1, I2, I13, I14, I18, I19)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.audit.pools import Int64s, Tier, Violation
from kvtier.cpu_offload.transfer import TransferState
from kvtier.pools.block_pool import Ids, Mark
from kvtier.remote.moves import Move, Way
from kvtier.remote.tier import RemoteTier

_LIVE = (TransferState.IN_FLIGHT, TransferState.EXPIRED)


class RemoteMoves:
    """All moves that may touch host blocks, as entries of the host tier."""

    def __init__(self, tier: Tier, remote: RemoteTier | None) -> None:
        self._tier = tier
        self._remote = remote
        self.moves = [] if remote is None else remote.moves()
        fetches = [m for m in self.moves if m.way is Way.FETCH]
        pinned = [m.pinned for m in self.moves]
        self.owners = self._entries([*((m.groups, m.hosts) for m in self.moves), *pinned])
        """Once for each reference that a move holds."""
        self.bringing = self._entries([(m.groups, m.hosts) for m in fetches if self._is_current(m)])
        """Blocks of fetches of this epoch that are not overdue."""
        self.overdue = self._entries([(m.groups, m.hosts) for m in fetches if m.state is TransferState.EXPIRED])

    def _is_current(self, move: Move) -> bool:
        return self._remote is not None and move.epoch == self._remote.epoch and move.state is not TransferState.EXPIRED

    def _entries(self, blocks: Sequence[tuple[Ids, Ids]]) -> Int64s:
        found = [self._tier.entries(groups, ids) for groups, ids in blocks]
        return np.concatenate([np.empty(0, np.int64), *found])

    def audit(self) -> Iterator[Violation]:
        """Each move by itself, and its blocks' keys."""
        arrays = self._tier.pools.arrays
        for m in self.moves:
            what = f"{m.way.value} {m.ticket}"
            if m.state not in _LIVE:
                yield Violation("I18", f"{what} is {m.state.value} and still listed")
            if not len(m.groups) == len(m.hosts) == len(m.keys) == len(m.of) or len(m.object_bytes) != len(m.objects):
                yield Violation("I18", f"{what} has blocks without a name, or without an object")
                continue
            if not self._is_current(m):
                continue
            entries = self._tier.entries(m.groups, m.hosts)
            wanted = Mark.READY if m.way is Way.SPILL else Mark.PENDING
            is_named = arrays.mark[entries] != Mark.NONE
            other = (arrays.key.reshape(-1, 2)[entries] != m.keys).any(1)
            if m.way is Way.FETCH and np.any(arrays.mark[entries] != wanted):
                yield Violation("I19", f"{what}: blocks that it brings are not PENDING")
            if np.any(is_named & other):
                yield Violation("I14", f"{what}: blocks carry other keys than its content's")
        if len(np.unique(self.bringing)) != len(self.bringing):
            yield Violation("I17", "two fetches write one block of the host")
