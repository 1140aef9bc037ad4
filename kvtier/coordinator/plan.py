"""The compiled loops of a step: who computes how many tokens, and what a finished forward changes.

Promises   planning changes nothing; advancing does per running request a few array accesses, whatever the context
           length or pool size. Keeps I4, I13, I16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier._jit import inlined, jit
from kvtier.gpu_pool.block_table import (
    Geo,
    Phase,
    RowCol,
    extend_group,
    first_block,
    num_blocks,
    release_span,
    row_at,
    seal_block,
)
from kvtier.gpu_pool.exchange import provide
from kvtier.gpu_pool.pool_loops import make_empty
from kvtier.gpu_pool.pool_state import Col
from kvtier.gpu_pool.slab_loops import fits, live, slabs_for
from kvtier.keys import sip_link
from kvtier.spec import Kind

_BT, _KIND, _WIDTH = int(Geo.BLOCK_TOKENS), int(Geo.KIND), int(Geo.WIDTH)
_FULL = int(Kind.FULL)
_LOADING, _PREFILL, _DECODE = int(Phase.LOADING), int(Phase.PREFILL), int(Phase.DECODE)
_BASE, _N_EMPTY, _MOST_SLABS = int(Col.BASE), int(Col.EMPTY), int(Col.MOST_SLABS)
_COMPUTED, _TOTAL, _LIMIT, _GENERATED, _LAST, _PHASE, _PUBLISH = (int(c) for c in list(RowCol)[:7])
_U = np.uint64

GOES_ON, STOPPED, LENGTH = 0, 1, 2


@inlined
def _lacks(geometry: Any, span: Any, g: Any, r: Any, end: Any) -> Any:
    """Blocks of group g that row r needs besides its own to compute up to ``end``."""
    if span[r, g, 1] * geometry[g, _BT] >= end:
        return np.int64(0)
    return num_blocks(geometry, g, end) - span[r, g, 1]


@inlined
def _longest(meta: Any, num_slabs: Any, geometry: Any, span: Any, r: Any, start: Any, most: Any, total: Any) -> Any:
    """Up to which token row r can compute, ``most`` at most and one at least, with total[G] blocks used beside its own.

    Blocks that the row takes are added to ``total`` and taken off again.
    """
    low, high, end = start + 1, most, most  # it fits up to low, if at all; what it takes grows with the end
    while low < high:
        for g in range(len(geometry)):
            total[g] += _lacks(geometry, span, g, r, end)
        enough = fits(meta, num_slabs, total)
        for g in range(len(geometry)):
            total[g] -= _lacks(geometry, span, g, r, end)
        if enough:
            low = end
        else:
            high = end - 1
        end = (low + high + 1) // 2
    return low


@jit
def plan_rows(
    meta: Any,
    num_slabs: Any,
    geometry: Any,
    span: Any,
    state: Any,
    used: Any,
    order: Any,
    skip: Any,
    budget: Any,
    rows: Any,
    ends: Any,
    need: Any,
    later: Any,
    total: Any,
) -> Any:
    """``plan_running`` of the rows ``order`` beside used[G] blocks that others have or are promised; takes none.

    Returns (entries, tokens, position of the first row that is short or -1).
    """
    groups, decodes, prefills = len(geometry), 0, 0
    later[:] = 0
    for i in range(len(order)):
        r = np.int64(order[i])
        if skip[r] != 0:
            continue
        if state[r, _PHASE] == _DECODE:
            decodes += 1
            for g in range(groups):
                later[g] += _lacks(geometry, span, g, r, state[r, _TOTAL])
        elif state[r, _PHASE] == _PREFILL:
            prefills += 1
    for g in range(groups):
        total[g] = used[g] + later[g]
    n, tokens = 0, np.int64(0)
    if prefills == 0 and decodes <= budget and fits(meta, num_slabs, total):  # what most steps are
        for i in range(len(order)):
            r = np.int64(order[i])
            if state[r, _PHASE] == _DECODE and skip[r] == 0:
                rows[n] = r
                ends[n] = state[r, _TOTAL]
                n += 1
        for g in range(groups):
            need[g] = later[g]
        return n, np.int64(n), -1
    need[:] = 0
    for i in range(len(order)):
        r = np.int64(order[i])
        phase = state[r, _PHASE]
        if phase == _LOADING or skip[r] != 0:
            continue
        start, known, left = state[r, _COMPUTED], state[r, _TOTAL], budget - tokens
        if phase == _DECODE:
            decodes -= 1
            for g in range(groups):
                later[g] -= _lacks(geometry, span, g, r, known)
        if left <= 0:
            continue
        for g in range(groups):
            total[g] = used[g] + need[g] + later[g]
        end = _longest(
            meta, num_slabs, geometry, span, r, start, min(known, start + max(np.int64(1), left - decodes)), total
        )
        takes = False
        for g in range(groups):
            lacks = _lacks(geometry, span, g, r, end)
            takes |= lacks > 0
            need[g] += lacks
            total[g] = used[g] + need[g]
        if end == start + 1 and takes and not fits(meta, num_slabs, total):
            return n, tokens, i
        rows[n] = r
        ends[n] = end
        n += 1
        tokens += end - start
    return n, tokens, -1


@inlined
def _extend(
    meta: Any,
    blocks: Any,
    slots: Any,
    ring: Any,
    empties: Any,
    slabs: Any,
    geometry: Any,
    table: Any,
    span: Any,
    rows: Any,
    ends: Any,
    n: Any,
    need: Any,
) -> None:
    for g in range(len(geometry)):
        if need[g] == 0:
            continue
        make_empty(meta, blocks, slots, ring, empties, slabs, g, need[g])
        bt = geometry[g, _BT]
        for k in range(n):
            r = np.int64(rows[k])
            if span[r, g, 1] * bt < ends[k]:
                extend_group(
                    meta, blocks, empties, slabs, geometry, table, span, g, r, num_blocks(geometry, g, ends[k])
                )


@jit
def plan_running(
    meta: Any,
    blocks: Any,
    slots: Any,
    ring: Any,
    empties: Any,
    slabs: Any,
    geometry: Any,
    table: Any,
    span: Any,
    state: Any,
    order: Any,
    skip: Any,
    budget: Any,
    spare_cached: Any,
    rows: Any,
    ends: Any,
    used: Any,
    need: Any,
    later: Any,
    total: Any,
) -> Any:
    """Gives every running row, in service order, the tokens that it computes in this step, and its blocks.

    ``order`` int32 [R] rows; ``skip`` uint8 [M] rows that have their place in this step, or sit it out. Writes rows[k],
    ends[k] (the row computes up to this token) and need[G] (blocks that all this takes). Prefills leave each decode its
    token and its blocks. Returns (entries, tokens, position in ``order`` of the first row that cannot even compute one
    token or -1, whether the blocks were taken); need[G] includes that of the row that is short. Blocks are not taken if
    others must be moved or are still fenced, or are cached but with ``spare_cached``, or if the tables are too narrow.
    """
    for g in range(len(meta)):
        used[g] = live(meta, g)
    n, tokens, short = plan_rows(
        meta, len(slabs), geometry, span, state, used, order, skip, budget, rows, ends, need, later, total
    )
    ready, at_hand, longest = short < 0, True, np.int64(0)
    for k in range(n):
        longest = max(longest, ends[k])
    for g in range(len(meta)):
        ready = ready and longest <= (geometry[g, _WIDTH] - 1) * geometry[g, _BT]
        at_hand &= need[g] <= meta[g, _N_EMPTY]
    if ready and not at_hand:
        ready = not spare_cached and provide(meta, blocks, slots, ring, empties, slabs, need, False)
    if ready:
        _extend(meta, blocks, slots, ring, empties, slabs, geometry, table, span, rows, ends, n, need)
        for k in range(n):
            skip[rows[k]] = 1
    return n, tokens, short, ready


@jit
def extend_rows(
    meta: Any,
    blocks: Any,
    slots: Any,
    ring: Any,
    empties: Any,
    slabs: Any,
    geometry: Any,
    table: Any,
    span: Any,
    skip: Any,
    rows: Any,
    ends: Any,
    need: Any,
) -> None:
    """Takes the planned blocks of all entries; need[G] is how many that are."""
    _extend(meta, blocks, slots, ring, empties, slabs, geometry, table, span, rows, ends, len(rows), need)
    for k in range(len(rows)):
        skip[rows[k]] = 1


@jit
def fill_step(
    state: Any,
    rows: Any,
    ends: Any,
    token_ids: Any,
    positions: Any,
    query_start: Any,
    starts: Any,
    seq_lens: Any,
    sample: Any,
    prefill: Any,
) -> Any:
    """Writes the step's arrays, but for the token ids of prefills.

    Returns (entries to sample, those that prefill, the largest of seq_lens).
    """
    at, sampled, prefills, longest = np.int64(0), 0, 0, np.int64(0)
    for k in range(len(rows)):
        r, end = np.int64(rows[k]), ends[k]
        start = state[r, _COMPUTED]
        query_start[k] = at
        starts[k] = start
        seq_lens[k] = end
        longest = max(longest, end)
        if state[r, _PHASE] == _DECODE:
            token_ids[_U(at)] = state[r, _LAST]
            positions[_U(at)] = start
        else:
            prefill[prefills] = k
            prefills += 1
            for i in range(_U(end - start)):
                positions[_U(at) + i] = start + np.int64(i)
        at += end - start
        if end == state[r, _TOTAL]:
            sample[sampled] = k
            sampled += 1
    query_start[len(rows)] = at
    return sampled, prefills, longest


@jit
def valid_ids(ids: Any) -> Any:
    """Whether all token ids are in [0, 2**31)."""
    valid = True
    for i in range(len(ids)):
        valid &= (ids[i] >= 0) & (ids[i] < 2**31)
    return valid


@inlined
def _modulo(value: Any, divisor: Any) -> Any:
    """value % divisor, without a division where the divisor is a power of two."""
    if divisor & (divisor - 1) == 0:
        return value & (divisor - 1)
    return value % divisor


@inlined
def _is_eos(eos: Any, r: Any, token: Any) -> Any:
    hit = False
    for i in range(eos.shape[1]):
        hit |= eos[r, i] == token
    return hit


@jit
def advance(
    meta: Any,
    blocks: Any,
    slots: Any,
    ring: Any,
    empties: Any,
    slabs: Any,
    geometry: Any,
    table: Any,
    span: Any,
    state: Any,
    chain: Any,
    tail: Any,
    eos: Any,
    generated: Any,
    passed: Any,
    secret: Any,
    hit_tokens: Any,
    rows: Any,
    ends: Any,
    sample: Any,
    tokens: Any,
    ended: Any,
    n: Any,
    groups: Any,
    ids: Any,
    keys: Any,
) -> Any:
    """The forward of these entries is done: counts their tokens, appends the sampled ones, seals, lets windows go.

    tokens[i] is what entry sample[i] has sampled, -1 if that is not its text. Writes ended[k] (GOES_ON, STOPPED,
    LENGTH) and, as entries n, n + 1 ... of groups, ids and keys, the full-attention blocks that decodes made findable.
    Returns (the number of those entries, rows that have ended). Blocks of prefills are sealed by the caller beforehand.
    """
    unit, at, num_ended = np.int64(tail.shape[1]), 0, 0
    for k in range(len(rows)):
        r, end = np.int64(rows[k]), ends[k]
        prefills, place = state[r, _PHASE] != _DECODE, np.int64(0)
        if not prefills:
            place = _modulo(end - 1, unit)
            tail[r, place] = state[r, _LAST]
            if place == unit - 1:
                low, high = sip_link(secret, chain[r, 0], chain[r, 1], tail[r], 0, unit)
                chain[r, 0] = low
                chain[r, 1] = high
                for g in range(len(geometry)):
                    bt = geometry[g, _BT]
                    if geometry[g, _KIND] == _FULL and end % bt == 0 and state[r, _PUBLISH] != 0:
                        entry = row_at(geometry, g, r) + end // bt - 1
                        b = seal_block(meta, blocks, slots, ring, empties, slabs, table, state, g, r, entry, low, high)
                        if b != 0:
                            groups[n] = g
                            ids[n] = b
                            keys[n, 0] = low
                            keys[n, 1] = high
                            n += 1
        state[r, _COMPUTED] = end
        ended[k] = GOES_ON
        if at < len(sample) and sample[at] == k:
            token = tokens[at]
            at += 1
            if token >= 0:
                state[r, _PHASE] = _DECODE
                generated[r, state[r, _GENERATED]] = token
                state[r, _GENERATED] += 1
                state[r, _LAST] = token
                state[r, _TOTAL] += 1
                if _is_eos(eos, r, token):
                    ended[k] = STOPPED
                elif state[r, _TOTAL] >= state[r, _LIMIT]:
                    ended[k] = LENGTH
                num_ended += ended[k] != GOES_ON
        if prefills or (place == 0 and (end - 1) % hit_tokens == 0):  # else nothing has left a window since last time
            anchor = (end - 1) // hit_tokens * hit_tokens
            for g in range(len(geometry)):
                if geometry[g, _KIND] != _FULL:
                    stop = first_block(geometry, g, anchor)
                    release_span(meta, blocks, slots, ring, empties, slabs, geometry, table, span, passed, g, r, stop)
    return n, num_ended


@inlined
def _drop(meta: Any, blocks: Any, geometry: Any, table: Any, span: Any, r: Any, gained: Any) -> None:
    """Counts row r's blocks as given up, and adds those that this frees to gained[G].

    A block that an overdue store may still read frees nothing: it would be quarantined.
    """
    for g in range(len(gained)):
        at = row_at(geometry, g, r)
        for j in range(span[r, g, 0], span[r, g, 1]):
            block = blocks[_U(meta[g, _BASE] + table[_U(at + j)])]
            block.refs -= 1
            gained[g] += block.refs == 0 and block.fence >= 0


@inlined
def _undrop(meta: Any, blocks: Any, geometry: Any, table: Any, span: Any, r: Any, lost: Any) -> None:
    """Takes a ``_drop`` back; lost[G] is what the others that are dropped then free less."""
    lost[:] = 0
    for g in range(len(lost)):
        at = row_at(geometry, g, r)
        for j in range(span[r, g, 0], span[r, g, 1]):
            block = blocks[_U(meta[g, _BASE] + table[_U(at + j)])]
            lost[g] += block.refs == 0 and block.fence >= 0
            block.refs += 1


@inlined
def _helps(meta: Any, num_slabs: Any, total: Any, lost: Any, short: Any) -> Any:
    """Whether it matters that lost[G] blocks more are used, where total[G] are: in a pool of a size of its own if that
    was ``short``, in a shared arena if it takes more slabs."""
    helps = False
    for g in range(len(lost)):
        if meta[g, _MOST_SLABS] == 1:
            helps |= lost[g] > 0 and short[g] != 0
        else:
            helps |= slabs_for(meta, g, total[g] + lost[g]) > slabs_for(meta, g, total[g])
    return helps


@jit
def choose_victims(p: Any, t: Any, victims: Any, want: Any, chosen: Any, total: Any, lost: Any, short: Any) -> Any:
    """Which of ``victims``, taken in order, must give up their blocks so that want[G] more can be taken: sets
    chosen[k], 0 or 1.

    Counts the blocks that the *set* frees: one that two victims share is freed by both together, by neither alone.
    A victim that adds nothing to what is lacking is spared. False, and none chosen, if all together do not suffice.
    """
    meta, blocks, geometry, table, span = p.meta, p.blocks, t.geometry, t.table, t.span
    num_slabs = len(p.slabs)
    for g in range(len(meta)):
        total[g] = live(meta, g) + want[g]
        short[g] = slabs_for(meta, g, total[g]) > meta[g, _MOST_SLABS]
    chosen[:] = 0
    visited, enough = 0, False
    while visited < len(victims) and not enough:
        lost[:] = 0
        _drop(meta, blocks, geometry, table, span, victims[visited], lost)
        for g in range(len(meta)):
            total[g] -= lost[g]
        chosen[visited] = 1
        visited += 1
        enough = fits(meta, num_slabs, total)
    for v in range(visited):
        _undrop(meta, blocks, geometry, table, span, victims[v], lost)
        if enough and _helps(meta, num_slabs, total, lost, short):
            lost[:] = 0
            _drop(meta, blocks, geometry, table, span, victims[v], lost)
            continue
        chosen[v] = 0
        for g in range(len(meta)):
            total[g] += lost[g]
    for v in range(visited):
        if chosen[v]:
            _undrop(meta, blocks, geometry, table, span, victims[v], lost)
    return enough
