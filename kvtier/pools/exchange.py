"""The compiled loops by which pools exchange slabs.

Promises   a slab changes hands only when none of its blocks is held, fenced, quarantined or waited for; its cached
           content is forgotten first. A pool that lacks blocks gets an unused slab, else the coldest slab with only
           cached content. The comparison includes its own cached blocks. Keeps I1, I3, I21.
Does not   move bytes: if a block is moved, the caller copies it.

The idea of one arena whose types of cache trade large pages is Jenga's (Zhang et al., 2025, arXiv 2503.18292).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined, jit
from kvtier.pools.cached_ring import as_cold, coldest_stamp, rename_entry, stamp_of
from kvtier.pools.key_index import rename
from kvtier.pools.pool_loops import evict, make_empty, take, unpublish
from kvtier.pools.pool_state import Col, Mark, Place, PoolArrays, SlabCol
from kvtier.pools.slab_loops import close_slab, first_block, open_slab, to_empty

_BASE, _N_EMPTY, _N_CACHED, _N_HELD, _PEAK = (
    int(c) for c in (Col.BASE, Col.EMPTY, Col.CACHED, Col.HELD, Col.PEAK_HELD)
)
_PER_SLAB, _MOST_SLABS, _SLABS, _UNUSED = int(Col.PER_SLAB), int(Col.MOST_SLABS), int(Col.SLABS), int(Col.UNUSED)
_EVICTED = int(Col.EVICTED)
_OWNER, _S_EMPTY, _S_CACHED = int(SlabCol.OWNER), int(SlabCol.EMPTY), int(SlabCol.CACHED)
_S_LISTED, _S_FRESH, _S_STAMP = int(SlabCol.LISTED), int(SlabCol.FRESH), int(SlabCol.STAMP)
_S_SUPERSEDED, _S_STUCK, _S_FENCES = int(SlabCol.SUPERSEDED), int(SlabCol.STUCK), int(SlabCol.FENCES)
_PLACE_EMPTY, _CACHED, _HELD = int(Place.EMPTY), int(Place.CACHED), int(Place.HELD)
_NONE = int(Mark.NONE)
_U = np.uint64


@inlined
def adopt(meta: Any, slabs: Any, g: Any, s: Any) -> None:
    """Slab s, which has no pool, is cut into empty blocks of group g."""
    slabs[s, _OWNER] = g
    slabs[s, _S_EMPTY] = meta[g, _PER_SLAB]
    slabs[s, _S_CACHED] = 0
    slabs[s, _S_SUPERSEDED] = 0
    slabs[s, _S_LISTED] = 0
    slabs[s, _S_FRESH] = first_block(meta, g, s)
    slabs[s, _S_STAMP] = 0
    meta[g, _SLABS] += 1
    meta[g, _N_EMPTY] += meta[g, _PER_SLAB]
    open_slab(meta, slabs, g, s)


@inlined
def _part(meta: Any, slabs: Any, g: Any, s: Any) -> None:
    """Slab s leaves the pool. The caller has made sure that all its blocks are empty, or lists them elsewhere."""
    if slabs[s, _S_EMPTY] > 0:
        close_slab(meta, slabs, g, s)
    meta[g, _N_EMPTY] -= slabs[s, _S_EMPTY]
    meta[g, _SLABS] -= 1
    slabs[s, _OWNER] = -1
    slabs[s, _S_EMPTY] = 0


@inlined
def _forget_cached(p: Any, g: Any, s: Any) -> None:
    """Slab s's cached blocks become empty ones."""
    meta = p.meta
    if p.slabs[s, _S_CACHED] == 0:
        return
    first = first_block(meta, g, s)
    for b in range(first, first + meta[g, _PER_SLAB]):
        if p.blocks[_U(meta[g, _BASE] + b)].place == _CACHED:
            unpublish(p, g, b)
            meta[g, _EVICTED] += 1


@inlined
def surrender(p: Any, s: Any) -> None:
    """The pool of slab s gives it up; all its blocks are empty or cached."""
    g = p.slabs[s, _OWNER]
    _forget_cached(p, g, s)
    _part(p.meta, p.slabs, g, s)


