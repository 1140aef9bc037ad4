"""The compiled loops of the key index: which block carries a key.

Promises   a key names at most one block of a group. A lookup takes a probe or two, however long the pool has run: a
           deletion leaves no tombstone. Keeps I21.
Does not   know the use of a block without a key.

Open addressing with linear probing; an entry holds half of a key's high word and the block's id. Arrays are indexed
unsigned: a signed index costs a test for wrapping, and keeps loops from becoming plain copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined, prefetch
from kvtier.pools.pool_state import Col, Mark
from kvtier.pools.slab_loops import stick, unstick

_BASE, _IBASE, _IMASK, _KEYED = int(Col.BASE), int(Col.INDEX_BASE), int(Col.INDEX_MASK), int(Col.KEYED)
_CHANGES, _LOG, _LOG_MASK = int(Col.CHANGES), int(Col.LOG_BASE), int(Col.LOG_MASK)
_NONE, _PENDING = int(Mark.NONE), int(Mark.PENDING)

_U = np.uint64
_ZERO, _ONE, _HALF, _LOW_HALF = _U(0), _U(1), _U(32), _U(0xFFFFFFFF)


@inlined
def locate(p: Any, g: Any, low: Any, high: Any) -> Any:
    """(place in ``slots``, block) of the key; without a block that carries it, (the empty place for it, 0)."""
    meta = p.meta
    base, start, mask = _U(meta[g, _BASE]), _U(meta[g, _IBASE]), _U(meta[g, _IMASK])
    tag = high >> _HALF
    slot = tag & mask
    while True:
        entry = p.slots[start + slot]
        if entry == _ZERO:
            return start + slot, np.int64(0)
        if entry >> _HALF == tag:
            block = p.blocks[base + (entry & _LOW_HALF)]
            if block.low == low and block.high == high:
                return start + slot, np.int64(entry & _LOW_HALF)
        slot = (slot + _ONE) & mask


@inlined
def find(p: Any, g: Any, low: Any, high: Any) -> Any:
    """The block of group g that carries the key, READY or PENDING; 0 if none."""
    return locate(p, g, low, high)[1]


@inlined
def index_place(meta: Any, g: Any, high: Any) -> Any:
    """The place at which a search for the key with this high word begins."""
    return _U(meta[g, _IBASE]) + ((high >> _HALF) & _U(meta[g, _IMASK]))


@inlined
def prefetch_slot(p: Any, g: Any, high: Any) -> None:
    """Prefetches the index's cache line of the key with this high word."""
    prefetch(p.slots, index_place(p.meta, g, high))


@inlined
def log_change(p: Any, g: Any, b: Any) -> None:
    """Notes that block b's key or mark has changed (changes.py)."""
    count = p.meta[g, _CHANGES]
    p.ring[_U(p.meta[g, _LOG] + (count & p.meta[g, _LOG_MASK]))] = b
    p.meta[g, _CHANGES] = count + 1


@inlined
def publish(p: Any, g: Any, b: Any, low: Any, high: Any, mark: Any) -> Any:
    """Names block b; returns 0. If another block of the group carries the key, returns that block and changes
    nothing."""
    place, other = locate(p, g, low, high)
    if other != 0:
        return other
    p.slots[place] = (high >> _HALF) << _HALF | _U(b)
    block = p.blocks[_U(p.meta[g, _BASE] + b)]
    block.low = low
    block.high = high
    block.mark = mark
    p.meta[g, _KEYED] += 1
    log_change(p, g, b)
    if mark == _PENDING:
        stick(p, g, b)
    return np.int64(0)


@inlined
def rename(p: Any, g: Any, old: Any, new: Any) -> None:
    """Block ``new`` carries block ``old``'s key from now on."""
    source, target = p.blocks[_U(p.meta[g, _BASE] + old)], p.blocks[_U(p.meta[g, _BASE] + new)]
    place = locate(p, g, source.low, source.high)[0]
    p.slots[place] = (source.high >> _HALF) << _HALF | _U(new)
    target.low = source.low
    target.high = source.high
    target.mark = source.mark
    source.mark = _NONE
    log_change(p, g, old)
    log_change(p, g, new)


@inlined
def forget(p: Any, base: Any, start: Any, mask: Any, b: Any) -> None:
    """Takes the key of block b out of the index; the caller counts it, and logs the change."""
    slots = p.slots
    block = p.blocks[_U(base + b)]
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
def forget_one(p: Any, g: Any, b: Any) -> None:
    """Takes the key of block b, which has one, out of the index."""
    meta = p.meta
    if p.blocks[_U(meta[g, _BASE] + b)].mark == _PENDING:
        unstick(p, g, b)
    forget(p, meta[g, _BASE], _U(meta[g, _IBASE]), _U(meta[g, _IMASK]), b)
    log_change(p, g, b)
    meta[g, _KEYED] -= 1
