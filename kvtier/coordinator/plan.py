"""The compiled loops that begin a step: the tokens of each request, and the blocks and arrays they take.

Promises   a plan that finds a row short changes nothing. A plan that holds takes its blocks and marks its rows, unless
           the blocks cannot be had at once. It evicts cached blocks if it must. A running request costs a few array
           accesses, whatever the context length or pool size. Keeps I4, I16.

``pools.pool_state`` says what the arguments are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.coordinator.chunk import SHORT_STEP, lacks, longest_chunk, unmissed
from kvtier.gpu_pool.block_table import extend_group
from kvtier.gpu_pool.row_state import Geo, Phase, RowArrays, RowCol, num_blocks
from kvtier.machine.loops.jit import inlined, jit
from kvtier.pools.exchange import provide
from kvtier.pools.pool_loops import make_empty
from kvtier.pools.pool_state import Col, PoolArrays
from kvtier.pools.slab_loops import fits, live

_BT, _WIDTH = int(Geo.BLOCK_TOKENS), int(Geo.WIDTH)
_LOADING, _FRESH, _PREFILL, _DECODE = int(Phase.LOADING), int(Phase.FRESH), int(Phase.PREFILL), int(Phase.DECODE)
_N_EMPTY = int(Col.EMPTY)
_COMPUTED, _TOTAL = int(RowCol.COMPUTED), int(RowCol.TOTAL)
_LAST, _PHASE = int(RowCol.LAST), int(RowCol.PHASE)
_U = np.uint64


@inlined
def _look_over(t: Any, order: Any, skip: Any, used: Any, later: Any, total: Any) -> Any:
    """Counts the rows that may compute in this step: (decodes, FRESH rows, prefills).

    Writes later[G], the blocks that they lack for one token each, and total[G], the used[G] blocks and these.
    """
    state, decodes, fresh, prefills = t.state, 0, 0, 0
    later[:] = 0
    for i in range(len(order)):
        r = np.int64(order[i])
        if skip[r] != 0 or state[r, _PHASE] == _LOADING:
            continue
        decodes += state[r, _PHASE] == _DECODE
        fresh += state[r, _PHASE] == _FRESH
        prefills += state[r, _PHASE] == _PREFILL
        for g in range(len(later)):
            later[g] += lacks(t, g, r, state[r, _COMPUTED] + 1)
    for g in range(len(later)):
        total[g] = used[g] + later[g]
    return decodes, fresh, prefills


@inlined
def _plan_decodes(state: Any, order: Any, skip: Any, later: Any, rows: Any, ends: Any, need: Any) -> Any:
    """A plan of all decodes, which lack later[G] blocks; returns their number."""
    n = 0
    for i in range(len(order)):
        r = np.int64(order[i])
        if state[r, _PHASE] == _DECODE and skip[r] == 0:
            rows[n] = r
            ends[n] = state[r, _TOTAL]
            n += 1
    for g in range(len(need)):
        need[g] = later[g]
    return n


@jit
def plan_rows(
    p: Any, t: Any, used: Any, order: Any, skip: Any, budget: Any, before: Any,
    rows: Any, ends: Any, need: Any, later: Any, total: Any,
) -> Any:
    """``plan_running`` of the rows ``order`` beside used[G] blocks that others have or are promised; takes none.

    Returns (entries, tokens, position of the first row that is short or -1).
    """
    state, groups = t.state, len(t.geometry)
    decodes, fresh, prefills = _look_over(t, order, skip, used, later, total)
    if fresh + prefills == 0 and decodes <= budget and fits(p.meta, len(p.slabs), total):  # most steps
        n = _plan_decodes(state, order, skip, later, rows, ends, need)
        return n, np.int64(n), -1
    n, tokens = 0, np.int64(0)
    need[:] = 0
    free = unmissed(p, t) if before + budget > SHORT_STEP else 0.0
    for i in range(len(order)):
        r = np.int64(order[i])
        phase = state[r, _PHASE]
        if phase == _LOADING or skip[r] != 0:
            continue
        start, known, left = state[r, _COMPUTED], state[r, _TOTAL], budget - tokens
        decodes -= phase == _DECODE
        fresh -= phase == _FRESH
        for g in range(groups):
            later[g] -= lacks(t, g, r, start + 1)
        spare = left - fresh - decodes
        if left <= (0 if phase == _FRESH else fresh) or (phase == _PREFILL and spare <= 0 and before + tokens > n):
            continue
        for g in range(groups):
            total[g] = used[g] + need[g] + later[g]
        most = min(known, start + max(np.int64(1), spare))
        end = longest_chunk(p, t, r, start, most, before + tokens - n, need, free, total)
        takes = False
        for g in range(groups):
            more = lacks(t, g, r, end)
            takes |= more > 0
            need[g] += more
            total[g] = used[g] + need[g]
        if end == start + 1 and takes and not fits(p.meta, len(p.slabs), total):
            return n, tokens, i
        rows[n] = r
        ends[n] = end
        n += 1
        tokens += end - start
    return n, tokens, -1


@inlined
def _extend(p: Any, t: Any, rows: Any, ends: Any, n: Any, need: Any) -> None:
    geometry, span = t.geometry, t.span
    for g in range(len(geometry)):
        if need[g] == 0:
            continue
        make_empty(p, g, need[g])
        bt = geometry[g, _BT]
        for k in range(n):
            r = np.int64(rows[k])
            if span[r, g, 1] * bt < ends[k]:
                extend_group(p, t, g, r, num_blocks(geometry, g, ends[k]))


@jit
def plan_running(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    geometry: Any, table: Any, span: Any, state: Any, chain: Any, tail: Any, eos: Any, generated: Any, superseded: Any,
    order: Any, skip: Any, budget: Any, before: Any, spare_cached: Any, states: Any, moves: Any,
    rows: Any, ends: Any, used: Any, need: Any, later: Any, total: Any,
) -> Any:
    """Gives every running row, in service order, the tokens that it computes in this step, and its blocks.

    ``order``: int32 [R], rows. ``skip``: uint8 [M], rows that have their place in this step, or sit it out. ``before``:
    the step's tokens so far, beside ``budget``, beyond one for each entry. Writes rows[k], ends[k] (the row computes up
    to this token) and need[G] (the blocks of the whole plan).

    A prefill leaves one token for every decode, and one token's blocks for every later row. So a row that just caused a
    preemption cannot run short again. A prefill that finds no more than that sits the step out. If there are fewer
    tokens than rows, the first rows get theirs. FRESH rows go first: until they have computed a token they cannot be
    preempted.

    Returns (entries, tokens, position of the first short row or -1, whether the blocks were taken). A row is short if
    it cannot even compute one token; need[G] includes its need. Blocks are not taken if blocks must be moved or are
    still fenced, or if the tables are too narrow. With ``spare_cached`` they are not taken if they are cached.
    ``states`` and ``moves``, int32 [2, 0], as in ``provide``.
    """
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    t = RowArrays(geometry, table, span, state, chain, tail, eos, generated, superseded)
    for g in range(len(meta)):
        used[g] = live(meta, g)
    n, tokens, short = plan_rows(p, t, used, order, skip, budget, before, rows, ends, need, later, total)
    ready, at_hand, longest = short < 0, True, np.int64(0)
    for k in range(n):
        longest = max(longest, ends[k])
    for g in range(len(meta)):
        ready = ready and longest <= (geometry[g, _WIDTH] - 1) * geometry[g, _BT]
        at_hand &= need[g] <= meta[g, _N_EMPTY]
    if ready and not at_hand:
        ready = not spare_cached and provide(
            meta, blocks, slots, ring, empties, slabs, need, spare_cached, states, moves
        )[0]
    if ready:
        _extend(p, t, rows, ends, n, need)
        for k in range(n):
            skip[rows[k]] = 1
    return n, tokens, short, ready


@jit
def extend_rows(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    geometry: Any, table: Any, span: Any, state: Any, chain: Any, tail: Any, eos: Any, generated: Any, superseded: Any,
    skip: Any, rows: Any, ends: Any, need: Any,
) -> None:
    """Takes the planned blocks of all entries; need[G] is their number."""
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    t = RowArrays(geometry, table, span, state, chain, tail, eos, generated, superseded)
    _extend(p, t, rows, ends, len(rows), need)
    for k in range(len(rows)):
        skip[rows[k]] = 1


@jit
def fill_step(
    state: Any,
    rows: Any,
    ends: Any,
    samples: Any,
    token_ids: Any,
    positions: Any,
    query_start: Any,
    rows_out: Any,
    starts: Any,
    seq_lens: Any,
    sample_out: Any,
    prefill: Any,
) -> Any:
    """Writes the step's arrays, except the token ids of prefills. Also writes the entries to sample to ``samples``.

    Returns (entries to sample, entries that prefill, the largest of seq_lens).
    """
    at, sampled, prefills, longest = np.int64(0), 0, 0, np.int64(0)
    for k in range(len(rows)):
        r, end = np.int64(rows[k]), ends[k]
        start = state[r, _COMPUTED]
        query_start[k] = at
        rows_out[k] = rows[k]
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
            samples[sampled] = sample_out[sampled] = k
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
