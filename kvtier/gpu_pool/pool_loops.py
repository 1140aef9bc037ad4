"""The compiled loops that change a tier's pools.

Owns       the moves of a block between its places (see ``pool_state``), and the key index.
Promises   a block is in exactly one place; empty blocks go out before cached ones, cached ones coldest first; a key
           names at most one block. Keeps I1, I2, I3, I21.
Does not   keep any state of its own: every loop gets the arrays. ``block_pool`` wraps them for callers in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier._jit import inlined, jit
from kvtier.gpu_pool.pool_state import Col, Mark, Place

# Plain ints, so that the compiled loops see constants.
_BASE, _ROWS, _N_EMPTY, _N_CACHED, _N_FENCED, _N_QUAR = (int(c) for c in list(Col)[:6])
_IBASE, _IMASK, _N_KEYED, _N_EVICTED, _PEAK, _N_HELD = (int(c) for c in list(Col)[6:])
_NULL, _EMPTY, _CACHED, _FENCED, _HELD, _QUAR = (int(p) for p in Place)
_NONE, _PENDING, _READY = (int(m) for m in Mark)


# --- lists ----------------------------------------------------------------------------------------


@inlined
def _unlink(p: Any, base: Any, b: Any) -> None:
    before, after = p.prev[base + b], p.next[base + b]
    p.next[base + before] = after
    p.prev[base + after] = before


@inlined
def _link_after(p: Any, base: Any, where: Any, b: Any) -> None:
    after = p.next[base + where]
    p.next[base + where] = b
    p.prev[base + b] = where
    p.next[base + b] = after
    p.prev[base + after] = b


# --- key index ------------------------------------------------------------------------------------


@inlined
def find(p: Any, g: Any, lo: Any, hi: Any) -> Any:
    """The block of group g that carries the key, READY or PENDING; 0 if none."""
    base, start, mask = p.meta[g, _BASE], p.meta[g, _IBASE], np.uint64(p.meta[g, _IMASK])
    tag = hi >> np.uint64(32)
    slot = lo & mask
    while True:
        entry = p.slots[start + np.int64(slot)]
        if entry == np.uint64(0):
            return 0
        if entry >> np.uint64(32) == tag:
            b = np.int64(entry & np.uint64(0xFFFFFFFF))
            if p.key[2 * (base + b)] == lo and p.key[2 * (base + b) + 1] == hi:
                return b
        slot = (slot + np.uint64(1)) & mask


@inlined
def publish(p: Any, g: Any, b: Any, lo: Any, hi: Any, mark: Any) -> None:
    """Names block b. The caller has made sure that no other block of the group carries the key."""
    i = p.meta[g, _BASE] + b
    p.key[2 * i] = lo
    p.key[2 * i + 1] = hi
    p.mark[i] = mark
    start, mask = p.meta[g, _IBASE], np.uint64(p.meta[g, _IMASK])
    slot = lo & mask
    while p.slots[start + np.int64(slot)] != np.uint64(0):
        slot = (slot + np.uint64(1)) & mask
    p.slots[start + np.int64(slot)] = (hi >> np.uint64(32)) << np.uint64(32) | np.uint64(b)
    p.meta[g, _N_KEYED] += 1


@inlined
def unpublish(p: Any, g: Any, b: Any) -> None:
    """Forgets block b's key; a cached block becomes an empty one."""
    base, start, mask = p.meta[g, _BASE], p.meta[g, _IBASE], np.uint64(p.meta[g, _IMASK])
    i = base + b
    if p.mark[i] == _NONE:
        return
    slot = p.key[2 * i] & mask
    while np.int64(p.slots[start + np.int64(slot)] & np.uint64(0xFFFFFFFF)) != b:
        slot = (slot + np.uint64(1)) & mask
    hole = slot  # backward-shift deletion: no tombstones, so lookups stay short for ever
    while True:
        slot = (slot + np.uint64(1)) & mask
        entry = p.slots[start + np.int64(slot)]
        if entry == np.uint64(0):
            break
        home = p.key[2 * (base + np.int64(entry & np.uint64(0xFFFFFFFF)))] & mask
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            p.slots[start + np.int64(hole)] = entry
            hole = slot
    p.slots[start + np.int64(hole)] = np.uint64(0)
    p.meta[g, _N_KEYED] -= 1
    p.mark[i] = _NONE
    if p.place[i] == _CACHED:
        _unlink(p, base, b)
        p.meta[g, _N_CACHED] -= 1
        _to_empty(p, g, b)


