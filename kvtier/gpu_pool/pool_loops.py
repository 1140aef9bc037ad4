"""The compiled loops that change a tier's pools.

Owns       the moves of a block between its places (see ``pool_state``), the key index, the ring of cached blocks.
Promises   a block is in exactly one place; empty blocks go out before cached ones, cached ones coldest first; a key
           names at most one block. Keeps I1, I2, I3, I21.
Does not   keep any state of its own: every loop gets the arrays. ``block_pool`` wraps them for callers in Python.

Arrays are indexed unsigned: a signed index costs a test for wrapping, and keeps loops from becoming plain copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier._jit import inlined, jit, prefetch
from kvtier.gpu_pool.pool_state import Col, Mark, Place

# Plain ints, so that the compiled loops see constants.
_BASE, _ROWS, _N_EMPTY, _N_CACHED, _N_FENCED, _N_QUAR = (int(c) for c in list(Col)[:6])
_IBASE, _IMASK, _N_KEYED, _N_EVICTED, _PEAK, _N_HELD = (int(c) for c in list(Col)[6:12])
_FIRST_EMPTY, _FRESH, _RBASE, _RSIZE, _HEAD, _TAIL, _CLOSED, _SWEEP = (int(c) for c in list(Col)[12:])
_EMPTY, _CACHED, _FENCED, _HELD, _QUAR, _NULL = (int(p) for p in Place)
_NONE, _PENDING, _READY = (int(m) for m in Mark)

_U = np.uint64
_ZERO, _ONE, _HALF, _LOW_HALF = _U(0), _U(1), _U(32), _U(0xFFFFFFFF)

AHEAD = 16
"""How many blocks ahead of the one that is worked on cache lines are asked for, so that misses overlap."""
SWEEP_STEP = 16
"""Ring entries that a sweep looks at per append: it ends before the ring can fill up."""


# --- key index ------------------------------------------------------------------------------------


@inlined
def _locate(meta: Any, blocks: Any, slots: Any, g: Any, low: Any, high: Any) -> Any:
    """(place in ``slots``, block) of the key; where none carries it, the empty place in which it belongs, and 0."""
    base, start, mask = _U(meta[g, _BASE]), _U(meta[g, _IBASE]), _U(meta[g, _IMASK])
    tag = high >> _HALF
    slot = tag & mask
    while True:
        entry = slots[start + slot]
        if entry == _ZERO:
            return start + slot, np.int64(0)
        if entry >> _HALF == tag:
            block = blocks[base + (entry & _LOW_HALF)]
            if block.low == low and block.high == high:
                return start + slot, np.int64(entry & _LOW_HALF)
        slot = (slot + _ONE) & mask


@inlined
def find(meta: Any, blocks: Any, slots: Any, g: Any, low: Any, high: Any) -> Any:
    """The block of group g that carries the key, READY or PENDING; 0 if none."""
    return _locate(meta, blocks, slots, g, low, high)[1]


@inlined
def prefetch_slot(meta: Any, slots: Any, g: Any, high: Any) -> None:
    """Asks for the index's line of the key with this high word."""
    prefetch(slots, _U(meta[g, _IBASE]) + ((high >> _HALF) & _U(meta[g, _IMASK])))


@inlined
def publish(meta: Any, blocks: Any, slots: Any, g: Any, b: Any, low: Any, high: Any, mark: Any) -> Any:
    """Names block b; returns 0. If another block of the group carries the key, that is returned and nothing changes."""
    place, other = _locate(meta, blocks, slots, g, low, high)
    if other != 0:
        return other
    slots[place] = (high >> _HALF) << _HALF | _U(b)
    block = blocks[_U(meta[g, _BASE] + b)]
    block.low = low
    block.high = high
    block.mark = mark
    meta[g, _N_KEYED] += 1
    return np.int64(0)


@inlined
def _forget(blocks: Any, slots: Any, base: Any, start: Any, mask: Any, b: Any) -> None:
    """Takes the key of block b out of the index; the caller counts it."""
    block = blocks[_U(base + b)]
    tag = block.high >> _HALF
    slot = tag & mask
    while slots[start + slot] != tag << _HALF | _U(b):
        slot = (slot + _ONE) & mask
    hole = slot  # backward-shift deletion: no tombstones, so lookups stay short for ever
    while True:
        slot = (slot + _ONE) & mask
        entry = slots[start + slot]
        if entry == _ZERO:
            break
        home = (entry >> _HALF) & mask
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            slots[start + hole] = entry
            hole = slot
    slots[start + hole] = _ZERO
    block.mark = _NONE


