"""The device as the connector sees it: the blocks that a transfer holds there, and their fate.

``PooledDevice``   kvtier's own pools: a load's targets are found by their keys once they have landed.
``OutsideDevice``  an engine that owns its device memory, its block ids and its cached content. It keeps a load's
                   targets until the load has ended. Kept here are the fences, which say what store still reads which
                   block, and the targets of loads.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.pools.block_pool import BlockPools, Fences, Ids, Mark, Place, Words
from kvtier.pools.pool_state import BLOCK, Col, fence_of

Bools = npt.NDArray[np.bool_]


class DeviceSide(Protocol):
    """``groups`` and ``blocks`` are int32 [n], ``keys`` uint64 [n, 2], ``good`` bool [n]."""

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

    def begin_load(self, groups: Ids, blocks: Ids, keys: Words) -> None:
        """A load writes the blocks from now on."""

    def publish_load(self, groups: Ids, blocks: Ids, good: Bools) -> None:
        """The ``good`` blocks have their content; it is still current."""

    def end_load(self, groups: Ids, blocks: Ids) -> None:
        """The load writes no more."""

    def give_up_load(self, groups: Ids, blocks: Ids) -> None:
        """The load is overdue: its content is not to be used, and it may still write."""

    def end_late_load(self, groups: Ids, blocks: Ids) -> None:
        """A load that was given up has ended."""

    def unpublish(self, groups: Ids, blocks: Ids) -> None:
        """The content that a load brings to the blocks is not to be found."""

    def forget(self, groups: Ids, keys: Words) -> None:
        """Content under these keys is not to be found any more."""

    def forget_all(self) -> None:
        """Present content is not to be found any more."""


class PooledDevice:
    """kvtier's own pools."""

    def __init__(self, pools: BlockPools) -> None:
        self.pools = pools
        self.num_groups = pools.num_groups
        self.arrays = pools.arrays

    def fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        self.pools.fence(groups, blocks, ticket)

    def unfence(self, groups: Ids, blocks: Ids, ticket: int, cold: bool = False) -> None:
        self.pools.unfence(groups, blocks, ticket, cold)

    def expire_fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        self.pools.expire_fence(groups, blocks, ticket)

    def are_fenced(self, groups: Ids, blocks: Ids) -> Bools:
        fenced: Bools = self.arrays.fence[self.pools.entries(groups, blocks)] != 0
        return fenced

    def are_waited_for(self, groups: Ids, blocks: Ids) -> Bools:
        waited: Bools = self.arrays.place[self.pools.entries(groups, blocks)] == Place.FENCED
        return waited

    def begin_load(self, groups: Ids, blocks: Ids, keys: Words) -> None:
        self.pools.acquire(groups, blocks)
        self.pools.publish(groups, blocks, keys, Mark.PENDING)

    def publish_load(self, groups: Ids, blocks: Ids, good: Bools) -> None:
        self.pools.make_ready(groups[good], blocks[good])
        self.pools.unpublish(groups[~good], blocks[~good])

    def end_load(self, groups: Ids, blocks: Ids) -> None:
        self.pools.release(groups, blocks)

    def give_up_load(self, groups: Ids, blocks: Ids) -> None:
        self.pools.quarantine(groups, blocks)

    def end_late_load(self, groups: Ids, blocks: Ids) -> None:
        self.pools.release(groups, blocks)
        self.pools.restore(groups, blocks)

    def unpublish(self, groups: Ids, blocks: Ids) -> None:
        self.pools.unpublish(groups, blocks)

    def forget_all(self) -> None:
        self.pools.forget_all()

    def forget(self, groups: Ids, keys: Words) -> None:
        blocks = self.pools.find(groups, keys)
        self.pools.unpublish(groups[blocks > 0], blocks[blocks > 0])


class _Fences:
    def __init__(self, num_blocks: npt.NDArray[np.int64], shares_with: npt.NDArray[np.int64]) -> None:
        self.meta = np.zeros((len(num_blocks), len(Col)), np.int64)
        self.meta[:, Col.BASE] = (np.cumsum(num_blocks) - num_blocks)[shares_with]
        self.blocks: npt.NDArray[np.void] = np.zeros(int(num_blocks.sum()), BLOCK)


class OutsideDevice:
    """``num_blocks[g]``: block ids of group g, from 0 on. ``shares_with[g]``: the first group of the same memory, with
    which it shares fences. int64 [groups] each.
    """

    def __init__(self, num_blocks: npt.NDArray[np.int64], shares_with: npt.NDArray[np.int64]) -> None:
        self.num_groups = len(num_blocks)
        self.arrays = _Fences(num_blocks, shares_with)
        self._fence: npt.NDArray[np.int32] = self.arrays.blocks["fence"]
        self._is_target = np.zeros(len(self._fence), bool)

    def _entries(self, groups: Ids, blocks: Ids) -> npt.NDArray[np.int64]:
        entries: npt.NDArray[np.int64] = self.arrays.meta[groups, Col.BASE] + blocks
        return entries

    def fences(self, groups: Ids, blocks: Ids) -> Ids:
        """``fence_of`` the store that reads each block, int32 [n]; 0 if none does."""
        return self._fence[self._entries(groups, blocks)]

    def fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        self._fence[self._entries(groups, blocks)] = fence_of(ticket)

    def unfence(self, groups: Ids, blocks: Ids, ticket: int, cold: bool = False) -> None:
        entries = self._entries(groups, blocks)
        self._fence[entries[self._fence[entries] == fence_of(ticket)]] = 0

    expire_fence = unfence
    """A later writer of the source can only spoil a host block, which is quarantined until the copy has ended."""

    def are_fenced(self, groups: Ids, blocks: Ids) -> Bools:
        fenced: Bools = self.fences(groups, blocks) != 0
        return fenced

    are_waited_for = are_fenced

    def are_targets(self, groups: Ids, blocks: Ids) -> Bools:
        """bool [n]: which blocks a load writes, or an overdue load may still write."""
        return self._is_target[self._entries(groups, blocks)]

    def begin_load(self, groups: Ids, blocks: Ids, keys: Words) -> None:
        self._is_target[self._entries(groups, blocks)] = True

    def end_load(self, groups: Ids, blocks: Ids) -> None:
        self._is_target[self._entries(groups, blocks)] = False

    end_late_load = end_load

    def _nothing(self, *_: Any) -> None:
        """The engine owns the content cached on the device."""

    publish_load = give_up_load = unpublish = forget = forget_all = _nothing
