"""The block pools of one tier: who owns a block, what it is called, which one goes next.

Owns       for every group of one tier: reference counts, places, keys, the key index and the two free lists, as flat
           arrays over all groups (block b of group g is entry ``base[g] + b``). No Python object per block.
Promises   a block is in exactly one place; empty blocks go out before cached ones, cached ones coldest first;
           a key names at most one block. Keeps I1, I2, I3, I21.
Does not   know tiers, tensors or copies: the same class serves device and host. It never waits.

Places, and what moves a block between them:

    EMPTY  --take-->  HELD  --last release-->  EMPTY (no key) | CACHED (key) | FENCED (a store still reads it)
    CACHED --take-->  HELD  (its key is forgotten)        CACHED --acquire--> HELD  (a prefix hit)
    CACHED --fence--> FENCED --acquire--> HELD            FENCED --unfence--> EMPTY | CACHED
    any    --quarantine--> QUARANTINED --restore--> EMPTY | HELD (somebody still references it)

Entry 0 of a group is the null block and at the same time the head of its list of cached blocks; entry ``rows`` is no
block but the head of its list of empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier._jit import inlined, jit

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


class Place(IntEnum):
    """Where a block is; exactly one of these."""

    NULL = 0
    EMPTY = 1
    CACHED = 2
    FENCED = 3
    HELD = 4
    QUARANTINED = 5


class Mark(IntEnum):
    """What a block's key is worth."""

    NONE = 0
    PENDING = 1  # a transfer is writing the content
    READY = 2  # findable


class Col(IntEnum):
    """Columns of ``meta``, one row per group."""

    BASE = 0  # entry of block 0
    ROWS = 1  # usable blocks + 1
    EMPTY = 2
    CACHED = 3
    FENCED = 4
    QUARANTINED = 5
    INDEX_BASE = 6
    INDEX_MASK = 7
    KEYED = 8  # entries in the key index
    EVICTED = 9  # counter: cached blocks handed out
    PEAK_HELD = 10


# Plain ints, so that the compiled loops see constants.
_BASE, _ROWS, _N_EMPTY, _N_CACHED, _N_FENCED, _N_QUAR = (int(c) for c in list(Col)[:6])
_IBASE, _IMASK, _N_KEYED, _N_EVICTED, _PEAK = (int(c) for c in list(Col)[6:])
_NULL, _EMPTY, _CACHED, _FENCED, _HELD, _QUAR = (int(p) for p in Place)
_NONE, _PENDING, _READY = (int(m) for m in Mark)


class PoolArrays(NamedTuple):
    """The state of all pools of a tier. N entries: per group its blocks, the null block and one list head."""

    meta: npt.NDArray[np.int64]  # [groups, len(Col)]
    refs: npt.NDArray[np.int32]  # [N]
    place: npt.NDArray[np.uint8]  # [N] Place
    mark: npt.NDArray[np.uint8]  # [N] Mark
    key: Words  # [2 N] low and high word
    next: Ids  # [N] list links, block ids within the group
    prev: Ids  # [N]
    fence: npt.NDArray[np.int64]  # [N] ticket of the store that still reads the block; 0 none; negative: expired
    slots: Words  # the key index: open addressing, high half of the key's high word << 32 | block id; 0 empty


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
    p.place[base + b] = _HELD
    p.refs[base + b] = 1
    held = p.meta[g, _ROWS] - 1 - p.meta[g, _N_EMPTY] - p.meta[g, _N_CACHED] - p.meta[g, _N_FENCED]
    p.meta[g, _PEAK] = max(p.meta[g, _PEAK], held)
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
        p.place[i] = _HELD
    p.refs[i] += 1


@inlined
def release(p: Any, g: Any, b: Any) -> None:
    """One reference less; the last one frees the block."""
    i = p.meta[g, _BASE] + b
    if p.refs[i] <= 0 or b == 0:
        raise AssertionError("release() of a block that nobody holds")
    p.refs[i] -= 1
    if p.refs[i] == 0:
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


@jit
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


@jit
def quarantine(p: Any, g: Any, b: Any) -> None:
    """A copy that never ended may still write block b: nobody gets it until ``restore``."""
    i = p.meta[g, _BASE] + b
    unpublish(p, g, b)
    if p.place[i] != _QUAR:
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


