"""The compiled loops of a step: who computes how many tokens, and what a finished forward changes.

Promises   planning changes nothing; advancing does per running request a few array accesses, whatever the context
           length or pool size. Keeps I4, I13, I16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier._jit import inlined, jit
from kvtier.gpu_pool.block_pool import Col
from kvtier.gpu_pool.block_table import Geo, Phase, extend_row, num_blocks, release_before, seal_block
from kvtier.keys import sip_link
from kvtier.spec import Kind

_BT, _KIND, _UNITS, _OFFSET, _WIDTH = (
    int(Geo.BLOCK_TOKENS),
    int(Geo.KIND),
    int(Geo.UNITS),
    int(Geo.OFFSET),
    int(Geo.WIDTH),
)
_FULL = int(Kind.FULL)
_LOADING, _PREFILL, _DECODE = int(Phase.LOADING), int(Phase.PREFILL), int(Phase.DECODE)
_BASE = int(Col.BASE)

GOES_ON, STOPPED, LENGTH = 0, 1, 2


@jit
def plan_running(
    t: Any, free: Any, order: Any, skip: Any, budget: Any, rows: Any, ends: Any, need: Any, lack: Any
) -> Any:
    """Gives every running row, in service order, the tokens that it computes in this step.

    ``free`` int64 [G] blocks that can be handed out; ``order`` int32 [R] rows; ``skip`` uint8 [M] rows that sit this
    step out. Writes rows[k], ends[k] (the row computes up to this token) and need[G] (blocks that all this takes).
    Returns (entries, tokens, position in ``order`` of the first row that cannot even compute one token, or -1); in
    the last case lack[G] is what that row lacks. Prefills leave each decode its token and its blocks.
    """
    groups = t.geometry.shape[0]
    later_decodes, later_need = 0, np.zeros(groups, np.int64)
    for r in order:
        if t.phase[r] == _DECODE and skip[r] == 0:
            later_decodes += 1
            for g in range(groups):
                later_need[g] += max(0, num_blocks(t, g, t.total[r]) - t.hi[g, r])
    need[:] = 0
    n, tokens = 0, np.int64(0)
    for i in range(len(order)):
        r = order[i]
        if t.phase[r] == _LOADING or skip[r] != 0:
            continue
        start, total, left = t.computed[r], t.total[r], budget - tokens
        if t.phase[r] == _DECODE:
            later_decodes -= 1
            for g in range(groups):
                later_need[g] -= max(0, num_blocks(t, g, total) - t.hi[g, r])
        if left <= 0:
            continue
        end = min(total, start + max(np.int64(1), left - later_decodes))
        if end > start + 1:
            for g in range(groups):
                room = max(np.int64(0), free[g] - need[g] - later_need[g])
                end = min(end, (t.hi[g, r] + room) * t.geometry[g, _BT])
            end = max(end, start + 1)
        short = False
        for g in range(groups):
            lack[g] = max(0, num_blocks(t, g, end) - t.hi[g, r]) - (free[g] - need[g])
            short |= lack[g] > 0
        if short:
            return n, tokens, i
        for g in range(groups):
            need[g] += max(0, num_blocks(t, g, end) - t.hi[g, r])
        rows[n] = r
        ends[n] = end
        n += 1
        tokens += end - start
    return n, tokens, -1


@jit
def extend_rows(p: Any, t: Any, rows: Any, ends: Any) -> None:
    """Takes the planned blocks of all entries."""
    for k in range(len(rows)):
        extend_row(p, t, rows[k], ends[k])


@jit
def fill_step(
    t: Any, rows: Any, ends: Any, token_ids: Any, positions: Any, query_start: Any, seq_lens: Any, sample: Any
) -> Any:
    """Writes the step's arrays, but for the token ids of prefills; returns how many entries are sampled."""
    at, sampled = np.int64(0), 0
    for k in range(len(rows)):
        r = rows[k]
        start, end = t.computed[r], ends[k]
        query_start[k] = at
        seq_lens[k] = end
        if t.phase[r] == _DECODE:
            token_ids[at] = t.last[r]
            positions[at] = start
        else:
            for i in range(end - start):
                positions[at + i] = start + i
        at += end - start
        if end == t.total[r]:
            sample[sampled] = k
            sampled += 1
    query_start[len(rows)] = at
    return sampled


@inlined
def _is_eos(t: Any, r: Any, token: Any) -> Any:
    hit = False
    for i in range(t.eos.shape[1]):
        hit |= t.eos[r, i] == token
    return hit


