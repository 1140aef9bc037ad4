"""The compiled loops of the ring of cached blocks: which content is given up first.

Promises   entries are in the order of caching, coldest first. Superseded entries stand before all others. Entering and
           leaving cost the same whatever their number. Keeps I3.
Does not   know keys.

An entry is a block. It is negative if its content was superseded when it was cached.

A block that leaves from the middle leaves a hole. A sweep closes holes, a few at a time. So the ring, half as large
again as the pool at least, never fills up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined
from kvtier.pools.pool_state import Col, SlabCol

_BASE, _CACHED, _CLOCK = int(Col.BASE), int(Col.CACHED), int(Col.CLOCK)
_RBASE, _RSIZE, _HEAD, _TAIL = int(Col.RING_BASE), int(Col.RING_SIZE), int(Col.HEAD), int(Col.TAIL)
_CLOSED, _SWEEP, _SWEEPS, _STAMPS = (int(c) for c in (Col.CLOSED, Col.SWEEP, Col.SWEEPS, Col.STAMPS))
_S_CACHED, _S_SUPERSEDED, _S_STAMP = int(SlabCol.CACHED), int(SlabCol.SUPERSEDED), int(SlabCol.STAMP)
_U = np.uint64

SWEEP_STEP = 16
"""Ring entries that a sweep looks at per append: it ends before the ring can fill up."""
STAMPED = 8
"""Ring entries that share one clock value: the newest entry's, approximate after a sweep.

It is unset at the tail and for superseded entries.
"""
LOOK = 64
"""Ring entries whose slabs' stamps are looked at as well: none was cached before the coldest."""
_TICKS = (1 << 31) - 1
"""Stamps are kept modulo one more: after 2**31 ticks an entry looks as if it had been cached just now."""


@inlined
def ring_at(meta: Any, g: Any, position: Any) -> Any:
    """The place of the ring's entry of this position, as an offset in the group's part."""
    return _U(position) & _U(meta[g, _RSIZE] - 1)


@inlined
def _stamp_at(meta: Any, g: Any, position: Any) -> Any:
    """The place in ``ring`` of the stamp of the entry at ``position``."""
    return _U(meta[g, _STAMPS]) + ring_at(meta, g, position) // _U(STAMPED)


@inlined
def _stamp(p: Any, g: Any, position: Any) -> Any:
    """The stamp of the entry at ``position``."""
    meta = p.meta
    if position // STAMPED == meta[g, _TAIL] // STAMPED:
        return meta[0, _CLOCK] & _TICKS
    return np.int64(p.ring[_stamp_at(meta, g, position)])


@inlined
def enter_ring(p: Any, g: Any, b: Any, cold: Any) -> None:
    """Block b becomes the coldest or the hottest entry."""
    meta, slabs = p.meta, p.slabs
    superseded = cold and meta[g, _TAIL] - meta[g, _HEAD] < meta[g, _RSIZE]
    if superseded:
        meta[g, _HEAD] -= 1
        position = meta[g, _HEAD]
    else:
        position = meta[g, _TAIL]
        meta[g, _TAIL] += 1
        if position % STAMPED == STAMPED - 1:
            p.ring[_stamp_at(meta, g, position)] = meta[0, _CLOCK] & _TICKS
    at = ring_at(meta, g, position)
    p.ring[_U(meta[g, _RBASE]) + at] = -b if superseded else b
    block = p.blocks[_U(meta[g, _BASE] + b)]
    block.link = at
    meta[g, _CACHED] += 1
    slabs[np.int64(block.slab), _S_CACHED] += 1
    if superseded:
        slabs[np.int64(block.slab), _S_SUPERSEDED] += 1
    else:
        slabs[np.int64(block.slab), _S_STAMP] = meta[0, _CLOCK]
    if meta[g, _SWEEP] >= 0 or 8 * (meta[g, _TAIL] - meta[g, _HEAD]) > 7 * meta[g, _RSIZE]:
        _sweep(p, g)


@inlined
def leave_ring(p: Any, g: Any, b: Any) -> Any:
    """Block b's entry becomes a hole. Returns whether its content was superseded."""
    meta = p.meta
    block = p.blocks[_U(meta[g, _BASE] + b)]
    at = _U(meta[g, _RBASE]) + _U(block.link)
    superseded = p.ring[at] < 0
    p.slabs[np.int64(block.slab), _S_SUPERSEDED] -= superseded
    p.slabs[np.int64(block.slab), _S_CACHED] -= 1
    p.ring[at] = 0
    meta[g, _CACHED] -= 1
    return superseded


