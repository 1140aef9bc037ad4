"""Emptying a slab of one pool, so that another pool can have it.

Owns       nothing: blocks move within the pools, and their holders are updated.
Promises   a block that a copy reads or writes stays in place. A moved block's bytes are copied on the compute stream
           before its old place is written again. Every row, and the match that is being admitted, names its blocks by
           their new ids. In lazy mode no cached content is lost that the host could have had. Keeps I1, I2, I15.
Does not   decide which pool needs room.

It runs inside ``schedule`` only, before the step's arrays are built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.match import Match
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.row_state import RowCol, row_at
from kvtier.machine.loops.jit import jit
from kvtier.pools import exchange
from kvtier.pools.block_pool import Col, Ids, SlabCol

Counts = npt.NDArray[np.int64]

_VERSION, _U = int(RowCol.VERSION), np.uint64

MOST_LOOKS = 8
"""Slabs that ``make_idle`` looks at, since each look reads all rows: no step fails for want of an idle slab."""


class Compactor:
    """Moves blocks of the device pools out of slabs; ``move`` copies their bytes: (group, from, to)."""

    def __init__(
        self,
        tables: BlockTables,
        connector: Connector,
        stores: StorePolicy,
        move: Callable[[int, Ids, Ids], None],
        lazy: bool = False,
    ) -> None:
        """``lazy``: cached content may be given up only after its store is ordered, if the host has room for it."""
        self._tables = tables
        self._pools = tables.pools
        self._connector = connector
        self._stores = stores
        self._move = move
        self._lazy = lazy
        self.num_moved = 0
        """Counter: blocks moved."""

    def empty_slab(self, need: Counts, pinned: Match | None) -> bool:
        """Gives a slab to a group that lacks some of its ``need[g]`` blocks, emptying it first; False if none can be.

        ``pinned``: a match whose blocks on the device are held, one reference each. In lazy mode False may also mean
        that stores of the slab's cached content were planned. The caller clears their fences and asks again.
        """
        meta, slabs = self._pools.arrays.meta, self._pools.arrays.slabs
        lacking = np.flatnonzero((need > self._pools.clean) & (meta[:, Col.SLABS] < meta[:, Col.MOST_SLABS]))
        if len(lacking) == 0:
            return False
        tried = np.zeros(len(slabs), np.uint8)
        while True:
            s = int(exchange.movable_slab(meta, slabs, need, tried))
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

    def make_idle(self, pinned: Match | None, g: int) -> bool:
        """Moves what is held out of one of the slabs of group g with the least of it; False if it cannot be moved.

        The slab's cached content stays. ``pinned`` as in ``empty_slab``.
        """
        meta, slabs = self._pools.arrays.meta, self._pools.arrays.slabs
        if self._pools.clean[g] < meta[g, Col.PER_SLAB]:  # what is held would find no room in other slabs
            return False
        spare = slabs[:, SlabCol.EMPTY] + slabs[:, SlabCol.CACHED]
        is_still = (slabs[:, SlabCol.OWNER] == g) & (slabs[:, SlabCol.STUCK] + slabs[:, SlabCol.FENCES] == 0)
        still = np.flatnonzero(is_still)
        for s in still[np.argsort(-spare[still], kind="stable")][:MOST_LOOKS].tolist():
            lists = self._movable(s, pinned)
            if lists is not None:
                self._empty(s, lists[1], pinned, stays=True)
                return True
        return False

    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        """Copies the bytes of blocks of group g, which the pools have moved."""
        self._move(g, sources, targets)
        self.num_moved += len(sources)

    def _movable(self, s: int, pinned: Match | None) -> tuple[Ids, Ids] | None:
        """Slab s's cached blocks and its held blocks; None if a held block has a holder that cannot be updated."""
        p = self._pools.arrays
        meta, blocks, slabs = p.meta, p.blocks, p.slabs
        g, (first, end) = int(slabs[s, SlabCol.OWNER]), self._span(s)
        cached, held = np.empty((2, end - first), np.int32)
        num_cached, num_held = exchange.list_slab(meta, blocks, slabs, s, cached, held)
        t, base = self._tables.arrays, int(meta[g, Col.BASE])
        _count_in_rows(blocks, base, t.geometry, t.table, t.span, g, first, end)
        _count(blocks, base, self._pinned(g, pinned), first, end)
        cached, held = cached[:num_cached], held[:num_held]
        all_known = np.array_equal(blocks["link"][base + held], blocks["refs"][base + held])
        return (cached, held) if all_known else None

    def _launder(self, s: int, cached: Ids, num_held: int) -> bool:
        """Plans stores for the content that is given up when slab s is emptied. Counts it as lost if no store can be
        planned.

        This is the slab's cached content, and the pool's coldest content if it lacks empty blocks for the moved blocks.
        """
        meta, slabs = self._pools.arrays.meta, self._pools.arrays.slabs
        g = int(slabs[s, SlabCol.OWNER])
        evicted = max(0, num_held - int(meta[g, Col.EMPTY] - slabs[s, SlabCol.EMPTY]))
        coldest = self._pools.coldest(g, evicted + len(cached)) if evicted else cached
        given_up = np.concatenate([cached, coldest[~np.isin(coldest, cached)][:evicted]])
        groups = np.full(len(given_up), g, np.int32)
        if self._stores.launder(self._pools, groups, given_up).any():
            return True
        self._stores.count_lost(self._pools, groups, given_up)
        return False

    def _empty(self, s: int, held: Ids, pinned: Match | None, stays: bool = False) -> None:
        """Moves slab s's ``held`` blocks elsewhere. It ``stays`` in its pool, or belongs to none then."""
        meta, blocks, slots, ring, empties, slabs = self._pools.arrays
        g, (first, end) = int(slabs[s, SlabCol.OWNER]), self._span(s)
        targets = np.empty(len(held), np.int32)
        exchange.move_blocks(meta, blocks, slots, ring, empties, slabs, s, held, targets, stays)
        if len(held):
            self.move(g, held, targets)
            t, base = self._tables.arrays, int(meta[g, Col.BASE])
            _follow_in_rows(blocks, base, t.geometry, t.table, t.span, t.state, g, first, end)
            _follow(blocks, base, self._pinned(g, pinned), first, end)

    def _span(self, s: int) -> tuple[int, int]:
        """The blocks [first, end) of slab s in the pool that owns it."""
        meta, slabs = self._pools.arrays.meta, self._pools.arrays.slabs
        of = meta[int(slabs[s, SlabCol.OWNER])]
        first = 1 + (s - int(of[Col.FIRST_SLAB])) * int(of[Col.PER_SLAB])
        return first, first + int(of[Col.PER_SLAB])

    @staticmethod
    def _pinned(g: int, pinned: Match | None) -> Ids:
        """The match's blocks of group g, a view that can be written."""
        if pinned is None:
            return np.empty(0, np.int32)
        at = int(pinned.counts[:g].sum())
        return pinned.device[at : at + int(pinned.counts[g])]