# --- places ---------------------------------------------------------------------------------------


@inlined
def _to_empty(p: Any, g: Any, b: Any) -> None:
    base = p.meta[g, _BASE]
    p.place[base + b] = _EMPTY
    p.meta[g, _N_EMPTY] += 1
    _link_after(p, base, p.meta[g, _ROWS], b)


@inlined
def _to_cached(p: Any, g: Any, b: Any, cold: Any) -> None:
    base = p.meta[g, _BASE]
    p.place[base + b] = _CACHED
    p.meta[g, _N_CACHED] += 1
    _link_after(p, base, 0 if cold else p.prev[base], b)


@inlined
def _to_free(p: Any, g: Any, b: Any, cold: Any) -> None:
    """Block b has no reference left."""
    i = p.meta[g, _BASE] + b
    if p.place[i] == _QUAR:
        return
    if p.fence[i] < 0:
        unpublish(p, g, b)
        p.place[i] = _QUAR
        p.meta[g, _N_QUAR] += 1
    elif p.fence[i] > 0:
        p.place[i] = _FENCED
        p.meta[g, _N_FENCED] += 1
    elif p.mark[i] == _NONE:
        _to_empty(p, g, b)
    else:
        _to_cached(p, g, b, cold)


@inlined
def _hold(p: Any, g: Any, b: Any) -> None:
    """Block b has left the free ones."""
    p.place[p.meta[g, _BASE] + b] = _HELD
    p.meta[g, _N_HELD] += 1
    p.meta[g, _PEAK] = max(p.meta[g, _PEAK], p.meta[g, _N_HELD])


@inlined
def take(p: Any, g: Any) -> Any:
    """Hands out one block with one reference: an empty one, else the coldest cached one (its key is forgotten).

    The caller has checked that EMPTY + CACHED > 0.
    """
    base = p.meta[g, _BASE]
    b = np.int64(p.next[base + p.meta[g, _ROWS]])
    if b != p.meta[g, _ROWS]:
        p.meta[g, _N_EMPTY] -= 1
        _unlink(p, base, b)
    else:
        b = np.int64(p.next[base])
        if b == 0:
            raise AssertionError("take() from a pool without a free block")
        unpublish(p, g, b)  # moves it to the empty list
        p.meta[g, _N_EVICTED] += 1
        p.meta[g, _N_EMPTY] -= 1
        _unlink(p, base, b)
    _hold(p, g, b)
    p.refs[base + b] = 1
    return b


@inlined
def acquire(p: Any, g: Any, b: Any) -> None:
    """One more reference to a block that is held or findable."""
    base = p.meta[g, _BASE]
    i = base + b
    if p.refs[i] == 0:
        if p.place[i] == _CACHED:
            _unlink(p, base, b)
            p.meta[g, _N_CACHED] -= 1
        elif p.place[i] == _FENCED:
            p.meta[g, _N_FENCED] -= 1
        else:
            raise AssertionError("acquire() of a block that holds nothing")
        _hold(p, g, b)
    p.refs[i] += 1


@inlined
def release(p: Any, g: Any, b: Any) -> None:
    """One reference less; the last one frees the block."""
    i = p.meta[g, _BASE] + b
    if p.refs[i] <= 0 or b == 0:
        raise AssertionError("release() of a block that nobody holds")
    p.refs[i] -= 1
    if p.refs[i] == 0:
        p.meta[g, _N_HELD] -= p.place[i] == _HELD
        _to_free(p, g, b, False)


@inlined
def fence(p: Any, g: Any, b: Any, ticket: Any) -> None:
    """A store begins to read block b: its next writer must be ordered after ``ticket``."""
    base = p.meta[g, _BASE]
    if p.place[base + b] == _CACHED:
        _unlink(p, base, b)
        p.meta[g, _N_CACHED] -= 1
        p.place[base + b] = _FENCED
        p.meta[g, _N_FENCED] += 1
    p.fence[base + b] = ticket


