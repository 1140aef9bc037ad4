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
from kvtier.gpu_pool.pool_loops import make_empty
from kvtier.gpu_pool.pool_state import Col
from kvtier.keys import sip_link
from kvtier.spec import Kind

_BT, _KIND = int(Geo.BLOCK_TOKENS), int(Geo.KIND)
_FULL = int(Kind.FULL)
_LOADING, _PREFILL, _DECODE = int(Phase.LOADING), int(Phase.PREFILL), int(Phase.DECODE)
_BASE = int(Col.BASE)
_COMPUTED, _TOTAL, _LIMIT, _GENERATED, _LAST, _PHASE, _PUBLISH = (int(c) for c in list(RowCol)[:7])
_U = np.uint64

GOES_ON, STOPPED, LENGTH = 0, 1, 2


@inlined
def _lacks(geometry: Any, span: Any, g: Any, r: Any, end: Any) -> Any:
    """Blocks of group g that row r needs besides its own to compute up to ``end``."""
    if span[r, g, 1] * geometry[g, _BT] >= end:
        return np.int64(0)
    return num_blocks(geometry, g, end) - span[r, g, 1]


@jit
def plan_running(
    t: Any, free: Any, order: Any, skip: Any, budget: Any, rows: Any, ends: Any, need: Any, lack: Any, later_need: Any
) -> Any:
    """Gives every running row, in service order, the tokens that it computes in this step.

    ``free`` int64 [G] blocks that can be handed out; ``order`` int32 [R] rows; ``skip`` uint8 [M] rows that sit this
    step out. Writes rows[k], ends[k] (the row computes up to this token) and need[G] (blocks that all this takes).
    Returns (entries, tokens, position in ``order`` of the first row that cannot even compute one token, or -1); in
    the last case lack[G] is what that row lacks. Prefills leave each decode its token and its blocks (later_need[G]).
    """
    geometry, span, state = t.geometry, t.span, t.state
    groups = len(geometry)
    later_decodes = 0
    later_need[:] = 0
    for i in range(len(order)):
        r = np.int64(order[i])
        if state[r, _PHASE] == _DECODE and skip[r] == 0:
            later_decodes += 1
            for g in range(groups):
                later_need[g] += _lacks(geometry, span, g, r, state[r, _TOTAL])
    need[:] = 0
    n, tokens = 0, np.int64(0)
    for i in range(len(order)):
        r = np.int64(order[i])
        phase = state[r, _PHASE]
        if phase == _LOADING or skip[r] != 0:
            continue
        start, total, left = state[r, _COMPUTED], state[r, _TOTAL], budget - tokens
        if phase == _DECODE:
            later_decodes -= 1
            for g in range(groups):
                later_need[g] -= _lacks(geometry, span, g, r, total)
        if left <= 0:
            continue
        end = min(total, start + max(np.int64(1), left - later_decodes))
        if end > start + 1:
            for g in range(groups):
                room = max(np.int64(0), free[g] - need[g] - later_need[g])
                end = min(end, (span[r, g, 1] + room) * geometry[g, _BT])
            end = max(end, start + 1)
        short = False
        for g in range(groups):
            lack[g] = _lacks(geometry, span, g, r, end) - (free[g] - need[g])
            short |= lack[g] > 0
        if short:
            return n, tokens, i
        for g in range(groups):
            need[g] += _lacks(geometry, span, g, r, end)
        rows[n] = r
        ends[n] = end
        n += 1
        tokens += end - start
    return n, tokens, -1


@jit
def extend_rows(p: Any, t: Any, rows: Any, ends: Any, need: Any) -> None:
    """Takes the planned blocks of all entries; need[G] is how many that are."""
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    geometry, table, span = t.geometry, t.table, t.span
    for g in range(len(geometry)):
        if need[g] == 0:
            continue
        make_empty(meta, blocks, slots, ring, g, need[g])
        bt = geometry[g, _BT]
        for k in range(len(rows)):
            r = np.int64(rows[k])
            if span[r, g, 1] * bt < ends[k]:
                extend_group(meta, blocks, geometry, table, span, g, r, num_blocks(geometry, g, ends[k]))


@jit
def fill_step(
    t: Any,
    rows: Any,
    ends: Any,
    token_ids: Any,
    positions: Any,
    query_start: Any,
    starts: Any,
    seq_lens: Any,
    sample: Any,
) -> Any:
    """Writes the step's arrays, but for the token ids of prefills; returns (entries to sample, those that prefill)."""
    state = t.state
    at, sampled, prefills = np.int64(0), 0, 0
    for k in range(len(rows)):
        r, end = np.int64(rows[k]), ends[k]
        start = state[r, _COMPUTED]
        query_start[k] = at
        starts[k] = start
        seq_lens[k] = end
        if state[r, _PHASE] == _DECODE:
            token_ids[_U(at)] = state[r, _LAST]
            positions[_U(at)] = start
        else:
            prefills += 1
            for i in range(_U(end - start)):
                positions[_U(at) + i] = start + np.int64(i)
        at += end - start
        if end == state[r, _TOTAL]:
            sample[sampled] = k
            sampled += 1
    query_start[len(rows)] = at
    return sampled, prefills