@jit
def advance(
    p: Any,
    t: Any,
    secret: Any,
    hit_tokens: Any,
    rows: Any,
    ends: Any,
    tokens: Any,
    ended: Any,
    groups: Any,
    blocks: Any,
    keys: Any,
) -> Any:
    """The forward of these entries is done: counts their tokens, appends the sampled ones, seals, lets windows go.

    tokens[k] is the sampled token or -1. Writes ended[k] (GOES_ON, STOPPED, LENGTH) and the full-attention blocks
    that decodes made findable; returns how many those are. Blocks of prefills are sealed by the caller beforehand.
    """
    unit, n = np.int64(t.tail.shape[1]), 0
    for k in range(len(rows)):
        r, end = np.int64(rows[k]), ends[k]
        if t.phase[r] == _DECODE:
            t.tail[r, (end - 1) % unit] = t.last[r]
            if end % unit == 0:
                lo, hi = sip_link(secret, t.chain[r, 0], t.chain[r, 1], t.tail[r], 0, unit)
                t.chain[r, 0] = lo
                t.chain[r, 1] = hi
                for g in range(t.geometry.shape[0]):
                    bt = t.geometry[g, _BT]
                    if t.geometry[g, _KIND] == _FULL and end % bt == 0 and t.publish[r] != 0:
                        b = seal_block(p, t, g, r, end // bt - 1, lo, hi)
                        if b != 0:
                            groups[n] = g
                            blocks[n] = b
                            keys[n, 0] = lo
                            keys[n, 1] = hi
                            n += 1
        t.computed[r] = end
        ended[k] = GOES_ON
        if tokens[k] >= 0:
            t.phase[r] = _DECODE
            t.generated[r, t.num_generated[r]] = tokens[k]
            t.num_generated[r] += 1
            t.last[r] = tokens[k]
            t.total[r] += 1
            if _is_eos(t, r, tokens[k]):
                ended[k] = STOPPED
            elif t.total[r] >= t.limit[r]:
                ended[k] = LENGTH
        release_before(p, t, r, (end - 1) // hit_tokens * hit_tokens)
    return n


@inlined
def _drop(p: Any, t: Any, r: Any, gained: Any) -> None:
    """Counts row r's blocks as given up, and adds those that this frees to gained[G].

    A block that an overdue store may still read frees nothing: it would be quarantined.
    """
    for g in range(len(gained)):
        at = t.geometry[g, _OFFSET] + r * t.geometry[g, _WIDTH]
        for j in range(t.lo[g, r], t.hi[g, r]):
            i = p.meta[g, _BASE] + t.table[at + j]
            p.refs[i] -= 1
            gained[g] += p.refs[i] == 0 and p.fence[i] >= 0


@inlined
def _undrop(p: Any, t: Any, r: Any, lost: Any) -> None:
    """Takes a ``_drop`` back; lost[G] is what the others that are dropped then free less."""
    lost[:] = 0
    for g in range(len(lost)):
        at = t.geometry[g, _OFFSET] + r * t.geometry[g, _WIDTH]
        for j in range(t.lo[g, r], t.hi[g, r]):
            i = p.meta[g, _BASE] + t.table[at + j]
            lost[g] += p.refs[i] == 0 and p.fence[i] >= 0
            p.refs[i] += 1


@jit
def choose_victims(p: Any, t: Any, victims: Any, lack: Any, chosen: Any) -> Any:
    """Which of ``victims``, taken in order, must give up their blocks to cover lack[G]: sets chosen[k], 0 or 1.

    Counts the blocks that the *set* frees: one that two victims share is freed by both together, by neither alone.
    A victim that adds nothing to what is lacking is spared. False, and none chosen, if all together do not suffice.
    """
    gained, lost = np.zeros(t.geometry.shape[0], np.int64), np.zeros(t.geometry.shape[0], np.int64)
    chosen[:] = 0
    visited, enough = 0, False
    while visited < len(victims) and not enough:
        _drop(p, t, victims[visited], gained)
        chosen[visited] = 1
        visited += 1
        enough = bool(np.all(gained >= lack))
    for v in range(visited):
        _undrop(p, t, victims[v], lost)
        if not enough or not np.any((lack > 0) & (lost > 0)):
            chosen[v] = 0
        else:
            _drop(p, t, victims[v], gained)
    for v in range(visited):
        if chosen[v]:
            _undrop(p, t, victims[v], lost)
    return enough
