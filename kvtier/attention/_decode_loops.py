"""Compiled loops for decode steps and short prompts on a CPU: K and V are written and attended to in place, in pools.

Owns       the arithmetic of one query over its own keys, float32: scores, soft cap, softmax, sinks.
Promises   no key outside a piece is read. A row's result depends on its own query and keys alone, bit for bit. Neither
           the rest of the step nor the spread of its pieces over threads matters. Ids outside the pool are refused.
Does not   import torch, or know attention kinds beyond the first token that a query sees.

A query's keys are cut into pieces of ``PIECE`` tokens, which may be computed at the same time. Each leaves an undivided
mean of values, the greatest score, and the sum of exponentials. A piece goes in tiles of up to ``TILE`` tokens. A tile
is first read once in the order of memory: a processor fetches ahead along such a stream. The arithmetic comes after it
and reads four rows side by side.

Pools, queries and new K and V come as the address of their first number, with strides in ``sizes``. So a loop has one
form for every layout, and innermost loops go over consecutive memory.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from kvtier.machine.loops.exponential import exp
from kvtier.machine.loops.jit import floats, inlined, inlined_floats, jit, jit_floats, touch

PIECE = 512
TILE = 64
FEW = 1 << 12
"""Pairs of a query and a key that it sees. An entry with no more of them, such as a prompt of 90 tokens, is computed by
loops in 0.3 to 1.0 of torch's time; one with twice as many, on a long text, in up to 1.3 times."""
_LINE = 16  # floats in a cache line
_NEAR = 1 << 16
"""Floats of K and V in a tile of more than four tokens, at most: a quarter of a core's cache of 1 MiB."""
_RUN = 16  # tokens that may lie side by side
_U = np.uint64
_F = np.float32
_LOWEST = _F(-np.inf)


class Size(IntEnum):
    """Columns of ``sizes``, int64: of the pools, with their strides in elements."""

    BLOCKS = 0
    BLOCK_TOKENS = 1
    KV_HEADS = 2
    DIM = 3
    DIM_V = 4
    K_BLOCK = 5
    K_TOKEN = 6
    K_HEAD = 7
    V_BLOCK = 8
    V_TOKEN = 9
    V_HEAD = 10


_BLOCKS, _BT, _KV_HEADS, _DIM, _DIM_V = map(int, (Size.BLOCKS, Size.BLOCK_TOKENS, Size.KV_HEADS, Size.DIM, Size.DIM_V))
_K, _V = int(Size.K_BLOCK), int(Size.V_BLOCK)  # of a block; then of a token, and of a head

ROW, ENTRY, FIRST, END = range(4)
"""Columns of a piece, int64: the query's row in the step, its entry, and the tokens [first, end)."""


