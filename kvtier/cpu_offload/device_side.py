"""The device as the connector sees it: blocks with fences, which say what store still reads which block.

kvtier's own ``BlockPools`` are one. ``OutsideDevice`` is the other: an engine that owns its device memory, its block
ids and its cached content. Kept here are its fences alone.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.machine.loops.jit import records
from kvtier.pools.block_pool import Fences, Ids
from kvtier.pools.pool_state import BLOCK, Col, fence_of

Bools = npt.NDArray[np.bool_]


class DeviceSide(Protocol):
    """``groups`` and ``blocks`` are int32 [n]."""

    num_groups: int

    @property
    def arrays(self) -> Fences:
        """The arrays with the fences."""

    def fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        """A store of this ticket reads the blocks."""

    def unfence(self, groups: Ids, blocks: Ids, ticket: int, cold: bool = False) -> None:
        """The store reads them no more, or writers are ordered after it. ``cold``: their content is evicted next."""

    def expire_fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        """The store was given up, and may still read them."""

    def are_fenced(self, groups: Ids, blocks: Ids) -> Bools:
        """bool [n]: which blocks a store still reads, or an overdue store may still read."""

    def are_waited_for(self, groups: Ids, blocks: Ids) -> Bools:
        """bool [n]: which blocks could be handed out except for their fence."""


class _Fences:
    def __init__(self, num_blocks: npt.NDArray[np.int64], shares_with: npt.NDArray[np.int64]) -> None:
        self.meta = np.zeros((len(num_blocks), len(Col)), np.int64)
        self.meta[:, Col.BASE] = (np.cumsum(num_blocks) - num_blocks)[shares_with]
        self.blocks = records(np.zeros(int(num_blocks.sum()), BLOCK))


class OutsideDevice:
    """``num_blocks[g]``: block ids of group g, from 0 on. ``shares_with[g]``: the first group of the same memory, with
    which it shares fences. int64 [groups] each.
    """

    def __init__(self, num_blocks: npt.NDArray[np.int64], shares_with: npt.NDArray[np.int64]) -> None:
        self.num_groups = len(num_blocks)
        self.arrays = _Fences(num_blocks, shares_with)
        self._fence: npt.NDArray[np.int32] = self.arrays.blocks["fence"]

    def entries(self, groups: Ids, blocks: Ids) -> npt.NDArray[np.int64]:
        """Numbers of the blocks' memory, int64 [n]."""
        entries: npt.NDArray[np.int64] = self.arrays.meta[groups, Col.BASE] + blocks
        return entries

    def fences(self, groups: Ids, blocks: Ids) -> Ids:
        """``fence_of`` the store that reads each block, int32 [n]; 0 if none does."""
        return self._fence[self.entries(groups, blocks)]

    def fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        self._fence[self.entries(groups, blocks)] = fence_of(ticket)

    def unfence(self, groups: Ids, blocks: Ids, ticket: int, cold: bool = False) -> None:
        entries = self.entries(groups, blocks)
        self._fence[entries[self._fence[entries] == fence_of(ticket)]] = 0

    expire_fence = unfence
    """A later writer of the source can only spoil a host block, which is quarantined until the copy has ended."""

    def are_fenced(self, groups: Ids, blocks: Ids) -> Bools:
        fenced: Bools = self.fences(groups, blocks) != 0
        return fenced

    are_waited_for = are_fenced
