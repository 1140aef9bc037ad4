"""The compiled loops that move a block of a tier's pools between their places.

``pool_state`` has the places, the arrays, and the names of the loops' arguments.

Owns       the moves of a block; ``batches`` has them for many at once.
Promises   a block is in exactly one place; empty blocks go out before cached ones, cached ones coldest first. Keeps I1,
           I2, I3, I21.
Does not   keep any state of its own: every loop gets the arrays. ``block_pool`` wraps them for callers in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined, prefetch
from kvtier.pools.cached_ring import enter_ring, head_moved, leave_ring, skip_holes
from kvtier.pools.key_index import forget, forget_one, index_place
from kvtier.pools.pool_state import Col, Mark, Place, SlabCol
from kvtier.pools.slab_loops import add_empties, close_slab, count_fence, list_of, stick, to_empty, unstick

# Plain ints, so that the compiled loops see constants.
_BASE, _N_EMPTY, _N_CACHED = int(Col.BASE), int(Col.EMPTY), int(Col.CACHED)
_N_FENCED, _N_QUAR, _N_HELD = int(Col.FENCED), int(Col.QUARANTINED), int(Col.HELD)
_IBASE, _IMASK, _N_KEYED = int(Col.INDEX_BASE), int(Col.INDEX_MASK), int(Col.KEYED)
_N_EVICTED, _PEAK = int(Col.EVICTED), int(Col.PEAK_HELD)
_CHANGES, _LOG, _LOG_MASK = int(Col.CHANGES), int(Col.LOG_BASE), int(Col.LOG_MASK)
_RBASE, _RSIZE, _HEAD, _OPEN = int(Col.RING_BASE), int(Col.RING_SIZE), int(Col.HEAD), int(Col.OPEN)
_S_EMPTY, _S_CACHED, _S_SUPERSEDED = int(SlabCol.EMPTY), int(SlabCol.CACHED), int(SlabCol.SUPERSEDED)
_S_LISTED, _S_FRESH = int(SlabCol.LISTED), int(SlabCol.FRESH)
_EMPTY, _CACHED, _FENCED = int(Place.EMPTY), int(Place.CACHED), int(Place.FENCED)
_HELD, _QUAR = int(Place.HELD), int(Place.QUARANTINED)
_NONE = int(Mark.NONE)
_U = np.uint64

AHEAD = 16
"""Blocks of lookahead at which cache lines are prefetched, so that misses overlap."""


# --- places ---------------------------------------------------------------------------------------


@inlined
def unpublish(p: Any, g: Any, b: Any) -> None:
    """Forgets block b's key; a cached block becomes an empty one."""
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    if block.mark == _NONE:
        return
    forget_one(p, g, b)
    if block.place == _CACHED:
        leave_ring(p, g, b)
        to_empty(p, g, b)


@inlined
def evict(p: Any, g: Any, n: Any) -> None:
    """The n coldest cached blocks become empty ones. The caller has checked that there are n."""
    meta, blocks, ring, slabs = p.meta, p.blocks, p.ring, p.slabs
    if n > meta[g, _N_CACHED]:
        raise AssertionError("evict() of more blocks than are cached")
    # Counters are kept in local variables: as far as the compiler knows, writing a block may change ``meta``.
    base, start, mask = meta[g, _BASE], _U(meta[g, _IBASE]), _U(meta[g, _IMASK])
    first, last, head = _U(meta[g, _RBASE]), _U(meta[g, _RSIZE] - 1), meta[g, _HEAD]
    log, log_mask, changes = meta[g, _LOG], meta[g, _LOG_MASK], meta[g, _CHANGES]
    s, top, here = np.int64(-1), np.int64(0), np.int64(0)
    for _ in range(n):
        ahead = abs(np.int64(ring[first + (_U(head + 2 * AHEAD) & last)]))  # a stale entry does no harm
        prefetch(blocks, _U(base + ahead))
        ahead = abs(np.int64(ring[first + (_U(head + AHEAD) & last)]))
        prefetch(p.slots, index_place(meta, g, blocks[_U(base + ahead)].high))
        if ring[first + (_U(head) & last)] == 0:
            meta[g, _HEAD] = head
            skip_holes(p, g)
            head = meta[g, _HEAD]
        entry = np.int64(ring[first + (_U(head) & last)])
        b = abs(entry)
        ring[first + (_U(head) & last)] = 0
        head += 1
        forget(p, base, start, mask, b)
        ring[_U(log + (changes & log_mask))] = b
        changes += 1
        block = blocks[_U(base + b)]
        if block.slab != s:
            if s >= 0:
                _listed(meta, slabs, g, s, here, here)
            s, here = np.int64(block.slab), np.int64(0)
            top = list_of(meta, g, s) + slabs[s, _S_LISTED]
        block.place = _EMPTY
        p.empties[_U(top + here)] = b
        here += 1
        if entry < 0:
            slabs[s, _S_SUPERSEDED] -= 1
    if s >= 0:
        _listed(meta, slabs, g, s, here, here)
    head_moved(meta, g, head)
    meta[g, _CHANGES] = changes
    meta[g, _N_EMPTY] += n
    meta[g, _N_CACHED] -= n
    meta[g, _N_KEYED] -= n
    meta[g, _N_EVICTED] += n


