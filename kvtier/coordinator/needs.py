"""The future needs of requests, as compiled loops. Admission, extension and start-up predict with the same bounds.

Promises   ``peak_blocks`` is ``GroupSpec.peak_blocks``: tight, reached by some run. Keeps I6.
Does not   change anything, except that ``drop`` and ``undrop`` count for their callers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.row_state import Geo, Phase, RowCol, num_blocks, row_at
from kvtier.machine.loops.jit import inlined, jit
from kvtier.pools.pool_state import Col, Mark

_BT, _KIND, _SPAN = int(Geo.BLOCK_TOKENS), int(Geo.KIND), int(Geo.SPAN)
_FULL, _WINDOW, _CHUNK, _STATE = int(Kind.FULL), int(Kind.WINDOW), int(Kind.CHUNK), int(Kind.STATE)
_FREE, _DECODE = int(Phase.FREE), int(Phase.DECODE)
_TOTAL, _PHASE, _BASE = int(RowCol.TOTAL), int(RowCol.PHASE), int(Col.BASE)
_PENDING = int(Mark.PENDING)
_U = np.uint64


@inlined
def peak_blocks(geometry: Any, g: Any, num_tokens: Any) -> Any:
    """The most blocks of group g that a run of ``num_tokens`` holds at once when it computes one token a step."""
    bt, kind, span = geometry[g, _BT], geometry[g, _KIND], geometry[g, _SPAN]
    most = num_blocks(geometry, g, num_tokens)
    if kind == _WINDOW or kind == _STATE:  # noqa: SIM109 - numba
        return min(most, (span + bt - 1 + bt - 1) // bt)
    if kind == _CHUNK:
        return min(most, span // bt)
    return most


@inlined
def drop(p: Any, t: Any, g: Any, r: Any) -> Any:
    """Counts row r's blocks of group g as given up. Returns (blocks without another holder, the part of them free
    then).

    A block that the row's load still writes is not free then. Neither is a block that an overdue store may still read.
    """
    at, alone, free = row_at(t.geometry, g, r), np.int64(0), np.int64(0)
    for j in range(t.span[r, g, 0], t.span[r, g, 1]):
        if t.table[_U(at + j)] == 0:  # a gap between states
            continue
        block = p.blocks[_U(p.meta[g, _BASE] + t.table[_U(at + j)])]
        block.refs -= 1
        alone += block.refs == 0 or block.mark == _PENDING
        free += block.refs == 0 and block.fence >= 0
    return alone, free


@inlined
def undrop(p: Any, t: Any, g: Any, r: Any) -> Any:
    """Takes a ``drop`` back. Returns by how many fewer blocks the remaining drops free."""
    at, free = row_at(t.geometry, g, r), np.int64(0)
    for j in range(t.span[r, g, 0], t.span[r, g, 1]):
        if t.table[_U(at + j)] == 0:
            continue
        block = p.blocks[_U(p.meta[g, _BASE] + t.table[_U(at + j)])]
        free += block.refs == 0 and block.fence >= 0
        block.refs += 1
    return free


@inlined
def _knows_more(state: Any, r: Any) -> Any:
    return state[r, _PHASE] != _FREE and state[r, _PHASE] != _DECODE


@jit
def promised(p: Any, t: Any, among: Any, total: Any) -> None:
    """total[G]: blocks that the rows r with among[r] will still take to get through the tokens they know already.

    A block shared with another row is not freed when this row's window or chunk moves on. So it counts as still to be
    taken. A block that only such rows hold is counted as held by one of them.
    """
    geometry, state = t.geometry, t.state
    total[:] = 0
    for r in range(len(among)):
        if among[r] and _knows_more(state, r):
            for g in range(len(geometry)):
                own = np.int64(t.span[r, g, 1]) - t.span[r, g, 0]
                if geometry[g, _KIND] != _FULL:
                    own, _ = drop(p, t, g, r)
                total[g] += max(np.int64(0), peak_blocks(geometry, g, state[r, _TOTAL]) - own)
    for r in range(len(among)):
        if among[r] and _knows_more(state, r):
            for g in range(len(geometry)):
                if geometry[g, _KIND] != _FULL:
                    undrop(p, t, g, r)


@jit
def admission_need(
    meta: Any, blocks: Any, geometry: Any, device: Any, counts: Any, num_tokens: Any, total: Any, taken: Any, free: Any
) -> None:
    """Blocks for the admission of a request of ``total`` tokens whose hit of ``num_tokens`` has these blocks.

    ``device`` has counts[g] blocks of each group g, 0 for a block to load. Writes taken[G], the blocks taken at first:
    blocks to load into, and one for the first token. Writes free[G], the blocks that must be free to get through all
    known tokens. Hit blocks without a holder stop being free; hit blocks with a holder cost nothing.
    """
    k = 0
    for g in range(len(geometry)):
        loads, idle, held = np.int64(0), np.int64(0), np.int64(0)
        for _ in range(counts[g]):
            b = np.int64(device[k])
            if b == 0:
                loads += 1
            elif blocks[_U(meta[g, _BASE] + b)].refs > 0:
                held += 1
            else:
                idle += 1
            k += 1
        taken[g] = loads + num_blocks(geometry, g, num_tokens + 1) - num_tokens // geometry[g, _BT]
        free[g] = peak_blocks(geometry, g, total)
        if geometry[g, _KIND] == _FULL:
            free[g] -= held
        free[g] = max(free[g], taken[g] + idle)