@inlined
def unpublish(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, b: Any) -> None:
    """Forgets block b's key; a cached block becomes an empty one."""
    block = blocks[_U(meta[g, _BASE] + b)]
    if block.mark == _NONE:
        return
    _forget(blocks, slots, meta[g, _BASE], _U(meta[g, _IBASE]), _U(meta[g, _IMASK]), b)
    meta[g, _N_KEYED] -= 1
    if block.place == _CACHED:
        _leave_ring(meta, ring, g, block.link)
        _to_empty(meta, blocks, g, b)


# --- the ring of cached blocks --------------------------------------------------------------------


@inlined
def _ring_at(meta: Any, g: Any, position: Any) -> Any:
    """Where the ring's entry of this position lies, as an offset in the group's part."""
    return _U(position) & _U(meta[g, _RSIZE] - 1)


@inlined
def _enter_ring(meta: Any, blocks: Any, ring: Any, g: Any, b: Any, cold: Any) -> None:
    """Block b becomes the coldest or the hottest entry."""
    if cold and meta[g, _TAIL] - meta[g, _HEAD] < meta[g, _RSIZE]:
        meta[g, _HEAD] -= 1
        position = meta[g, _HEAD]
    else:
        position = meta[g, _TAIL]
        meta[g, _TAIL] += 1
    at = _ring_at(meta, g, position)
    ring[_U(meta[g, _RBASE]) + at] = b
    blocks[_U(meta[g, _BASE] + b)].link = at
    meta[g, _N_CACHED] += 1
    if meta[g, _SWEEP] >= 0 or 8 * (meta[g, _TAIL] - meta[g, _HEAD]) > 7 * meta[g, _RSIZE]:
        _sweep(meta, blocks, ring, g)


@inlined
def _leave_ring(meta: Any, ring: Any, g: Any, at: Any) -> None:
    """The entry becomes a hole."""
    ring[_U(meta[g, _RBASE]) + _U(at)] = 0
    meta[g, _N_CACHED] -= 1


@inlined
def _sweep(meta: Any, blocks: Any, ring: Any, g: Any) -> None:
    """Closes some holes: entries move towards the head, in order, a few at a time."""
    base, start = meta[g, _BASE], _U(meta[g, _RBASE])
    if meta[g, _SWEEP] < 0:
        meta[g, _SWEEP] = meta[g, _CLOSED] = meta[g, _HEAD]
    closed, next_one = meta[g, _CLOSED], meta[g, _SWEEP]
    end = min(next_one + SWEEP_STEP, meta[g, _TAIL])
    while next_one < end:
        source, target = _ring_at(meta, g, next_one), _ring_at(meta, g, closed)
        b = np.int64(ring[start + source])
        if b != 0:
            ring[start + source] = 0
            ring[start + target] = b
            blocks[_U(base + b)].link = target
            closed += 1
        next_one += 1
    meta[g, _CLOSED], meta[g, _SWEEP] = closed, next_one
    if next_one == meta[g, _TAIL]:
        meta[g, _TAIL], meta[g, _SWEEP] = closed, -1


@inlined
def _skip_holes(meta: Any, ring: Any, g: Any) -> None:
    """The ring's head is an entry. The caller knows that there is one."""
    start = _U(meta[g, _RBASE])
    while ring[start + _ring_at(meta, g, meta[g, _HEAD])] == 0:
        if meta[g, _HEAD] == meta[g, _CLOSED] and meta[g, _SWEEP] > meta[g, _HEAD]:
            meta[g, _HEAD] = meta[g, _CLOSED] = meta[g, _SWEEP]  # all between is holes
        else:
            meta[g, _HEAD] += 1
            if meta[g, _SWEEP] >= 0:
                meta[g, _CLOSED] = max(meta[g, _CLOSED], meta[g, _HEAD])
                meta[g, _SWEEP] = max(meta[g, _SWEEP], meta[g, _HEAD])