# Blocks [first, end) are the blocks of the slab that is being emptied. Their links first count holders, then they
# give the new place.


@jit
def _count(blocks: Any, base: Any, ids: Any, first: Any, end: Any) -> None:
    """Counts how often each block of the slab stands in ``ids``."""
    for k in range(len(ids)):
        b = np.int64(ids[k])
        if first <= b < end:
            blocks[_U(base + b)].link += 1


@jit
def _count_in_rows(blocks: Any, base: Any, geometry: Any, table: Any, span: Any, g: Any, first: Any, end: Any) -> None:
    """Counts how often each block of the slab stands in the rows."""
    for r in range(len(span)):
        at = row_at(geometry, g, r)
        for j in range(span[r, g, 0], span[r, g, 1]):
            b = np.int64(table[_U(at + j)])
            if first <= b < end:
                blocks[_U(base + b)].link += 1


@jit
def _follow(blocks: Any, base: Any, ids: Any, first: Any, end: Any) -> None:
    """Puts new ids in place of old ones in ``ids``."""
    for k in range(len(ids)):
        b = np.int64(ids[k])
        if first <= b < end:
            ids[k] = blocks[_U(base + b)].link


@jit
def _follow_in_rows(
    blocks: Any, base: Any, geometry: Any, table: Any, span: Any, state: Any, g: Any, first: Any, end: Any
) -> None:
    """Puts new ids in place of old ones in the rows, which are then seen to have changed."""
    for r in range(len(span)):
        at, moved = row_at(geometry, g, r), False
        for j in range(span[r, g, 0], span[r, g, 1]):
            b = np.int64(table[_U(at + j)])
            if first <= b < end:
                table[_U(at + j)] = blocks[_U(base + b)].link
                moved = True
        state[r, _VERSION] += moved