# --- batches: one call for many blocks of any groups ----------------------------------------------


@jit
def _take_batch(p: Any, groups: Any, out: Any) -> None:
    for k in range(len(groups)):
        out[k] = take(p, groups[k])


@jit
def _publish_batch(p: Any, groups: Any, blocks: Any, keys: Any, mark: Any) -> None:
    for k in range(len(groups)):
        publish(p, groups[k], blocks[k], keys[k, 0], keys[k, 1], mark)


@jit
def _unpublish_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        unpublish(p, groups[k], blocks[k])


@jit
def _release_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups) - 1, -1, -1):  # backwards: the end of a prefix is evicted before its beginning
        release(p, groups[k], blocks[k])


@jit
def _acquire_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        acquire(p, groups[k], blocks[k])


@jit
def _fence_batch(p: Any, groups: Any, blocks: Any, ticket: Any) -> None:
    for k in range(len(groups)):
        fence(p, groups[k], blocks[k], ticket)


@jit
def _unfence_batch(p: Any, groups: Any, blocks: Any, ticket: Any, cold: Any) -> None:
    for k in range(len(groups) - 1, -1, -1):
        unfence(p, groups[k], blocks[k], ticket, cold)


@jit
def _expire_batch(p: Any, groups: Any, blocks: Any, ticket: Any) -> None:
    for k in range(len(groups)):
        expire_fence(p, groups[k], blocks[k], ticket)


@jit
def _quarantine_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        quarantine(p, groups[k], blocks[k])


@jit
def _restore_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        restore(p, groups[k], blocks[k])


@jit
def _ready_batch(p: Any, groups: Any, blocks: Any) -> None:
    for k in range(len(groups)):
        p.mark[p.meta[groups[k], _BASE] + blocks[k]] = _READY


@jit
def _find_batch(p: Any, groups: Any, keys: Any, out: Any) -> None:
    for k in range(len(groups)):
        out[k] = find(p, groups[k], keys[k, 0], keys[k, 1])


@jit
def _coldest(p: Any, g: Any, out: Any) -> Any:
    """Writes the coldest cached blocks, coldest first; returns how many there were."""
    base = p.meta[g, _BASE]
    b, n = p.next[base], 0
    while b != 0 and n < len(out):
        out[n] = b
        n += 1
        b = p.next[base + b]
    return n


@jit
def _forget_all(p: Any) -> None:
    for g in range(p.meta.shape[0]):
        for b in range(1, p.meta[g, _ROWS]):
            unpublish(p, g, b)


