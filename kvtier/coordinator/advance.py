"""The compiled loop that ends a step: the changes of a finished forward to the rows that it computed.

Promises   a running request costs a few array accesses, whatever the context length or pool size. Keeps I4, I13, I16.
Does not   end requests; it reports which requests have ended.

``pools.pool_state`` says what the arguments are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.geometry.keys import sip_link
from kvtier.geometry.kinds import Kind
from kvtier.gpu_pool.block_table import release_span
from kvtier.gpu_pool.row_state import Geo, Phase, Publish, RowArrays, RowCol, first_block, row_at
from kvtier.gpu_pool.seals import seal_block
from kvtier.machine.loops.jit import inlined, jit, prefetch
from kvtier.pools.key_index import prefetch_slot
from kvtier.pools.pool_state import Col, PoolArrays

_BT, _KIND, _FULL, _DECODE = int(Geo.BLOCK_TOKENS), int(Geo.KIND), int(Kind.FULL), int(Phase.DECODE)
_BASE = int(Col.BASE)
_COMPUTED, _TOTAL, _LIMIT = int(RowCol.COMPUTED), int(RowCol.TOTAL), int(RowCol.LIMIT)
_GENERATED, _LAST = int(RowCol.GENERATED), int(RowCol.LAST)
_PHASE, _PUBLISH = int(RowCol.PHASE), int(RowCol.PUBLISH)
_OUTDATED, _TOLD = int(Publish.OUTDATED), int(Publish.TOLD)
_U = np.uint64

GOES_ON, STOPPED, LENGTH = 0, 1, 2


@inlined
def _modulo(value: Any, divisor: Any) -> Any:
    """value % divisor, without a division if the divisor is a power of two."""
    if divisor & (divisor - 1) == 0:
        return value & (divisor - 1)
    return value % divisor


@inlined
def _is_eos(eos: Any, r: Any, token: Any) -> Any:
    hit = False
    for i in range(eos.shape[1]):
        hit |= eos[r, i] == token
    return hit


@inlined
def _chain_on(p: Any, t: Any, secret: Any, hit_tokens: Any, rows: Any, ends: Any) -> None:
    """Adds the tokens that decodes have computed to their key chains.

    Prefetches the cache lines of the blocks that are named or let go next, one row in sixteen, so that cache misses
    overlap.
    """
    geometry, chain, tail, unit = t.geometry, t.chain, t.tail, np.int64(t.tail.shape[1])
    for k in range(len(rows)):
        r, end = np.int64(rows[k]), ends[k]
        if t.state[r, _PHASE] != _DECODE:
            continue
        place = _modulo(end - 1, unit)
        tail[r, place] = t.state[r, _LAST]
        if place == unit - 1:
            low, high = sip_link(secret, chain[r, 0], chain[r, 1], tail[r], 0, unit)
            chain[r, 0] = low
            chain[r, 1] = high
            for g in range(len(geometry)):
                if geometry[g, _KIND] == _FULL:
                    prefetch_slot(p, g, high)
                    own = t.table[_U(row_at(geometry, g, r) + (end - 1) // geometry[g, _BT])]
                    prefetch(p.blocks, _U(p.meta[g, _BASE] + own))
        elif place == 0 and (end - 1) % hit_tokens == 0:
            for g in range(len(geometry)):
                if geometry[g, _KIND] != _FULL:
                    first = t.table[_U(row_at(geometry, g, r) + t.span[r, g, 0])]
                    prefetch(p.blocks, _U(p.meta[g, _BASE] + first))


@inlined
def _seal_full(p: Any, t: Any, r: Any, end: Any, n: Any, groups: Any, ids: Any, keys: Any) -> Any:
    """Seals row r's full-attention blocks that end at ``end``; enters those that it made findable from ``n`` on.

    Returns the next free entry of groups, ids and keys.
    """
    geometry, low, high = t.geometry, t.chain[r, 0], t.chain[r, 1]
    for g in range(len(geometry)):
        bt = geometry[g, _BT]
        if geometry[g, _KIND] == _FULL and end % bt == 0:
            entry = row_at(geometry, g, r) + end // bt - 1
            b = seal_block(p, t, g, r, entry, low, high)
            if b != 0 and t.state[r, _PUBLISH] == _TOLD:
                groups[n] = g
                ids[n] = b
                keys[n, 0] = low
                keys[n, 1] = high
                n += 1
    return n


@inlined
def _append(t: Any, r: Any, token: Any) -> Any:
    """Adds a sampled token to row r's text; returns GOES_ON, STOPPED or LENGTH."""
    state = t.state
    state[r, _PHASE] = _DECODE
    t.generated[r, state[r, _GENERATED]] = token
    state[r, _GENERATED] += 1
    state[r, _LAST] = token
    state[r, _TOTAL] += 1
    if _is_eos(t.eos, r, token):
        return STOPPED
    if state[r, _TOTAL] >= state[r, _LIMIT]:
        return LENGTH
    return GOES_ON


@inlined
def _let_windows_go(p: Any, t: Any, hit_tokens: Any, r: Any, end: Any) -> None:
    """Releases row r's blocks that no token from the last anchor before ``end`` on can see."""
    anchor = (end - 1) // hit_tokens * hit_tokens
    for g in range(len(t.geometry)):
        if t.geometry[g, _KIND] != _FULL:
            release_span(p, t, g, r, first_block(t.geometry, g, anchor))


@jit
def advance(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    geometry: Any, table: Any, span: Any, state: Any, chain: Any, tail: Any, eos: Any, generated: Any, superseded: Any,
    secret: Any, hit_tokens: Any, rows: Any, ends: Any, sample: Any, tokens: Any, ended: Any, n: Any,
    groups: Any, ids: Any, keys: Any,
) -> Any:
    """The forward of these entries is done: counts their tokens, appends the sampled ones, seals, lets windows go.

    tokens[i] is the token that entry sample[i] has sampled, -1 if it is not part of the text. Writes ended[k] (GOES_ON,
    STOPPED, LENGTH). Full-attention blocks that decodes made findable become entries n, n + 1 ... of groups, ids and
    keys. Returns (number of these blocks, rows that have ended). The caller has sealed the blocks of prefills before.
    """
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    t = RowArrays(geometry, table, span, state, chain, tail, eos, generated, superseded)
    unit, at, num_ended = np.int64(tail.shape[1]), 0, 0
    _chain_on(p, t, secret, hit_tokens, rows, ends)
    for k in range(len(rows)):
        r, end = np.int64(rows[k]), ends[k]
        prefills, place = state[r, _PHASE] != _DECODE, _modulo(end - 1, unit)
        if place == unit - 1 and not prefills and state[r, _PUBLISH] != _OUTDATED:
            n = _seal_full(p, t, r, end, n, groups, ids, keys)
        state[r, _COMPUTED] = end
        ended[k] = GOES_ON
        if at < len(sample) and sample[at] == k:
            token = tokens[at]
            at += 1
            if token >= 0:
                ended[k] = _append(t, r, token)
                num_ended += ended[k] != GOES_ON
        if prefills or (place == 0 and (end - 1) % hit_tokens == 0):  # else nothing has left a window since last time
            _let_windows_go(p, t, hit_tokens, r, end)
    return n, num_ended