@inlined
def evict(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, n: Any) -> None:
    """The n coldest cached blocks become empty ones. The caller has checked that there are as many."""
    if n > meta[g, _N_CACHED]:
        raise AssertionError("evict() of more blocks than are cached")
    # Counters are kept in local variables: for all that the compiler knows, writing a block may change ``meta``.
    base, start, mask = meta[g, _BASE], _U(meta[g, _IBASE]), _U(meta[g, _IMASK])
    first, last, head, empty = _U(meta[g, _RBASE]), _U(meta[g, _RSIZE] - 1), meta[g, _HEAD], meta[g, _FIRST_EMPTY]
    for _ in range(n):
        ahead = ring[first + (_U(head + 2 * AHEAD) & last)]  # a stale entry does no harm
        prefetch(blocks, _U(base + ahead))
        ahead = ring[first + (_U(head + AHEAD) & last)]
        prefetch(slots, start + ((blocks[_U(base + ahead)].high >> _HALF) & mask))
        if ring[first + (_U(head) & last)] == 0:
            meta[g, _HEAD] = head
            _skip_holes(meta, ring, g)
            head = meta[g, _HEAD]
        b = np.int64(ring[first + (_U(head) & last)])
        ring[first + (_U(head) & last)] = 0
        head += 1
        _forget(blocks, slots, base, start, mask, b)
        block = blocks[_U(base + b)]
        block.place = _EMPTY
        block.link = empty
        empty = b
    meta[g, _HEAD], meta[g, _FIRST_EMPTY] = head, empty
    if meta[g, _SWEEP] >= 0:
        meta[g, _CLOSED], meta[g, _SWEEP] = max(meta[g, _CLOSED], head), max(meta[g, _SWEEP], head)
    meta[g, _N_EMPTY] += n
    meta[g, _N_CACHED] -= n
    meta[g, _N_KEYED] -= n
    meta[g, _N_EVICTED] += n


# --- places ---------------------------------------------------------------------------------------


@inlined
def _to_empty(meta: Any, blocks: Any, g: Any, b: Any) -> None:
    block = blocks[_U(meta[g, _BASE] + b)]
    block.place = _EMPTY
    block.link = meta[g, _FIRST_EMPTY]
    meta[g, _FIRST_EMPTY] = b
    meta[g, _N_EMPTY] += 1


@inlined
def _to_free(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, b: Any, cold: Any) -> None:
    """Block b has no reference left."""
    block = blocks[_U(meta[g, _BASE] + b)]
    if block.place == _QUAR:
        return
    if block.fence < 0:
        unpublish(meta, blocks, slots, ring, g, b)
        block.place = _QUAR
        meta[g, _N_QUAR] += 1
    elif block.fence > 0:
        block.place = _FENCED
        meta[g, _N_FENCED] += 1
    elif block.mark == _NONE:
        _to_empty(meta, blocks, g, b)
    else:
        block.place = _CACHED
        _enter_ring(meta, blocks, ring, g, b, cold)


@inlined
def _hold(meta: Any, blocks: Any, g: Any, b: Any) -> None:
    """Block b has left the free ones."""
    blocks[_U(meta[g, _BASE] + b)].place = _HELD
    meta[g, _N_HELD] += 1
    meta[g, _PEAK] = max(meta[g, _PEAK], meta[g, _N_HELD])


@inlined
def make_empty(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, n: Any) -> None:
    """Sees to it that group g has n empty blocks. The caller has checked that EMPTY + CACHED >= n."""
    if n > meta[g, _N_EMPTY]:
        evict(meta, blocks, slots, ring, g, n - meta[g, _N_EMPTY])


@inlined
def take(meta: Any, blocks: Any, g: Any, out: Any, at: Any, n: Any) -> None:
    """Hands out n empty blocks with one reference each, to out[at:]; ``make_empty`` has seen to it that there are."""
    base, empty, fresh = meta[g, _BASE], meta[g, _FIRST_EMPTY], meta[g, _FRESH]
    if n > meta[g, _N_EMPTY]:
        raise AssertionError("take() from a pool without an empty block")
    for i in range(_U(n)):
        if empty != 0:
            b = empty
            empty = np.int64(blocks[_U(base + b)].link)
        else:
            b = fresh
            fresh += 1
        block = blocks[_U(base + b)]
        block.place = _HELD
        block.refs = 1
        out[_U(at) + i] = b
    meta[g, _FIRST_EMPTY], meta[g, _FRESH] = empty, fresh
    meta[g, _N_EMPTY] -= n
    meta[g, _N_HELD] += n
    meta[g, _PEAK] = max(meta[g, _PEAK], meta[g, _N_HELD])


@inlined
def acquire(meta: Any, blocks: Any, ring: Any, g: Any, b: Any) -> None:
    """One more reference to a block that is held or findable."""
    block = blocks[_U(meta[g, _BASE] + b)]
    if block.refs == 0:
        if block.place == _CACHED:
            _leave_ring(meta, ring, g, block.link)
        elif block.place == _FENCED:
            meta[g, _N_FENCED] -= 1
        else:
            raise AssertionError("acquire() of a block that holds nothing")
        _hold(meta, blocks, g, b)
    block.refs += 1