@inlined
def _listed(meta: Any, slabs: Any, g: Any, s: Any, n: Any, cached: Any) -> None:
    """n blocks of slab s, ``cached`` of which were cached, have been put on top of its empty ones."""
    slabs[s, _S_LISTED] += n
    slabs[s, _S_CACHED] -= cached
    add_empties(meta, slabs, g, s, n)


@inlined
def _to_free(p: Any, g: Any, b: Any, cold: Any) -> None:
    """Block b has no reference left."""
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    if block.place == _QUAR:
        return
    if block.fence < 0:
        unstick(p, g, b)
        _to_quarantine(p, g, b)
    elif block.fence > 0:
        block.place = _FENCED
        block.link = cold
        p.meta[g, _N_FENCED] += 1
    elif block.mark == _NONE:
        to_empty(p, g, b)
    else:
        block.place = _CACHED
        enter_ring(p, g, b, cold)


@inlined
def _to_quarantine(p: Any, g: Any, b: Any) -> None:
    """Block b, which is neither empty nor cached, leaves circulation; the caller counts its old place."""
    unpublish(p, g, b)
    p.blocks[_U(p.meta[g, _BASE] + b)].place = _QUAR
    p.meta[g, _N_QUAR] += 1
    stick(p, g, b)


@inlined
def _hold(p: Any, g: Any, b: Any) -> None:
    """Block b has left the free ones."""
    meta = p.meta
    p.blocks[_U(meta[g, _BASE] + b)].place = _HELD
    meta[g, _N_HELD] += 1
    meta[g, _PEAK] = max(meta[g, _PEAK], meta[g, _N_HELD])


@inlined
def make_empty(p: Any, g: Any, n: Any) -> None:
    """Makes sure that group g has n empty blocks. The caller has checked that EMPTY + CACHED >= n."""
    if n > p.meta[g, _N_EMPTY]:
        evict(p, g, n - p.meta[g, _N_EMPTY])


@inlined
def take(p: Any, g: Any, out: Any, at: Any, n: Any, near: Any) -> None:
    """Hands out n empty blocks with one reference each, to out[at:]; ``make_empty`` has provided them.

    Takes from slab ``near`` first, if it is not -1 and has empty blocks.
    """
    meta, slabs = p.meta, p.slabs
    base, left = meta[g, _BASE], n
    if n > meta[g, _N_EMPTY]:
        raise AssertionError("take() from a pool without an empty block")
    while left > 0:
        s = meta[g, _OPEN]
        if near >= 0 and slabs[near, _S_EMPTY] > 0:
            s = near
        here = min(left, slabs[s, _S_EMPTY])
        used = min(here, slabs[s, _S_LISTED])
        top, fresh = list_of(meta, g, s) + slabs[s, _S_LISTED] - 1, slabs[s, _S_FRESH]
        for i in range(_U(used)):
            b = np.int64(p.empties[_U(top) - i])
            block = p.blocks[_U(base + b)]
            block.place = _HELD
            block.refs = 1
            out[_U(at) + i] = b
        for i in range(_U(used), _U(here)):
            block = p.blocks[_U(base + fresh)]
            block.place = _HELD
            block.refs = 1
            block.slab = s
            out[_U(at) + i] = fresh
            fresh += 1
        slabs[s, _S_LISTED] -= used
        slabs[s, _S_FRESH] = fresh
        slabs[s, _S_EMPTY] -= here
        if slabs[s, _S_EMPTY] == 0:
            close_slab(meta, slabs, g, s)
        at += here
        left -= here
    meta[g, _N_EMPTY] -= n
    meta[g, _N_HELD] += n
    meta[g, _PEAK] = max(meta[g, _PEAK], meta[g, _N_HELD])


