"""The compiled loops that keep a slab's counts: empty blocks, cached blocks, and blocks that copies read or may write.

Promises   a pool's counts are the sums of its slabs'. A pool finds a slab with an empty block at once, whatever its
           number of slabs. Keeps I1.
Does not   know keys or references.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined, jit
from kvtier.pools.pool_state import Col, Place, SlabCol

_BASE, _EMPTY, _PER_SLAB, _FIRST_SLAB = int(Col.BASE), int(Col.EMPTY), int(Col.PER_SLAB), int(Col.FIRST_SLAB)
_MOST_SLABS, _OPEN, _STUCK = int(Col.MOST_SLABS), int(Col.OPEN), int(Col.STUCK)
_HELD, _QUARANTINED = int(Col.HELD), int(Col.QUARANTINED)
_S_EMPTY, _S_LISTED, _S_FRESH = int(SlabCol.EMPTY), int(SlabCol.LISTED), int(SlabCol.FRESH)
_S_NEXT, _S_PREVIOUS, _S_STUCK = int(SlabCol.NEXT), int(SlabCol.PREVIOUS), int(SlabCol.STUCK)
_S_FENCES = int(SlabCol.FENCES)
_PLACE_EMPTY = int(Place.EMPTY)
_U = np.uint64


@inlined
def first_block(meta: Any, g: Any, s: Any) -> Any:
    """The first block of slab s in the pool of group g."""
    return 1 + (s - meta[g, _FIRST_SLAB]) * meta[g, _PER_SLAB]


@inlined
def list_of(meta: Any, g: Any, s: Any) -> Any:
    """The place in ``empties`` at which the list of slab s's empty blocks begins."""
    return meta[g, _BASE] + first_block(meta, g, s)


# --- slabs with empty blocks ----------------------------------------------------------------------


@inlined
def open_slab(meta: Any, slabs: Any, g: Any, s: Any) -> None:
    """Slab s has an empty block again: the next block is taken from there."""
    first = meta[g, _OPEN]
    slabs[s, _S_NEXT] = first
    slabs[s, _S_PREVIOUS] = -1
    if first >= 0:
        slabs[first, _S_PREVIOUS] = s
    meta[g, _OPEN] = s


@inlined
def close_slab(meta: Any, slabs: Any, g: Any, s: Any) -> None:
    """Slab s has no empty block left, or leaves the pool."""
    after, before = slabs[s, _S_NEXT], slabs[s, _S_PREVIOUS]
    if after >= 0:
        slabs[after, _S_PREVIOUS] = before
    if before >= 0:
        slabs[before, _S_NEXT] = after
    else:
        meta[g, _OPEN] = after


@inlined
def add_empties(meta: Any, slabs: Any, g: Any, s: Any, n: Any) -> None:
    """n blocks, which the caller has put into slab s's list, are empty."""
    if n == 0:
        return
    if slabs[s, _S_EMPTY] == 0:
        open_slab(meta, slabs, g, s)
    slabs[s, _S_EMPTY] += n
    if slabs[s, _S_EMPTY] == meta[g, _PER_SLAB]:  # as good as new: blocks go out in order again
        slabs[s, _S_LISTED] = 0
        slabs[s, _S_FRESH] = first_block(meta, g, s)


@inlined
def to_empty(p: Any, g: Any, b: Any) -> None:
    """Block b becomes an empty one."""
    meta, slabs = p.meta, p.slabs
    block = p.blocks[_U(meta[g, _BASE] + b)]
    s = np.int64(block.slab)
    block.place = _PLACE_EMPTY
    p.empties[_U(list_of(meta, g, s) + slabs[s, _S_LISTED])] = b
    slabs[s, _S_LISTED] += 1
    add_empties(meta, slabs, g, s, 1)
    meta[g, _EMPTY] += 1


# --- blocks that copies read, or may still write -----------------------------------------------------------


@inlined
def stick(p: Any, g: Any, b: Any) -> None:
    """Block b cannot be moved until ``unstick``."""
    s = np.int64(p.blocks[_U(p.meta[g, _BASE] + b)].slab)
    p.meta[g, _STUCK] += p.slabs[s, _S_STUCK] == 0
    p.slabs[s, _S_STUCK] += 1


@inlined
def unstick(p: Any, g: Any, b: Any) -> None:
    """Ends ``stick``."""
    s = np.int64(p.blocks[_U(p.meta[g, _BASE] + b)].slab)
    p.slabs[s, _S_STUCK] -= 1
    p.meta[g, _STUCK] -= p.slabs[s, _S_STUCK] == 0


@inlined
def count_fence(p: Any, g: Any, b: Any, n: Any) -> None:
    """A store reads block b (n = 1), or no longer reads it, or is overdue (n = -1)."""
    p.slabs[np.int64(p.blocks[_U(p.meta[g, _BASE] + b)].slab), _S_FENCES] += n


# --- what fits ------------------------------------------------------------------------------------


@inlined
def slabs_for(meta: Any, g: Any, used: Any) -> Any:
    """Slabs that ``used`` blocks of group g take, moved together as far as copies under way allow."""
    per = meta[g, _PER_SLAB]
    if used <= per:
        return max(meta[g, _STUCK], np.int64(used > 0))
    return max(meta[g, _STUCK], (used + per - 1) // per)


@inlined
def fits(meta: Any, num_slabs: Any, used: Any) -> Any:
    """Whether the pools can have used[G] blocks that are held or quarantined, all at once."""
    total, within = np.int64(0), True
    for g in range(len(meta)):
        n = slabs_for(meta, g, used[g])
        within &= n <= meta[g, _MOST_SLABS]
        total += n
    return within and total <= num_slabs


@jit
def room(meta: Any, num_slabs: Any, used: Any, most: Any) -> Any:
    """Writes most[G], the blocks that each group could have if the others had used[G]; returns ``fits``."""
    total = np.int64(0)
    for g in range(len(meta)):
        total += min(slabs_for(meta, g, used[g]), meta[g, _MOST_SLABS])
    for g in range(len(meta)):
        others = total - min(slabs_for(meta, g, used[g]), meta[g, _MOST_SLABS])
        most[g] = max(np.int64(0), min(meta[g, _MOST_SLABS], num_slabs - others)) * meta[g, _PER_SLAB]
    return fits(meta, num_slabs, used)


@inlined
def live(meta: Any, g: Any) -> Any:
    """Blocks of group g that cannot be handed out: held, or quarantined."""
    return meta[g, _HELD] + meta[g, _QUARANTINED]