@inlined
def _is_idle(meta: Any, slabs: Any, s: Any) -> Any:
    """Whether all blocks of slab s are empty or cached."""
    g = slabs[s, _OWNER]
    return g >= 0 and slabs[s, _S_EMPTY] + slabs[s, _S_CACHED] == meta[g, _PER_SLAB]


@inlined
def _can_spare(meta: Any, h: Any, need: Any) -> Any:
    """Whether the pool of group h has need[h] empty and cached blocks without one of its slabs."""
    return meta[h, _N_EMPTY] + meta[h, _N_CACHED] - meta[h, _PER_SLAB] >= need[h]


@inlined
def _worth(slabs: Any, s: Any) -> Any:
    """When content was last cached in slab s, on the tier's clock; -1 if all of it is superseded, -2 if there is
    none."""
    if slabs[s, _S_CACHED] == 0:
        return np.int64(-2)
    return slabs[s, _S_STAMP] if slabs[s, _S_CACHED] > slabs[s, _S_SUPERSEDED] else np.int64(-1)


@inlined
def coldest_slab(p: Any, g: Any, need: Any, spare_cached: Any) -> Any:
    """The slab that the pool of group g should take to have need[g] empty blocks; -1 if none.

    With ``spare_cached`` only a slab without cached blocks. None if its own coldest cached blocks are colder.
    """
    meta, slabs = p.meta, p.slabs
    if meta[0, _UNUSED] < len(slabs):
        return meta[0, _UNUSED]
    best, least = np.int64(-1), np.int64(2**62)
    for s in range(len(slabs)):
        h = slabs[s, _OWNER]
        if h == g or not _is_idle(meta, slabs, s) or not _can_spare(meta, h, need):
            continue
        if slabs[s, _S_EMPTY] > max(np.int64(0), meta[h, _N_EMPTY] - need[h]):
            continue  # it would have to give up content of its own instead
        worth = _worth(slabs, s)
        if worth < least and (worth == -2 or not spare_cached):
            best, least = np.int64(s), worth
    has_own = need[g] <= meta[g, _N_EMPTY] + meta[g, _N_CACHED]
    if best >= 0 and least > -2 and has_own and coldest_stamp(p, g) <= least:
        return np.int64(-1)
    return best


@inlined
def _lost(meta: Any, h: Any, need: Any) -> Any:
    """Cached blocks that the pool of group h gives up if it is to have need[h] empty blocks and a slab of them."""
    return max(np.int64(0), meta[h, _PER_SLAB] - max(np.int64(0), meta[h, _N_EMPTY] - need[h]))


@inlined
def _emptiest(meta: Any, slabs: Any, h: Any) -> Any:
    """The idle slab of group h with the most empty blocks; -1 if it has no idle one."""
    best = np.int64(-1)
    for s in range(len(slabs)):
        if slabs[s, _OWNER] != h or not _is_idle(meta, slabs, s):
            continue
        if best < 0 or slabs[s, _S_EMPTY] > slabs[best, _S_EMPTY]:
            best = np.int64(s)
    return best


@inlined
def _coldest_pool(p: Any, g: Any, need: Any, before: Any, states: Any) -> Any:
    """The group whose coldest blocks, a slab's worth of them, are the coldest; -1 if none. It or g has ``states``.

    Only if all of them were cached ``before``.
    """
    meta, best = p.meta, np.int64(-1)
    for h in range(len(meta)):
        n = _lost(meta, h, need)
        if h == g or states[g] + states[h] == 0 or n > meta[h, _N_CACHED] or not _can_spare(meta, h, need):
            continue
        worth = stamp_of(p, h, n) if n > 0 else np.int64(-1)  # empty blocks enough, in slabs of which none is empty
        if worth < before:
            best, before = np.int64(h), worth
    return best