@inlined
def unfence(p: Any, g: Any, b: Any, ticket: Any, cold: Any) -> None:
    """The store ``ticket`` no longer stands in the way of block b's next writer."""
    i = p.meta[g, _BASE] + b
    if p.fence[i] != ticket and p.fence[i] != -ticket:
        return
    p.fence[i] = 0
    if p.place[i] == _FENCED:
        p.meta[g, _N_FENCED] -= 1
        _to_free(p, g, b, cold)
    elif p.place[i] == _QUAR:
        restore(p, g, b)


@inlined
def expire_fence(p: Any, g: Any, b: Any, ticket: Any) -> None:
    """The store ``ticket`` is overdue: block b is quarantined, at once or when its last reference goes."""
    i = p.meta[g, _BASE] + b
    if p.fence[i] != ticket:
        return
    p.fence[i] = -ticket
    if p.place[i] == _FENCED:
        p.meta[g, _N_FENCED] -= 1
        unpublish(p, g, b)
        p.place[i] = _QUAR
        p.meta[g, _N_QUAR] += 1


@inlined
def quarantine(p: Any, g: Any, b: Any) -> None:
    """A copy that never ended may still write block b: nobody gets it until ``restore``."""
    i = p.meta[g, _BASE] + b
    unpublish(p, g, b)
    if p.place[i] != _QUAR:
        p.meta[g, _N_HELD] -= p.place[i] == _HELD
        p.place[i] = _QUAR
        p.meta[g, _N_QUAR] += 1


@inlined
def restore(p: Any, g: Any, b: Any) -> None:
    """The late copy has ended: block b is an empty block again, or held until its last reference goes."""
    i = p.meta[g, _BASE] + b
    if p.place[i] == _QUAR:
        unpublish(p, g, b)
        p.meta[g, _N_QUAR] -= 1
        if p.refs[i] == 0:
            _to_empty(p, g, b)
        else:
            p.place[i] = _HELD
            p.meta[g, _N_HELD] += 1


# --- batches: one call for many blocks of any groups ----------------------------------------------


@jit
def take_batch(p: Any, groups: Any, out: Any) -> None:
    for k in range(len(groups)):
        out[k] = take(p, groups[k])


@jit
def publish_batch(p: Any, groups: Any, blocks: Any, keys: Any, mark: Any) -> None:
    for k in range(len(groups)):
        publish(p, groups[k], blocks[k], keys[k, 0], keys[k, 1], mark)


@jit
def unpublish_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        unpublish(p, groups[k], blocks[k])


@jit
def release_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups) - 1, -1, -1):  # backwards: the end of a prefix is evicted before its beginning
        release(p, groups[k], blocks[k])


@jit
def acquire_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        acquire(p, groups[k], blocks[k])


@jit
def fence_batch(p: Any, groups: Any, blocks: Any, ticket: Any) -> None:
    for k in range(len(groups)):
        fence(p, groups[k], blocks[k], ticket)


@jit
def unfence_batch(p: Any, groups: Any, blocks: Any, ticket: Any, cold: Any) -> None:
    for k in range(len(groups) - 1, -1, -1):
        unfence(p, groups[k], blocks[k], ticket, cold)


@jit
def expire_batch(p: Any, groups: Any, blocks: Any, ticket: Any) -> None:
    for k in range(len(groups)):
        expire_fence(p, groups[k], blocks[k], ticket)


@jit
def quarantine_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        quarantine(p, groups[k], blocks[k])


@jit
def restore_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        restore(p, groups[k], blocks[k])


@jit
def ready_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        p.mark[p.meta[groups[k], _BASE] + blocks[k]] = _READY


@jit
def find_batch(p: Any, groups: Any, keys: Any, out: Any) -> None:
    for k in range(len(groups)):
        out[k] = find(p, groups[k], keys[k, 0], keys[k, 1])


@jit
def coldest(p: Any, g: Any, out: Any) -> Any:
    """Writes the coldest cached blocks, coldest first; returns how many there were."""
    base = p.meta[g, _BASE]
    b, n = p.next[base], 0
    while b != 0 and n < len(out):
        out[n] = b
        n += 1
        b = p.next[base + b]
    return n


@jit
def forget_all(p: Any) -> None:
    for g in range(p.meta.shape[0]):
        for b in range(1, p.meta[g, _ROWS]):
            unpublish(p, g, b)
