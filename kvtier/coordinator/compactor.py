"""Emptying a slab of one pool, so that another pool can have it.

Owns       nothing: blocks move within the pools, and whoever holds one is told.
Promises   a block that a copy reads or writes stays where it is; a moved block's bytes are copied on the compute stream
           before anything else is written there; every row, and the match that is being admitted, names its blocks by
           their new ids; in lazy mode nothing cached is lost that the host could have had. Keeps I1, I2, I15.
Does not   decide who needs room.

It happens inside ``schedule`` only, before the step's arrays are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.match import Match
from kvtier.cpu_offload.connector import Connector
from kvtier.gpu_pool import exchange
from kvtier.gpu_pool.block_pool import Col, Ids, SlabCol
from kvtier.gpu_pool.block_table import BlockTables, RowCol

Counts = npt.NDArray[np.int64]


class Compactor:
    """Moves blocks of the device pools out of slabs; ``move`` copies their bytes: (group, from, to)."""

    def __init__(
        self, tables: BlockTables, connector: Connector, move: Callable[[int, Ids, Ids], None], lazy: bool = False
    ) -> None:
        """``lazy``: cached content may only be given up once its store is ordered, if the host has room for it."""
        self.tables = tables
        self._pools = tables.pools
        self._connector = connector
        self._move = move
        self._lazy = lazy
        self.num_moved = 0
        """Counter: blocks moved."""

    def empty_slab(self, need: Counts, pinned: Match | None) -> bool:
        """Gives a slab to a group that lacks some of its ``need[g]`` blocks, emptying it first; False if none can be.

        ``pinned``: a match whose blocks on the device are held, one reference each. In lazy mode False may also mean
        that stores of what the slab caches were planned: once their fences are cleared the caller asks again.
        """
        meta, slabs = self._pools.arrays.meta, self._pools.arrays.slabs
        lacking = np.flatnonzero((need > self._pools.clean) & (meta[:, Col.SLABS] < meta[:, Col.MOST_SLABS]))
        if len(lacking) == 0:
            return False
        tried = np.zeros(len(slabs), np.uint8)
        while True:
            s = int(exchange.movable_slab(meta, self._pools.arrays.blocks, slabs, need, tried))
            if s < 0:
                return False
            lists = self._movable(s, pinned)
            if lists is None:
                tried[s] = 1
                continue
            cached, held = lists
            if self._lazy and self._launder(s, cached, len(held)):
                return False
            self._empty(s, held, pinned)
            exchange.hand_over(meta, slabs, int(lacking[0]), s)
            return True

    def _movable(self, s: int, pinned: Match | None) -> tuple[Ids, Ids] | None:
        """Slab s's cached blocks and its held ones; None if one of them has to stay."""
        meta, blocks, _, _, slabs = self._pools.arrays
        g, (first, end) = int(slabs[s, SlabCol.OWNER]), self._span(s)
        cached, held = np.empty((2, end - first), np.int32)
        num_cached, num_held, free = exchange.list_slab(meta, blocks, slabs, s, cached, held)
        if not free:
            return None
        for ids in self._holders(g, pinned):
            exchange.count_holders(meta, blocks, g, first, end, ids)
        at = int(meta[g, Col.BASE]) + held[:num_held]
        return (
            (cached[:num_cached], held[:num_held]) if np.array_equal(blocks["link"][at], blocks["refs"][at]) else None
        )

    def _launder(self, s: int, cached: Ids, num_held: int) -> bool:
        """Plans stores for what is given up when slab s is emptied; counts what is lost if there are none to plan.

        That is what the slab caches, and the pool's coldest content if it lacks empty blocks for what is moved.
        """
        meta, slabs = self._pools.arrays.meta, self._pools.arrays.slabs
        g = int(slabs[s, SlabCol.OWNER])
        evicted = max(0, num_held - int(meta[g, Col.EMPTY] - slabs[s, SlabCol.EMPTY]))
        coldest = self._pools.coldest(g, evicted + len(cached)) if evicted else cached
        given_up = np.concatenate([cached, coldest[~np.isin(coldest, cached)][:evicted]])
        if self._connector.launder_blocks(g, given_up):
            return True
        self._connector.count_lost_blocks(g, given_up)
        return False

    def _empty(self, s: int, held: Ids, pinned: Match | None) -> None:
        """Moves slab s's ``held`` blocks elsewhere."""
        meta, blocks, slots, ring, slabs = self._pools.arrays
        g, (first, end) = int(slabs[s, SlabCol.OWNER]), self._span(s)
        targets = np.empty(len(held), np.int32)
        exchange.move_blocks(meta, blocks, slots, ring, slabs, s, held, targets)
        if len(held):
            self._move(g, held, targets)
        state = self.tables.arrays.state
        for row, ids in enumerate(self._holders(g, pinned)):
            if exchange.follow_moves(meta, blocks, g, first, end, ids) and row < len(state):
                state[row, RowCol.VERSION] += 1
        self.num_moved += len(held)

    def _span(self, s: int) -> tuple[int, int]:
        """The blocks [first, end) of slab s in the pool that has it."""
        meta, slabs = self._pools.arrays.meta, self._pools.arrays.slabs
        of = meta[int(slabs[s, SlabCol.OWNER])]
        first = 1 + (s - int(of[Col.FIRST_SLAB])) * int(of[Col.PER_SLAB])
        return first, first + int(of[Col.PER_SLAB])

    def _holders(self, g: int, pinned: Match | None) -> Iterator[Ids]:
        """Ids of group g's blocks, row after row and then those of the match, as views that can be written."""
        table, lo, hi = self.tables.table(g), self.tables.arrays.lo[g], self.tables.arrays.hi[g]
        for row in range(len(table)):
            yield table[row, lo[row] : hi[row]]
        if pinned is not None:
            at = int(pinned.counts[:g].sum())
            yield pinned.device[at : at + int(pinned.counts[g])]