@inlined
def release(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, b: Any) -> None:
    """One reference less; the last one frees the block."""
    block = blocks[_U(meta[g, _BASE] + b)]
    if block.refs <= 0 or b == 0:
        raise AssertionError("release() of a block that nobody holds")
    block.refs -= 1
    if block.refs == 0:
        meta[g, _N_HELD] -= block.place == _HELD
        _to_free(meta, blocks, slots, ring, g, b, False)


@inlined
def release_run(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, table: Any, at: Any, n: Any) -> None:
    """``release`` of the n blocks at table[at:], which become null."""
    base, empty, freed = meta[g, _BASE], meta[g, _FIRST_EMPTY], 0
    for i in range(_U(n)):
        b = np.int64(table[_U(at) + i])
        table[_U(at) + i] = 0
        block = blocks[_U(base + b)]
        if block.refs == 1 and block.place == _HELD and block.mark == _NONE and block.fence == 0:
            block.refs = 0  # what nearly all are: back to the empty ones, with the counters in local variables
            block.place = _EMPTY
            block.link = empty
            empty = b
            freed += 1
        else:
            meta[g, _FIRST_EMPTY] = empty
            release(meta, blocks, slots, ring, g, b)
            empty = meta[g, _FIRST_EMPTY]
    meta[g, _FIRST_EMPTY] = empty
    meta[g, _N_EMPTY] += freed
    meta[g, _N_HELD] -= freed


@inlined
def fence(meta: Any, blocks: Any, ring: Any, g: Any, b: Any, ticket: Any) -> None:
    """A store begins to read block b: its next writer must be ordered after ``ticket``."""
    block = blocks[_U(meta[g, _BASE] + b)]
    if block.place == _CACHED:
        _leave_ring(meta, ring, g, block.link)
        block.place = _FENCED
        meta[g, _N_FENCED] += 1
    block.fence = ticket


@inlined
def unfence(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, b: Any, ticket: Any, cold: Any) -> None:
    """The store ``ticket`` no longer stands in the way of block b's next writer."""
    block = blocks[_U(meta[g, _BASE] + b)]
    if block.fence != ticket and block.fence != -ticket:
        return
    block.fence = 0
    if block.place == _FENCED:
        meta[g, _N_FENCED] -= 1
        _to_free(meta, blocks, slots, ring, g, b, cold)
    elif block.place == _QUAR:
        restore(meta, blocks, slots, ring, g, b)


@inlined
def expire_fence(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, b: Any, ticket: Any) -> None:
    """The store ``ticket`` is overdue: block b is quarantined, at once or when its last reference goes."""
    block = blocks[_U(meta[g, _BASE] + b)]
    if block.fence != ticket:
        return
    block.fence = -ticket
    if block.place == _FENCED:
        meta[g, _N_FENCED] -= 1
        unpublish(meta, blocks, slots, ring, g, b)
        block.place = _QUAR
        meta[g, _N_QUAR] += 1


@inlined
def quarantine(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, b: Any) -> None:
    """A copy that never ended may still write block b, which is held: nobody gets it until ``restore``."""
    block = blocks[_U(meta[g, _BASE] + b)]
    unpublish(meta, blocks, slots, ring, g, b)
    if block.place != _QUAR:
        meta[g, _N_HELD] -= block.place == _HELD
        block.place = _QUAR
        meta[g, _N_QUAR] += 1


@inlined
def restore(meta: Any, blocks: Any, slots: Any, ring: Any, g: Any, b: Any) -> None:
    """The late copy has ended: block b is an empty block again, or held until its last reference goes."""
    block = blocks[_U(meta[g, _BASE] + b)]
    if block.place == _QUAR:
        unpublish(meta, blocks, slots, ring, g, b)
        meta[g, _N_QUAR] -= 1
        if block.refs == 0:
            _to_empty(meta, blocks, g, b)
        else:
            block.place = _HELD
            meta[g, _N_HELD] += 1


# --- batches: one call for many blocks of any groups ----------------------------------------------


@jit
def take_batch(p: Any, groups: Any, wanted: Any, out: Any) -> None:
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    wanted[:] = 0
    for k in range(len(groups)):
        wanted[groups[k]] += 1
    for g in range(len(meta)):
        make_empty(meta, blocks, slots, ring, g, wanted[g])
    for k in range(len(groups)):
        take(meta, blocks, groups[k], out, k, 1)


@jit
def publish_batch(p: Any, groups: Any, ids: Any, keys: Any, mark: Any) -> None:
    meta, blocks, slots = p.meta, p.blocks, p.slots
    for k in range(len(groups)):
        if publish(meta, blocks, slots, groups[k], ids[k], keys[k, 0], keys[k, 1], mark) != 0:
            raise AssertionError("publish() of a key that another block carries")