class BlockPools:
    """The pools of one tier; ``usable[g]`` blocks in group g, ids 1..usable[g], id 0 the null block."""

    def __init__(self, usable: Sequence[int]) -> None:
        rows = [n + 1 for n in usable]
        base = np.concatenate([[0], np.cumsum([n + 1 for n in rows])]).astype(np.int64)
        sizes = [1 << max(3, (2 * n).bit_length()) for n in rows]
        index_base = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        total = int(base[-1])
        meta = np.zeros((len(usable), len(Col)), np.int64)
        meta[:, Col.BASE] = base[:-1]
        meta[:, Col.ROWS] = rows
        meta[:, Col.EMPTY] = usable
        meta[:, Col.INDEX_BASE] = index_base[:-1]
        meta[:, Col.INDEX_MASK] = np.array(sizes) - 1
        self.arrays = PoolArrays(
            meta=meta,
            refs=np.zeros(total, np.int32),
            place=np.zeros(total, np.uint8),
            mark=np.zeros(total, np.uint8),
            key=np.zeros(2 * total, np.uint64),
            next=np.zeros(total, np.int32),
            prev=np.zeros(total, np.int32),
            fence=np.zeros(total, np.int64),
            slots=np.zeros(int(index_base[-1]), np.uint64),
        )
        for g, n in enumerate(usable):
            self._link_empty(g, n)
        self.num_groups = len(usable)

    def _link_empty(self, g: int, usable: int) -> None:
        """All blocks in the empty list, in the order of their ids."""
        a, base, head = self.arrays, int(self.arrays.meta[g, Col.BASE]), usable + 1
        ring = np.concatenate([[head], np.arange(1, usable + 1), [head]]).astype(np.int32)
        a.next[base + ring[:-1]] = ring[1:]
        a.prev[base + ring[1:]] = ring[:-1]
        a.place[base + 1 : base + 1 + usable] = Place.EMPTY

    # Counts, int64 [groups].

    @property
    def usable(self) -> npt.NDArray[np.int64]:
        """Blocks that exist, the null block not counted."""
        return self.arrays.meta[:, Col.ROWS] - 1

    @property
    def clean(self) -> npt.NDArray[np.int64]:
        """Blocks that can be handed out at once: empty and cached."""
        return self.arrays.meta[:, Col.EMPTY] + self.arrays.meta[:, Col.CACHED]

    @property
    def free(self) -> npt.NDArray[np.int64]:
        """Blocks that nobody holds, those included that a store still reads."""
        return self.clean + self.arrays.meta[:, Col.FENCED]

    @property
    def held(self) -> npt.NDArray[np.int64]:
        """Blocks with a reference."""
        return self.usable - self.free - self.arrays.meta[:, Col.QUARANTINED]

    def column(self, column: Col) -> npt.NDArray[np.int64]:
        """One column of ``meta``, by group."""
        return self.arrays.meta[:, column]

    def entries(self, groups: Ids, blocks: Ids) -> npt.NDArray[np.int64]:
        """Positions of blocks in the flat arrays."""
        entries: npt.NDArray[np.int64] = self.arrays.meta[groups, Col.BASE] + blocks
        return entries

    # Batches. ``groups`` and ``blocks`` are int32 [n], ``keys`` uint64 [n, 2].

    def take(self, groups: Ids) -> Ids:
        """One block per entry of ``groups``, each with one reference. The caller has checked ``clean``."""
        out = np.empty(len(groups), np.int32)
        _take_batch(self.arrays, groups, out)
        return out

    def acquire(self, groups: Ids, blocks: Ids) -> None:
        """One more reference each."""
        _acquire_batch(self.arrays, groups, blocks)

    def release(self, groups: Ids, blocks: Ids) -> None:
        """One reference less each; a block that occurs twice loses two."""
        _release_batch(self.arrays, groups, blocks)

    def find(self, groups: Ids, keys: Words) -> Ids:
        """The blocks that carry the keys, 0 where none does."""
        out = np.empty(len(groups), np.int32)
        _find_batch(self.arrays, groups, keys, out)
        return out

    def publish(self, groups: Ids, blocks: Ids, keys: Words, mark: Mark) -> None:
        """Names the blocks; none of the keys may be in the index."""
        _publish_batch(self.arrays, groups, blocks, keys, int(mark))

    def make_ready(self, groups: Ids, blocks: Ids) -> None:
        """PENDING keys become READY."""
        _ready_batch(self.arrays, groups, blocks)

    def unpublish(self, groups: Ids, blocks: Ids) -> None:
        """Forgets the blocks' keys."""
        _unpublish_batch(self.arrays, groups, blocks)

    def fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        """A store of this ticket reads the blocks."""
        _fence_batch(self.arrays, groups, blocks, ticket)

    def unfence(self, groups: Ids, blocks: Ids, ticket: int, cold: bool = False) -> None:
        """The store is out of the way; free blocks go to the ``cold`` or the hot end of their list."""
        _unfence_batch(self.arrays, groups, blocks, ticket, cold)

    def expire_fence(self, groups: Ids, blocks: Ids, ticket: int) -> None:
        """The store is overdue: the blocks are quarantined as soon as nobody holds them."""
        _expire_batch(self.arrays, groups, blocks, ticket)

    def quarantine(self, groups: Ids, blocks: Ids) -> None:
        """Takes the blocks out of circulation and forgets their keys; references stay counted."""
        _quarantine_batch(self.arrays, groups, blocks)

    def restore(self, groups: Ids, blocks: Ids) -> None:
        """Puts quarantined blocks back into circulation."""
        _restore_batch(self.arrays, groups, blocks)

    def coldest(self, g: int, n: int) -> Ids:
        """Up to ``n`` cached blocks of group g in the order in which they would be handed out."""
        out = np.empty(n, np.int32)
        return out[: _coldest(self.arrays, g, out)]

    def forget_all(self) -> None:
        """Unpublishes every key; cached blocks become empty ones."""
        _forget_all(self.arrays)
