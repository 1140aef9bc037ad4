"""Naming full blocks: from then on other requests find them.

Owns       the list of blocks named since the last ``take``.
Promises   a key names one block. A row whose content another block has already switches to that block. Keeps I13, I21.
Does not   know when a block is full.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.gpu_pool.row_state import Geo, Publish, RowArrays, RowCol, row_at
from kvtier.machine.loops.jit import inlined, jit
from kvtier.pools.key_index import prefetch_slot, publish
from kvtier.pools.pool_loops import AHEAD, acquire, release
from kvtier.pools.pool_state import Col, Mark, PoolArrays

Int32s = npt.NDArray[np.int32]

_NONE, _READY, _BASE = int(Mark.NONE), int(Mark.READY), int(Col.BASE)
_UNITS, _VERSION = int(Geo.UNITS), int(RowCol.VERSION)
_PUBLISH, _TOLD = int(RowCol.PUBLISH), int(Publish.TOLD)
_U = np.uint64


class Sealed:
    """Blocks that became findable since the last ``take``; the arrays are reused."""

    def __init__(self) -> None:
        self.count = 0
        self.arrays = np.empty(0, np.int32), np.empty(0, np.int32), np.empty((0, 2), np.uint64)
        """Groups, blocks and keys; the first ``count`` entries are valid."""
        self.room = 0
        """Entries of ``arrays``."""

    def reserve(self, more: int) -> None:
        """Makes room for ``more`` entries; grows by doubling."""
        need = self.count + more
        if need > self.room:
            groups, blocks, keys = self.arrays
            extra = max(need, 2 * self.room) - self.room
            self.room += extra
            self.arrays = (
                np.concatenate([groups, np.empty(extra, np.int32)]),
                np.concatenate([blocks, np.empty(extra, np.int32)]),
                np.concatenate([keys, np.empty((extra, 2), np.uint64)]),
            )

    def take(self) -> tuple[Int32s, Int32s, npt.NDArray[np.uint64]]:
        """(groups, blocks, keys), int32 [n], int32 [n] and uint64 [n, 2]: views until more is sealed."""
        n, self.count = self.count, 0
        groups, blocks, keys = self.arrays
        return groups[:n], blocks[:n], keys[:n]


@inlined
def seal_block(p: Any, t: Any, g: Any, r: Any, at: Any, low: Any, high: Any) -> Any:
    """Names the block of row r at ``table[at]``; returns it if it is newly findable, else 0.

    If a twin is findable under the key already, the row switches to it and gives its own block back.
    """
    own = np.int64(t.table[_U(at)])
    twin = publish(p, g, own, low, high, _READY)
    if twin == 0:
        return own
    base = p.meta[g, _BASE]
    if twin != own and p.blocks[_U(base + twin)].mark == _READY and p.blocks[_U(base + own)].mark == _NONE:
        acquire(p, g, twin)
        release(p, g, own, False)
        t.table[_U(at)] = twin
        t.state[r, _VERSION] += 1
    return np.int64(0)


@jit
def seal_range(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    geometry: Any, table: Any, span: Any, state: Any, chain: Any, tail: Any, eos: Any, generated: Any, superseded: Any,
    r: Any, g: Any, first: Any, end: Any, keys: Any, n: Any, groups: Any, ids: Any, named: Any,
) -> Any:
    """Names the logical blocks [first, end) of row r in group g; newly findable blocks are entries n, n + 1 ... if it
    is TOLD.

    Returns the number of entries.
    """
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    t = RowArrays(geometry, table, span, state, chain, tail, eos, generated, superseded)
    units, at = geometry[g, _UNITS], row_at(geometry, g, r)
    first = max(first, np.int64(span[r, g, 0]))
    for j in range(first, end):
        if table[_U(at + j)] == 0:  # a gap between states
            continue
        unit = (j + 1) * units - 1
        prefetch_slot(p, g, keys[min(unit + AHEAD * units, end * units - 1), 1])
        low, high = keys[unit, 0], keys[unit, 1]
        b = seal_block(p, t, g, r, at + j, low, high)
        if b != 0 and state[r, _PUBLISH] == _TOLD:
            groups[n] = g
            ids[n] = b
            named[n, 0] = low
            named[n, 1] = high
            n += 1
    return n