@inlined
def acquire(p: Any, g: Any, b: Any) -> None:
    """One more reference to a block that is held or findable."""
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    if block.refs == 0:
        if block.place == _CACHED:
            leave_ring(p, g, b)
        elif block.place == _FENCED:
            p.meta[g, _N_FENCED] -= 1
        else:
            raise AssertionError("acquire() of a block that holds nothing")
        _hold(p, g, b)
    block.refs += 1


@inlined
def release(p: Any, g: Any, b: Any, cold: Any) -> None:
    """Takes one reference; the last one frees the block, whose content is then the hottest, or the coldest."""
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    if block.refs <= 0 or b == 0:
        raise AssertionError("release() of a block that nobody holds")
    block.refs -= 1
    if block.refs == 0:
        p.meta[g, _N_HELD] -= block.place == _HELD
        _to_free(p, g, b, cold)


@inlined
def release_run(p: Any, g: Any, table: Any, at: Any, n: Any, cold: Any) -> None:
    """``release`` of the n blocks at table[at:], which become null."""
    meta, slabs = p.meta, p.slabs
    base, freed, s, top, here = meta[g, _BASE], 0, np.int64(-1), np.int64(0), np.int64(0)
    for i in range(_U(n)):
        b = np.int64(table[_U(at) + i])
        if b == 0:  # a gap between states
            continue
        table[_U(at) + i] = 0
        block = p.blocks[_U(base + b)]
        if block.refs == 1 and block.place == _HELD and block.mark == _NONE and block.fence == 0:
            if block.slab != s:  # nearly all: back to the empty blocks, with the counters in local variables
                if s >= 0:
                    _listed(meta, slabs, g, s, here, 0)
                s, here = np.int64(block.slab), np.int64(0)
                top = list_of(meta, g, s) + slabs[s, _S_LISTED]
            block.refs = 0
            block.place = _EMPTY
            p.empties[_U(top + here)] = b
            here += 1
            freed += 1
        else:
            if s >= 0:
                _listed(meta, slabs, g, s, here, 0)
            s = np.int64(-1)
            release(p, g, b, cold)
    if s >= 0:
        _listed(meta, slabs, g, s, here, 0)
    meta[g, _N_EMPTY] += freed
    meta[g, _N_HELD] -= freed


@inlined
def fence(p: Any, g: Any, b: Any, ticket: Any) -> None:
    """A store begins to read block b: its next writer must be ordered after ``ticket``."""
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    if block.place == _CACHED:
        block.link = leave_ring(p, g, b)
        block.place = _FENCED
        p.meta[g, _N_FENCED] += 1
    if block.fence <= 0:
        count_fence(p, g, b, 1)
    block.fence = ticket


@inlined
def unfence(p: Any, g: Any, b: Any, ticket: Any, cold: Any) -> None:
    """The store ``ticket`` no longer stands in the way of block b's next writer."""
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    if block.fence != ticket and block.fence != -ticket:
        return
    if block.fence > 0:
        count_fence(p, g, b, -1)
    elif block.place == _HELD:
        unstick(p, g, b)
    block.fence = 0
    if block.place == _FENCED:
        p.meta[g, _N_FENCED] -= 1
        _to_free(p, g, b, cold or block.link != 0)
    elif block.place == _QUAR:
        restore(p, g, b)


@inlined
def expire_fence(p: Any, g: Any, b: Any, ticket: Any) -> None:
    """The store ``ticket`` is overdue: block b is quarantined, at once or when its last reference goes."""
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    if block.fence != ticket:
        return
    count_fence(p, g, b, -1)
    block.fence = -ticket
    if block.place == _HELD:
        stick(p, g, b)
    elif block.place == _FENCED:
        p.meta[g, _N_FENCED] -= 1
        _to_quarantine(p, g, b)


@inlined
def quarantine(p: Any, g: Any, b: Any) -> None:
    """A copy that never ended may still write block b, which is held: it is not handed out until ``restore``."""
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    if block.place != _QUAR:
        p.meta[g, _N_HELD] -= block.place == _HELD
        _to_quarantine(p, g, b)


@inlined
def restore(p: Any, g: Any, b: Any) -> None:
    """The late copy has ended: block b is an empty block again, or held until its last reference goes."""
    meta = p.meta
    block = p.blocks[_U(meta[g, _BASE] + b)]
    if block.place == _QUAR:
        meta[g, _N_QUAR] -= 1
        unstick(p, g, b)
        if block.refs == 0:
            to_empty(p, g, b)
        else:
            block.place = _HELD
            meta[g, _N_HELD] += 1
            meta[g, _PEAK] = max(meta[g, _PEAK], meta[g, _N_HELD])