@inlined
def _gather(p: Any, h: Any, need: Any, moves: Any) -> Any:
    """Group h gives up its coldest blocks, a slab's worth of them, and one slab: content that stays moves out of it.

    Returns the slab, which has no pool now, and the number of moves.
    """
    meta, slabs = p.meta, p.slabs
    evict(p, h, _lost(meta, h, need))
    s, n, peak = _emptiest(meta, slabs, h), np.int64(0), meta[h, _PEAK]
    first = first_block(meta, h, s)
    for b in range(first, first + meta[h, _PER_SLAB]):
        if p.blocks[_U(meta[h, _BASE] + b)].place == _CACHED:
            moves[0, n] = b
            n += 1
    _part(meta, slabs, h, s)
    take(p, h, moves[1], 0, n, -1)
    for k in range(n):
        old, new = np.int64(moves[0, k]), np.int64(moves[1, k])
        rename(p, h, old, new)
        rename_entry(p, h, old, new)
        p.blocks[_U(meta[h, _BASE] + old)].place = _PLACE_EMPTY
        target = p.blocks[_U(meta[h, _BASE] + new)]
        target.place = _CACHED
        target.refs = 0
    meta[h, _N_HELD] -= n
    meta[h, _PEAK] = peak
    return s, n


@jit
def provide(
    meta: Any,
    blocks: Any,
    slots: Any,
    ring: Any,
    empties: Any,
    slabs: Any,
    need: Any,
    spare_cached: Any,
    states: Any,
    moves: Any,
) -> Any:
    """Gives pools slabs so that each group has need[G] empty blocks, or cached blocks colder than the others'.

    A slab is as old as its youngest content. A slab of K and V holds some of many texts, one of states a text or two.
    By that age states would go first, and nobody finds K and V without a state. So from and to groups with ``states``,
    uint8 [G], a pool can give up a slab whose content is younger than what would go otherwise. Its coldest blocks go,
    and the rest of one slab moves to their places. Then this stops: the caller copies ``moves``, int32 [2, blocks of a
    slab], from and to, and asks again. If there is no room for moves, it stops before.

    Returns (whether every group has as many empty and cached blocks, group of the moves or -1, their number). It is not
    enough if it has stopped. With a group and no moves it has stopped because each slab of that group has a block in
    use. Changes nothing if pools have slabs of their own.
    """
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    enough = True
    for g in range(len(meta)):
        while need[g] > meta[g, _N_EMPTY] and meta[g, _SLABS] < meta[g, _MOST_SLABS]:
            s, has_own = coldest_slab(p, g, need, spare_cached), need[g] <= meta[g, _N_EMPTY] + meta[g, _N_CACHED]
            if not spare_cached:
                loss = _worth(slabs, s) if s >= 0 else coldest_stamp(p, g) if has_own else np.int64(2**62)
                h = _coldest_pool(p, g, need, loss, states)
                if h >= 0:
                    if moves.shape[1] == 0:
                        return False, np.int64(-1), np.int64(0)
                    if _emptiest(meta, slabs, h) < 0:
                        return False, np.int64(h), np.int64(0)
                    s, n = _gather(p, h, need, moves)
                    adopt(meta, slabs, g, s)
                    if n > 0:
                        return False, np.int64(h), np.int64(n)
                    continue
            if s < 0 and (spare_cached or not has_own):
                break
            if s < 0:  # a slab's worth of its own goes, as far as it is as cold, then the next look
                evict(p, g, as_cold(p, g, min(need[g] - meta[g, _N_EMPTY], meta[g, _PER_SLAB])))
                continue
            if slabs[s, _OWNER] >= 0:
                surrender(p, s)
            else:
                meta[0, _UNUSED] += 1
            adopt(meta, slabs, g, s)
    for g in range(len(meta)):
        enough &= need[g] <= meta[g, _N_EMPTY] + meta[g, _N_CACHED]
    return enough, np.int64(-1), np.int64(0)


# --- emptying a slab by moving its blocks ---------------------------------------------------------


@inlined
def _can_be_emptied(meta: Any, slabs: Any, s: Any, need: Any) -> Any:
    """Whether no copy reads or writes slab s, and its pool has room for the moved blocks, beside its own need[g]."""
    g = slabs[s, _OWNER]
    return g >= 0 and slabs[s, _S_STUCK] + slabs[s, _S_FENCES] == 0 and _can_spare(meta, g, need)


