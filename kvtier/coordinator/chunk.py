"""How much of a prompt one step computes: what fits, and what it may push out.

A chunk of prompt takes blocks for all its tokens in every group. Window groups give most of them back when the step
ends. With 50 window layers of 16 heads, 8,192 tokens take 6.7 GB for a moment. In a full tier they push out as much
cached content of other requests; shorter steps would have cost next to nothing.

Promises   a long step that borrows much takes only blocks whose content no request may ask for (ADR 0020). Long means
           more than ``SHORT_STEP`` tokens; much means more than ``LITTLE`` for its windows. Keeps I4.
Does not   take anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.row_state import Geo, RowCol, first_block, num_blocks, takes
from kvtier.machine.loops.jit import inlined
from kvtier.pools.pool_state import Col, SlabCol
from kvtier.pools.slab_loops import fits

SHORT_STEP = 512
"""Prompt tokens that a step may compute whatever they push out. Fewer are too little work for all the weights: GPUs of
today do 200 to 300 operations in the time of a byte."""

LITTLE = 1 / 64
"""Share of an arena that windows may borrow whatever they push out."""

_BT, _KIND, _SPAN = int(Geo.BLOCK_TOKENS), int(Geo.KIND), int(Geo.SPAN)
_PER_SLAB, _MOST_SLABS = int(Col.PER_SLAB), int(Col.MOST_SLABS)
_OWNER, _S_EMPTY, _S_SUPERSEDED = int(SlabCol.OWNER), int(SlabCol.EMPTY), int(SlabCol.SUPERSEDED)
_FULL, _STATE, _TOTAL = int(Kind.FULL), int(Kind.STATE), int(RowCol.TOTAL)


@inlined
def lacks(t: Any, g: Any, r: Any, end: Any) -> Any:
    """Blocks of group g that row r needs besides its own to compute up to ``end``."""
    if t.span[r, g, 1] * t.geometry[g, _BT] >= end:
        return np.int64(0)
    return takes(t.geometry, t.span, g, r, num_blocks(t.geometry, g, end))


@inlined
def _shares(p: Any, t: Any, g: Any) -> Any:
    """Whether windows can have what group g has, or the other way round."""
    return t.geometry[g, _KIND] != _FULL or p.meta[g, _MOST_SLABS] > 1


@inlined
def unmissed(p: Any, t: Any) -> Any:
    """Slabs, and parts of them, that a step can take for its windows without the loss of content a request may want."""
    slabs, found = p.slabs, 0.0
    for s in range(len(slabs)):
        g = slabs[s, _OWNER]
        if g >= 0 and t.geometry[g, _KIND] != _FULL:
            found += (slabs[s, _S_EMPTY] + slabs[s, _S_SUPERSEDED]) / p.meta[g, _PER_SLAB]
        elif g < 0 or (slabs[s, _S_EMPTY] == p.meta[g, _PER_SLAB] and _shares(p, t, g)):
            found += 1.0
    return found


@inlined
def _is_modest(p: Any, t: Any, need: Any, free: Any, r: Any, start: Any, end: Any) -> Any:
    """Whether the step pushes out little or nothing if row r, beside need[G] blocks, computes ``start`` to ``end``.

    A window group "borrows" while a step holds more blocks than one query's window.
    """
    geometry, borrowed, taken = t.geometry, 0.0, 0.0
    for g in range(len(geometry)):
        if not _shares(p, t, g):
            continue
        more = (need[g] + lacks(t, g, r, end)) / p.meta[g, _PER_SLAB]
        taken += more
        held = (num_blocks(geometry, g, end) - first_block(geometry, g, start) - 1) * geometry[g, _BT]
        if geometry[g, _KIND] != _FULL and geometry[g, _KIND] != _STATE and held > geometry[g, _SPAN]:
            borrowed += more
    return borrowed <= len(p.slabs) * LITTLE or taken <= free


@inlined
def longest_chunk(
    p: Any, t: Any, r: Any, start: Any, most: Any, tokens: Any, need: Any, free: Any, total: Any
) -> Any:
    """Up to which token row r can compute: at most ``most``, and at least one token.

    Without the row, the step has ``tokens`` of prompts, which take need[G] blocks. total[G] blocks are used beside its
    own. ``free`` slabs hold no content that would be missed. The row's blocks are added to ``total`` and taken off
    again.
    """
    low, high, end = start + 1, most, most  # it fits up to low, if at all; what it takes grows with the end
    while low < high:
        for g in range(len(total)):
            total[g] += lacks(t, g, r, end)
        enough = fits(p.meta, len(p.slabs), total)
        for g in range(len(total)):
            total[g] -= lacks(t, g, r, end)
        if enough and tokens + end - start > SHORT_STEP:
            enough = _is_modest(p, t, need, free, r, start, end)
        if enough:
            low = end
        else:
            high = end - 1
        end = (low + high + 1) // 2
    return _at_a_state(t, r, start, low)


@inlined
def _at_a_state(t: Any, r: Any, start: Any, end: Any) -> Any:
    """The last place up to ``end``, after ``start``, at which row r's states can be kept, if there is one.

    ``end`` itself if all that the row knows ends there, and without states.
    """
    for g in range(len(t.geometry)):
        if t.geometry[g, _KIND] == _STATE and end < t.state[r, _TOTAL]:
            bt = t.geometry[g, _BT]
            if end // bt * bt > start:
                end = end // bt * bt
    return end