@jit
def unpublish_batch(p: Any, groups: Any, ids: Any) -> None:
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    for k in range(len(groups)):
        unpublish(meta, blocks, slots, ring, groups[k], ids[k])


@jit
def release_batch(p: Any, groups: Any, ids: Any) -> None:
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    for k in range(len(groups) - 1, -1, -1):  # backwards: the end of a prefix is evicted before its beginning
        release(meta, blocks, slots, ring, groups[k], ids[k])


@jit
def acquire_batch(p: Any, groups: Any, ids: Any) -> None:
    meta, blocks, ring = p.meta, p.blocks, p.ring
    for k in range(len(groups)):
        acquire(meta, blocks, ring, groups[k], ids[k])


@jit
def fence_batch(p: Any, groups: Any, ids: Any, ticket: Any) -> None:
    meta, blocks, ring = p.meta, p.blocks, p.ring
    for k in range(len(groups)):
        fence(meta, blocks, ring, groups[k], ids[k], ticket)


@jit
def unfence_batch(p: Any, groups: Any, ids: Any, ticket: Any, cold: Any) -> None:
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    for k in range(len(groups) - 1, -1, -1):
        unfence(meta, blocks, slots, ring, groups[k], ids[k], ticket, cold)


@jit
def expire_batch(p: Any, groups: Any, ids: Any, ticket: Any) -> None:
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    for k in range(len(groups)):
        expire_fence(meta, blocks, slots, ring, groups[k], ids[k], ticket)


@jit
def quarantine_batch(p: Any, groups: Any, ids: Any) -> None:
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    for k in range(len(groups)):
        quarantine(meta, blocks, slots, ring, groups[k], ids[k])


@jit
def restore_batch(p: Any, groups: Any, ids: Any) -> None:
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    for k in range(len(groups)):
        restore(meta, blocks, slots, ring, groups[k], ids[k])


@jit
def ready_batch(p: Any, groups: Any, ids: Any) -> None:
    meta, blocks = p.meta, p.blocks
    for k in range(len(groups)):
        blocks[_U(meta[groups[k], _BASE] + ids[k])].mark = _READY


@jit
def find_batch(p: Any, groups: Any, keys: Any, out: Any) -> None:
    meta, blocks, slots = p.meta, p.blocks, p.slots
    for k in range(len(groups)):
        out[k] = find(meta, blocks, slots, groups[k], keys[k, 0], keys[k, 1])


@jit
def choose_stores(d: Any, h: Any, groups: Any, ids: Any, keys: Any, room: Any, chosen: Any, hosts: Any) -> Any:
    """Which findable device blocks to store: those that no store reads yet and whose keys the host lacks.

    As far as the host pools have room[G], which is written here, positions go to chosen and host blocks, taken and
    named, to hosts. Returns (how many of them, how many there would have been with more room).
    """
    meta, blocks, slots, ring = h.meta, h.blocks, h.slots, h.ring
    for g in range(len(meta)):
        room[g] = meta[g, _N_EMPTY] + meta[g, _N_CACHED]
    n, wanted = 0, 0
    for k in range(len(groups)):
        g = groups[k]
        prefetch_slot(meta, slots, g, keys[min(k + AHEAD, len(groups) - 1), 1])
        if (
            d.blocks[_U(d.meta[g, _BASE] + ids[k])].fence == 0
            and find(meta, blocks, slots, g, keys[k, 0], keys[k, 1]) == 0
        ):
            wanted += 1
            if room[g] > 0:
                room[g] -= 1
                chosen[n] = k
                n += 1
    for g in range(len(meta)):
        room[g] = meta[g, _N_EMPTY] + meta[g, _N_CACHED] - room[g]
        make_empty(meta, blocks, slots, ring, g, room[g])
    for i in range(n):
        k = chosen[i]
        take(meta, blocks, groups[k], hosts, i, 1)
        publish(meta, blocks, slots, groups[k], hosts[i], keys[k, 0], keys[k, 1], _PENDING)
    return n, wanted


@jit
def coldest(p: Any, g: Any, out: Any) -> Any:
    """Writes the coldest cached blocks, coldest first; returns how many there were."""
    meta, ring = p.meta, p.ring
    position, n = meta[g, _HEAD], 0
    while position < meta[g, _TAIL] and n < len(out):
        b = ring[_U(meta[g, _RBASE]) + _ring_at(meta, g, position)]
        if b != 0:
            out[n] = b
            n += 1
        position += 1
    return n


@jit
def forget_all(p: Any) -> None:
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    for g in range(len(meta)):
        for b in range(1, meta[g, _ROWS]):
            unpublish(meta, blocks, slots, ring, g, b)