@jit
def movable_slab(meta: Any, slabs: Any, need: Any, tried: Any) -> Any:
    """The slab that is emptied with the fewest moves, for a pool that lacks need[G]; the coldest of equals; -1 if none.

    Slabs s with tried[s] != 0 are left out.
    """
    best, least, worth = np.int64(-1), np.int64(2**62), np.int64(0)
    for s in range(len(slabs)):
        if tried[s] != 0 or not _can_be_emptied(meta, slabs, s, need):
            continue
        live = meta[slabs[s, _OWNER], _PER_SLAB] - slabs[s, _S_EMPTY] - slabs[s, _S_CACHED]
        if live > least or (live == least and _worth(slabs, s) >= worth):
            continue
        best, least, worth = np.int64(s), live, _worth(slabs, s)
    return best


@jit
def is_enough(meta: Any, slabs: Any, need: Any) -> Any:
    """Whether every group has need[G] empty and cached blocks, or a lacking group could have an emptied slab."""
    enough, may_take = True, False
    for g in range(len(meta)):
        lacks = need[g] > meta[g, _N_EMPTY] + meta[g, _N_CACHED]
        enough &= not lacks
        may_take |= lacks and meta[g, _SLABS] < meta[g, _MOST_SLABS]
    s = 0
    while may_take and not enough and s < len(slabs):
        enough = _can_be_emptied(meta, slabs, s, need)
        s += 1
    return enough


@jit
def list_slab(meta: Any, blocks: Any, slabs: Any, s: Any, cached: Any, held: Any) -> Any:
    """Writes the cached and the held blocks of slab s, which can be emptied; returns (cached blocks, held blocks).

    Links of held blocks are 0 afterwards, to count with.
    """
    g = slabs[s, _OWNER]
    first, n, m = first_block(meta, g, s), 0, 0
    for b in range(first, first + meta[g, _PER_SLAB]):
        block = blocks[_U(meta[g, _BASE] + b)]
        if block.place == _CACHED:
            cached[n] = b
            n += 1
        elif block.place == _HELD:
            block.link = 0
            held[m] = b
            m += 1
    return n, m


@jit
def move_blocks(
    meta: Any,
    blocks: Any,
    slots: Any,
    ring: Any,
    empties: Any,
    slabs: Any,
    s: Any,
    held: Any,
    targets: Any,
    stays: Any,
) -> None:
    """The ``held`` blocks of slab s go to ``targets``, and the pool's coldest blocks make room for them.

    If the slab ``stays``, its cached blocks do too. Else they are forgotten, and it leaves its pool. The links of moved
    blocks give their new ids. The pool has room without the slab: the caller has asked.
    """
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    g, n = slabs[s, _OWNER], len(held)
    if stays:
        while meta[g, _N_EMPTY] - slabs[s, _S_EMPTY] < n:
            evict(p, g, 1)
        if slabs[s, _S_EMPTY] > 0:  # nothing is taken from it meanwhile
            close_slab(meta, slabs, g, s)
    else:
        _forget_cached(p, g, s)
        _part(meta, slabs, g, s)
        make_empty(p, g, n)
    peak = meta[g, _PEAK]
    take(p, g, targets, 0, n, -1)
    if stays and slabs[s, _S_EMPTY] > 0:
        open_slab(meta, slabs, g, s)
    for k in range(n):
        source, target = blocks[_U(meta[g, _BASE] + held[k])], blocks[_U(meta[g, _BASE] + targets[k])]
        target.refs = source.refs
        if source.mark != _NONE:
            rename(p, g, np.int64(held[k]), np.int64(targets[k]))
        source.refs = 0
        source.place = _PLACE_EMPTY
        source.link = targets[k]
        if stays:
            to_empty(p, g, np.int64(held[k]))
    meta[g, _N_HELD] -= n
    meta[g, _PEAK] = peak


@jit
def hand_over(meta: Any, slabs: Any, g: Any, s: Any) -> None:
    """Slab s, which has no pool, goes to the pool of group g."""
    adopt(meta, slabs, g, s)
