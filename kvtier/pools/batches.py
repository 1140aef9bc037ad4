"""The compiled loops for many blocks of any groups; one call does to all of them what ``pool_loops`` does to one.

Does not   keep any state of its own: every loop gets all arrays of the pools, in the order of ``PoolArrays``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined, jit
from kvtier.pools.cached_ring import ring_at
from kvtier.pools.key_index import find, log_change, prefetch_slot, publish
from kvtier.pools.pool_loops import (
    AHEAD,
    acquire,
    expire_fence,
    fence,
    make_empty,
    quarantine,
    release,
    restore,
    take,
    unfence,
    unpublish,
)
from kvtier.pools.pool_state import Col, Mark, PoolArrays
from kvtier.pools.slab_loops import unstick

_BASE, _ROWS, _N_EMPTY, _N_CACHED = int(Col.BASE), int(Col.ROWS), int(Col.EMPTY), int(Col.CACHED)
_RBASE, _HEAD, _TAIL = int(Col.RING_BASE), int(Col.HEAD), int(Col.TAIL)
_PENDING, _READY = int(Mark.PENDING), int(Mark.READY)
_U = np.uint64


@jit
def take_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, wanted: Any, out: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    wanted[:] = 0
    for k in range(len(groups)):
        wanted[groups[k]] += 1
    for g in range(len(meta)):
        make_empty(p, g, wanted[g])
    for k in range(len(groups)):
        take(p, groups[k], out, k, 1, -1)


@jit
def publish_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any, keys: Any, mark: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        if publish(p, groups[k], ids[k], keys[k, 0], keys[k, 1], mark) != 0:
            raise AssertionError("publish() of a key that another block carries")


@jit
def unpublish_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        unpublish(p, groups[k], ids[k])


@jit
def release_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any, cold: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups) - 1, -1, -1):  # backwards: the end of a prefix is evicted before its beginning
        release(p, groups[k], ids[k], cold)


@jit
def acquire_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        acquire(p, groups[k], ids[k])


@jit
def fence_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any, ticket: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        fence(p, groups[k], ids[k], ticket)


@jit
def unfence_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    groups: Any, ids: Any, ticket: Any, cold: Any,
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups) - 1, -1, -1):
        unfence(p, groups[k], ids[k], ticket, cold)


@jit
def expire_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any, ticket: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        expire_fence(p, groups[k], ids[k], ticket)


@jit
def quarantine_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        quarantine(p, groups[k], ids[k])


@jit
def restore_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        restore(p, groups[k], ids[k])


@jit
def ready_batch(meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, ids: Any) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        block = blocks[_U(meta[groups[k], _BASE] + ids[k])]
        if block.mark == _PENDING:
            unstick(p, groups[k], ids[k])
        block.mark = _READY
        log_change(p, groups[k], ids[k])


@jit
def find_batch(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, groups: Any, keys: Any, out: Any
) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        out[k] = find(p, groups[k], keys[k, 0], keys[k, 1])


@inlined
def _lacks(p: Any, device_meta: Any, device_blocks: Any, g: Any, b: Any, low: Any, high: Any) -> Any:
    """Whether no store reads device block b and the host has none of its key."""
    return device_blocks[_U(device_meta[g, _BASE] + b)].fence == 0 and find(p, g, low, high) == 0


@jit
def count_stores(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    device_meta: Any, device_blocks: Any, groups: Any, ids: Any, keys: Any, wanted: Any,
) -> None:
    """Counts to wanted[G] the blocks that ``take_for_stores`` would choose if there was room."""
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for k in range(len(groups)):
        g = groups[k]
        prefetch_slot(p, g, keys[min(k + AHEAD, len(groups) - 1), 1])
        wanted[g] += _lacks(p, device_meta, device_blocks, g, ids[k], keys[k, 0], keys[k, 1])


@jit
def take_for_stores(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    device_meta: Any, device_blocks: Any, groups: Any, ids: Any, keys: Any, room: Any,
    of: Any, device: Any, host: Any, named: Any,
) -> Any:
    """Which findable device blocks to store: no store reads them yet, and the host lacks their keys.

    Writes room[G], the room of the host pools. As far as there is room, groups, ids and keys of the chosen blocks go to
    of, device and named. Host blocks, taken and named, go to host. Returns (number of blocks, number with more room).
    """
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for g in range(len(meta)):
        room[g] = meta[g, _N_EMPTY] + meta[g, _N_CACHED]
    n, wanted = 0, 0
    for k in range(len(groups)):
        g = groups[k]
        prefetch_slot(p, g, keys[min(k + AHEAD, len(groups) - 1), 1])
        if _lacks(p, device_meta, device_blocks, g, ids[k], keys[k, 0], keys[k, 1]):
            wanted += 1
            if room[g] > 0:
                room[g] -= 1
                of[n] = g
                device[n] = ids[k]
                named[n, 0] = keys[k, 0]
                named[n, 1] = keys[k, 1]
                n += 1
    for g in range(len(meta)):
        room[g] = meta[g, _N_EMPTY] + meta[g, _N_CACHED] - room[g]
        make_empty(p, g, room[g])
    for i in range(n):
        take(p, of[i], host, i, 1, -1)
        publish(p, of[i], host[i], named[i, 0], named[i, 1], _PENDING)
    return n, wanted


@jit
def coldest(meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any, g: Any, out: Any) -> Any:
    """Writes the coldest cached blocks, coldest first; returns how many there were."""
    position, n = meta[g, _HEAD], 0
    while position < meta[g, _TAIL] and n < len(out):
        entry = ring[_U(meta[g, _RBASE]) + ring_at(meta, g, position)]
        if entry != 0:
            out[n] = abs(entry)
            n += 1
        position += 1
    return n


@jit
def forget_all(meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any) -> None:
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for g in range(len(meta)):
        for b in range(1, meta[g, _ROWS]):
            unpublish(p, g, b)