@inlined
def _sweep(p: Any, g: Any) -> None:
    """Closes some holes: entries move towards the head, in order, a few at a time."""
    meta, ring = p.meta, p.ring
    base, start = meta[g, _BASE], _U(meta[g, _RBASE])
    if meta[g, _SWEEP] < 0:
        meta[g, _SWEEP] = meta[g, _CLOSED] = meta[g, _HEAD]
        meta[g, _SWEEPS] += 1
    closed, next_one = meta[g, _CLOSED], meta[g, _SWEEP]
    end = min(next_one + SWEEP_STEP, meta[g, _TAIL])
    while next_one < end:
        source, target = ring_at(meta, g, next_one), ring_at(meta, g, closed)
        entry = np.int64(ring[start + source])
        if entry != 0:
            ring[start + source] = 0
            ring[start + target] = entry
            p.blocks[_U(base + abs(entry))].link = target
            first = entry > 0 and ring[start + ring_at(meta, g, closed - 1)] <= 0
            if first or (closed - meta[g, _SWEEPS]) % STAMPED == 0:  # shifts by sweep, so that stamps keep up
                ring[_stamp_at(meta, g, closed)] = _stamp(p, g, next_one)
            closed += 1
        next_one += 1
    meta[g, _CLOSED], meta[g, _SWEEP] = closed, next_one
    if next_one == meta[g, _TAIL]:
        meta[g, _TAIL], meta[g, _SWEEP] = closed, -1


@inlined
def skip_holes(p: Any, g: Any) -> None:
    """The ring's head is an entry. The caller knows that there is one."""
    meta = p.meta
    start = _U(meta[g, _RBASE])
    while p.ring[start + ring_at(meta, g, meta[g, _HEAD])] == 0:
        if meta[g, _HEAD] == meta[g, _CLOSED] and meta[g, _SWEEP] > meta[g, _HEAD]:
            meta[g, _HEAD] = meta[g, _CLOSED] = meta[g, _SWEEP]  # all between is holes
        else:
            meta[g, _HEAD] += 1
            if meta[g, _SWEEP] >= 0:
                meta[g, _CLOSED] = max(meta[g, _CLOSED], meta[g, _HEAD])
                meta[g, _SWEEP] = max(meta[g, _SWEEP], meta[g, _HEAD])


@inlined
def coldest_stamp(p: Any, g: Any) -> Any:
    """When the ring's coldest entry was cached, on the tier's clock, or a few entries off; -1 if it was superseded.

    The caller knows that there is an entry. A stamp belongs to a few entries. A slab's stamp belongs to the last block
    cached there. The least is closest.
    """
    meta = p.meta
    skip_holes(p, g)
    head, clock = meta[g, _HEAD], meta[0, _CLOCK]
    if p.ring[_U(meta[g, _RBASE]) + ring_at(meta, g, head)] < 0:
        return np.int64(-1)
    least = clock - ((clock - _stamp(p, g, head)) & _TICKS)
    for position in range(head, min(head + LOOK, meta[g, _TAIL])):
        b = np.int64(p.ring[_U(meta[g, _RBASE]) + ring_at(meta, g, position)])
        if b != 0:
            least = min(least, p.slabs[np.int64(p.blocks[_U(meta[g, _BASE] + b)].slab), _S_STAMP])
    return least


@inlined
def stamp_of(p: Any, g: Any, n: Any) -> Any:
    """When the n-th coldest entry was cached, or a few entries off; -1 if it was superseded. The caller knows that
    there are n."""
    meta = p.meta
    start, position, clock = _U(meta[g, _RBASE]), meta[g, _HEAD] - 1, meta[0, _CLOCK]
    while n > 0:
        position += 1
        n -= p.ring[start + ring_at(meta, g, position)] != 0
    if p.ring[start + ring_at(meta, g, position)] < 0:
        return np.int64(-1)
    return clock - ((clock - _stamp(p, g, position)) & _TICKS)


@inlined
def rename_entry(p: Any, g: Any, old: Any, new: Any) -> None:
    """Cached block ``old``'s entry is that of block ``new``, which is not cached yet, from now on."""
    meta, slabs = p.meta, p.slabs
    source, target = p.blocks[_U(meta[g, _BASE] + old)], p.blocks[_U(meta[g, _BASE] + new)]
    at = _U(meta[g, _RBASE]) + _U(source.link)
    superseded = p.ring[at] < 0
    p.ring[at] = -new if superseded else new
    target.link = source.link
    a, b = np.int64(source.slab), np.int64(target.slab)
    slabs[a, _S_CACHED] -= 1
    slabs[b, _S_CACHED] += 1
    slabs[a, _S_SUPERSEDED] -= superseded
    slabs[b, _S_SUPERSEDED] += superseded
    if not superseded:
        slabs[b, _S_STAMP] = max(slabs[b, _S_STAMP], slabs[a, _S_STAMP])


@inlined
def as_cold(p: Any, g: Any, most: Any) -> Any:
    """How many entries go with the coldest one, ``most`` at most: if that is superseded, only superseded ones."""
    meta = p.meta
    start, position, n = _U(meta[g, _RBASE]), meta[g, _HEAD], np.int64(0)
    while n < most and position < meta[g, _TAIL]:
        entry = np.int64(p.ring[start + ring_at(meta, g, position)])
        if entry > 0:
            break
        n += entry < 0
        position += 1
    return n if n > 0 else most


@inlined
def head_moved(meta: Any, g: Any, head: Any) -> None:
    """Entries before ``head`` have gone."""
    meta[g, _HEAD] = head
    if meta[g, _SWEEP] >= 0:
        meta[g, _CLOSED], meta[g, _SWEEP] = max(meta[g, _CLOSED], head), max(meta[g, _SWEEP], head)