@jit
def valid_ids(ids: Any) -> Any:
    """Whether all token ids are in [0, 2**31)."""
    valid = True
    for i in range(len(ids)):
        valid &= (ids[i] >= 0) & (ids[i] < 2**31)
    return valid


@inlined
def _is_eos(eos: Any, r: Any, token: Any) -> Any:
    hit = False
    for i in range(eos.shape[1]):
        hit |= eos[r, i] == token
    return hit


@jit
def advance(
    p: Any,
    t: Any,
    secret: Any,
    hit_tokens: Any,
    rows: Any,
    ends: Any,
    sample: Any,
    tokens: Any,
    ended: Any,
    groups: Any,
    ids: Any,
    keys: Any,
) -> Any:
    """The forward of these entries is done: counts their tokens, appends the sampled ones, seals, lets windows go.

    tokens[i] is what entry sample[i] has sampled, -1 if that is not its text. Writes ended[k] (GOES_ON, STOPPED,
    LENGTH) and the full-attention blocks that decodes made findable; returns (how many those are, entries that have
    ended). Blocks of prefills are sealed by the caller beforehand.
    """
    meta, blocks, slots, ring = p.meta, p.blocks, p.slots, p.ring
    geometry, table, span, state = t.geometry, t.table, t.span, t.state
    chain, tail, eos, generated = t.chain, t.tail, t.eos, t.generated
    unit, n, at, num_ended = np.int64(tail.shape[1]), 0, 0, 0
    for k in range(len(rows)):
        r, end = np.int64(rows[k]), ends[k]
        prefills = state[r, _PHASE] != _DECODE
        if not prefills:
            place = (end - 1) % unit
            tail[r, place] = state[r, _LAST]
            if place == unit - 1:
                low, high = sip_link(secret, chain[r, 0], chain[r, 1], tail[r], 0, unit)
                chain[r, 0] = low
                chain[r, 1] = high
                for g in range(len(geometry)):
                    bt = geometry[g, _BT]
                    if geometry[g, _KIND] == _FULL and end % bt == 0 and state[r, _PUBLISH] != 0:
                        entry = row_at(geometry, g, r) + end // bt - 1
                        b = seal_block(meta, blocks, slots, ring, table, state, g, r, entry, low, high)
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
        if prefills or (end - 1) % hit_tokens == 0:  # else nothing has left a window since the last token
            anchor = (end - 1) // hit_tokens * hit_tokens
            for g in range(len(geometry)):
                if geometry[g, _KIND] != _FULL:
                    stop = first_block(geometry, g, anchor)
                    release_span(meta, blocks, slots, ring, geometry, table, span, g, r, stop)
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
def _covers(gained: Any, lack: Any) -> Any:
    enough = True
    for g in range(len(lack)):
        enough &= gained[g] >= lack[g]
    return enough


@inlined
def _helps(lost: Any, lack: Any) -> Any:
    helps = False
    for g in range(len(lack)):
        helps |= lack[g] > 0 and lost[g] > 0
    return helps


@jit
def choose_victims(p: Any, t: Any, victims: Any, lack: Any, chosen: Any, gained: Any, lost: Any) -> Any:
    """Which of ``victims``, taken in order, must give up their blocks to cover lack[G]: sets chosen[k], 0 or 1.

    Counts the blocks that the *set* frees: one that two victims share is freed by both together, by neither alone.
    A victim that adds nothing to what is lacking is spared. False, and none chosen, if all together do not suffice.
    """
    meta, blocks, geometry, table, span = p.meta, p.blocks, t.geometry, t.table, t.span
    gained[:] = 0
    chosen[:] = 0
    visited, enough = 0, False
    while visited < len(victims) and not enough:
        _drop(meta, blocks, geometry, table, span, victims[visited], gained)
        chosen[visited] = 1
        visited += 1
        enough = _covers(gained, lack)
    for v in range(visited):
        _undrop(meta, blocks, geometry, table, span, victims[v], lost)
        if not enough or not _helps(lost, lack):
            chosen[v] = 0
        else:
            _drop(meta, blocks, geometry, table, span, victims[v], gained)
    for v in range(visited):
        if chosen[v]:
            _undrop(meta, blocks, geometry, table, span, victims[v], lost)
    return enough