@inlined
def cut(pieces: Any, count: Any, row: Any, entry: Any, end: Any, span: Any, chunked: Any, fixed: Any) -> Any:
    """Adds to the ``count`` pieces those of the query of token ``end`` - 1; returns their number.

    It sees the ``span`` last tokens (0: all), or, if ``chunked``, the tokens of its own chunk of ``span``. They are cut
    from the first one on, or, if ``fixed``, at multiples of ``PIECE``.
    """
    first = np.int64(0)
    if chunked:
        first = (end - 1) // span * span
    elif span > 0:
        first = max(first, end - span)
    while first < end:
        stop = min((first // PIECE + 1) * PIECE if fixed else first + PIECE, end)
        pieces[count, ROW] = row
        pieces[count, ENTRY] = entry
        pieces[count, FIRST] = first
        pieces[count, END] = stop
        first = stop
        count += 1
    return count


@jit
def plan_pieces(pieces: Any, taken: Any, query_start: Any, seq_lens: Any, span: Any, chunked: Any) -> tuple[int, int]:
    """Fills ``pieces`` [n, 4] for entries with one query or little work, in order; returns (queries, pieces).

    ``taken`` bool [entries] tells them; ``span`` and ``chunked`` are as in ``cut``. The room for pieces is one for each
    query and for each ``PIECE`` tokens of an entry, and ``FEW // PIECE`` more for each entry.
    """
    queries, count = 0, 0
    for entry in range(len(seq_lens)):
        row, tokens = query_start[entry], seq_lens[entry]
        n = query_start[entry + 1] - row
        pairs = n * (2 * tokens - n + 1) // 2
        taken[entry] = n == 1 or 0 < (min(pairs, n * span) if span > 0 else pairs) <= FEW
        if not taken[entry]:
            continue
        queries += n
        for i in range(n):
            end = tokens - n + i + 1
            count = cut(pieces, count, row + i, entry, end, span, chunked, False)
    return queries, count


@jit
def write_slots(k: Any, v: Any, key: Any, value: Any, slots: Any, sizes: Any, strides: Any) -> bool:
    """Writes each token's K and V into its slot; False, and nothing written, if a slot is not in the pool.

    ``strides``: of ``key``, per token and head; of ``value``.
    """
    k, v, key, value = floats(k), floats(v), floats(key), floats(value)
    bt, heads = sizes[_BT], sizes[_KV_HEADS]
    for t in range(len(slots)):
        if slots[t] < 0 or slots[t] >= sizes[_BLOCKS] * bt:
            return False
    for t in range(len(slots)):
        block, token = slots[t] // bt, slots[t] % bt
        for h in range(heads):
            to = _U(block * sizes[_K] + token * sizes[_K + 1] + h * sizes[_K + 2])
            source = _U(t * strides[0] + h * strides[1])
            for i in range(_U(sizes[_DIM])):
                k[to + i] = key[source + i]
            to = _U(block * sizes[_V] + token * sizes[_V + 1] + h * sizes[_V + 2])
            source = _U(t * strides[2] + h * strides[3])
            for i in range(_U(sizes[_DIM_V])):
                v[to + i] = value[source + i]
    return True


@inlined
def _locate(at: Any, table: Any, entry: Any, first: Any, n: Any, sizes: Any, whole: Any) -> Any:
    """``at`` [2, n or more]: the places of K and V of n tokens, the last one repeated up to a multiple of ``whole``.

    False: an id is outside of the pool.
    """
    bt = sizes[_BT]
    column, offset = first // bt, first % bt
    if (first + n - 1) // bt >= table.shape[1]:
        return False
    t = 0
    while t < n:
        block = np.int64(table[entry, column])
        if block < 0 or block >= sizes[_BLOCKS]:
            return False
        stop = min(n, t + bt - offset)
        k, v = block * sizes[_K] + offset * sizes[_K + 1], block * sizes[_V] + offset * sizes[_V + 1]
        for i in range(t, stop):
            at[0, i] = k
            at[1, i] = v
            k += sizes[_K + 1]
            v += sizes[_V + 1]
        t, column, offset = stop, column + 1, 0
    while t % whole:
        at[0, t] = at[0, n - 1]
        at[1, t] = at[1, n - 1]
        t += 1
    return True


@inlined
def _read(k: Any, v: Any, at: Any, n: Any, sizes: Any) -> None:
    """Brings a tile's K and V into the core's cache: reads them in the order of memory, some tokens of each in turn."""
    for first in range(0, n, _RUN):
        end = min(first + _RUN, n)
        for t in range(first, end):
            for h in range(sizes[_KV_HEADS]):
                for i in range(0, sizes[_DIM], _LINE):
                    touch(k, _U(at[0, t] + h * sizes[_K + 2] + i))
        for t in range(first, end):
            for h in range(sizes[_KV_HEADS]):
                for i in range(0, sizes[_DIM_V], _LINE):
                    touch(v, _U(at[1, t] + h * sizes[_V + 2] + i))


@inlined_floats
def _score(scores: Any, query: Any, k: Any, at: Any, n: Any, sizes: Any) -> None:
    """``scores`` [heads, TILE] of a tile: four keys at a time, with two query heads if they share the keys."""
    heads, dim, stride = len(scores) // TILE, sizes[_DIM], sizes[_K + 2]
    group = heads // sizes[_KV_HEADS]
    step = 2 if group % 2 == 0 else 1
    for t in range(0, n, 4):
        for h in range(0, heads, step):
            head = h // group * stride
            k0, k1 = _U(at[0, t] + head), _U(at[0, t + 1] + head)
            k2, k3 = _U(at[0, t + 2] + head), _U(at[0, t + 3] + head)
            q = _U(h * dim)
            out = _U(h * TILE + t)
            s0, s1, s2, s3 = _F(0.0), _F(0.0), _F(0.0), _F(0.0)
            if step == 2:
                r0, r1, r2, r3 = _F(0.0), _F(0.0), _F(0.0), _F(0.0)
                p = q + _U(dim)
                for i in range(_U(dim)):
                    x, y = query[q + i], query[p + i]
                    a, b, c, d = k[k0 + i], k[k1 + i], k[k2 + i], k[k3 + i]
                    s0 += x * a
                    s1 += x * b
                    s2 += x * c
                    s3 += x * d
                    r0 += y * a
                    r1 += y * b
                    r2 += y * c
                    r3 += y * d
                scores[out + _U(TILE)] = r0
                scores[out + _U(TILE + 1)] = r1
                scores[out + _U(TILE + 2)] = r2
                scores[out + _U(TILE + 3)] = r3
            else:
                for i in range(_U(dim)):
                    x = query[q + i]
                    s0 += x * k[k0 + i]
                    s1 += x * k[k1 + i]
                    s2 += x * k[k2 + i]
                    s3 += x * k[k3 + i]
            scores[out] = s0
            scores[out + _U(1)] = s1
            scores[out + _U(2)] = s2
            scores[out + _U(3)] = s3


@inlined_floats
def _weigh(scores: Any, mean: Any, at: Any, state: Any, piece: Any, n: Any, softcap: Any, sizes: Any) -> None:
    """Scores become weights, 0 past the n-th; the piece's sums so far are rescaled to the greatest score."""
    dim, padded = sizes[_DIM_V], (n + 3) // 4 * 4
    for h in range(state.shape[1]):
        begin = _U(h * TILE)
        if softcap > 0:
            for t in range(_U(padded)):
                x = scores[begin + t]
                y = exp(_F(-2.0) * abs(x))
                y = softcap * (_F(1.0) - y) / (_F(1.0) + y)
                scores[begin + t] = -y if x < 0 else y
        top = state[piece, h, 0]
        a, b, c, d = top, top, top, top
        for t in range(0, n, 4):
            k = begin + _U(t)
            s0, s1, s2, s3 = scores[k], scores[k + _U(1)], scores[k + _U(2)], scores[k + _U(3)]
            a = s0 if s0 > a else a
            b = s1 if s1 > b else b
            c = s2 if s2 > c else c
            d = s3 if s3 > d else d
        a = b if b > a else a
        c = d if d > c else c
        top = c if c > a else a
        if top > state[piece, h, 0]:
            shrink = exp(state[piece, h, 0] - top)
            state[piece, h, 0] = top
            state[piece, h, 1] *= shrink
            out = _U(at + h * dim)
            for i in range(_U(dim)):
                mean[out + i] *= shrink
        total = _F(0.0)
        for t in range(_U(n)):
            weight = exp(scores[begin + t] - top)
            scores[begin + t] = weight
            total += weight
        state[piece, h, 1] += total
        for t in range(_U(n), _U(padded)):
            scores[begin + t] = _F(0.0)


@inlined_floats
def _mix(mean: Any, begin: Any, weights: Any, v: Any, at: Any, n: Any, sizes: Any) -> None:
    """Adds a tile's values, weighted, to the piece's ``mean``; as in ``_score``."""
    heads, dim, stride = len(weights) // TILE, sizes[_DIM_V], sizes[_V + 2]
    group = heads // sizes[_KV_HEADS]
    step = 2 if group % 2 == 0 else 1
    for t in range(0, n, 4):
        for h in range(0, heads, step):
            head = h // group * stride
            v0, v1 = _U(at[1, t] + head), _U(at[1, t + 1] + head)
            v2, v3 = _U(at[1, t + 2] + head), _U(at[1, t + 3] + head)
            w = _U(h * TILE + t)
            w0, w1, w2, w3 = weights[w], weights[w + _U(1)], weights[w + _U(2)], weights[w + _U(3)]
            out = _U(begin + h * dim)
            if step == 2:
                w += _U(TILE)
                x0, x1, x2, x3 = weights[w], weights[w + _U(1)], weights[w + _U(2)], weights[w + _U(3)]
                other = out + _U(dim)
                for i in range(_U(dim)):
                    a, b, c, d = v[v0 + i], v[v1 + i], v[v2 + i], v[v3 + i]
                    mean[out + i] += w0 * a + w1 * b + w2 * c + w3 * d
                    mean[other + i] += x0 * a + x1 * b + x2 * c + x3 * d
            else:
                for i in range(_U(dim)):
                    mean[out + i] += w0 * v[v0 + i] + w1 * v[v1 + i] + w2 * v[v2 + i] + w3 * v[v3 + i]


@jit_floats
def attend_pieces(
    means: Any,
    state: Any,
    query: Any,
    k: Any,
    v: Any,
    table: Any,
    pieces: Any,
    begin: Any,
    end: Any,
    sizes: Any,
    strides: Any,
    factors: Any,
    room: Any,
    at: Any,
) -> bool:
    """Computes pieces [begin, end): ``means`` [pieces, heads, Dv] flat, ``state`` [pieces, heads, 2]: top score, sum.

    ``strides``: of ``query``, per row and head. ``factors``: of the query, and the soft cap, 0 for none. ``room``
    float32 [heads * (D + TILE)] and ``at`` int64 [2, TILE]: scratch. False if the table names a block that is not in
    the pool, or does not reach.
    """
    query, k, v = floats(query), floats(k), floats(v)
    heads, dim, dim_v = state.shape[1], sizes[_DIM], sizes[_DIM_V]
    factor, softcap = _F(factors[0]), _F(factors[1])
    q, scores = room[: heads * dim], room[heads * dim :]
    tile = max(4, min(TILE, _NEAR // (sizes[_KV_HEADS] * (dim + dim_v)) // 4 * 4))
    for piece in range(begin, end):
        for h in range(heads):
            source, to = _U(pieces[piece, ROW] * strides[0] + h * strides[1]), _U(h * dim)
            for i in range(_U(dim)):
                q[to + i] = query[source + i] * factor
            state[piece, h, 0] = _LOWEST
            state[piece, h, 1] = _F(0.0)
        mean = piece * heads * dim_v
        for i in range(_U(mean), _U(mean + heads * dim_v)):
            means[i] = _F(0.0)
        for first in range(pieces[piece, FIRST], pieces[piece, END], tile):
            n = min(tile, pieces[piece, END] - first)
            if not _locate(at, table, pieces[piece, ENTRY], first, n, sizes, 4):
                return False
            _read(k, v, at, n, sizes)
            _score(scores, q, k, at, n, sizes)
            _weigh(scores, means, mean, state, piece, n, softcap, sizes)
            _mix(means, mean, scores, v, at, n, sizes)
    return True


@jit_floats
def merge_pieces(out: Any, means: Any, state: Any, pieces: Any, sinks: Any) -> None:
    """``out`` [T, heads, Dv] of the pieces' rows; ``sinks`` [heads or 0]: one more logit in each denominator."""
    heads, dim = out.shape[1], out.shape[2]
    begin = 0
    while begin < len(pieces):
        row, end = pieces[begin, ROW], begin + 1
        while end < len(pieces) and pieces[end, ROW] == row:
            end += 1
        for h in range(heads):
            top = sinks[h] if len(sinks) else _LOWEST
            for piece in range(begin, end):
                top = max(top, state[piece, h, 0])
            total = exp(sinks[h] - top) if len(sinks) else _F(0.0)
            for piece in range(begin, end):
                total += exp(state[piece, h, 0] - top) * state[piece, h, 1]
            for i in range(dim):
                out[row, h, i] = _F(0.0)
            for piece in range(begin, end):
                weight = exp(state[piece, h, 0] - top) / total
                for i in range(dim):
                    out[row, h, i] += weight * means[piece, h, i]
        begin = end
