"""Compiled loops of the exact attention: of each query alone, and of the sums between products.

Owns       the arithmetic of softmax over a split of the text, float32: soft cap, weights, their sum, merges, sinks.
Promises   a query's bits depend on itself, its keys and its position. They do not depend on the rows beside it, nor on
           where a step, a hit or a chunk begins. Scores and mixed values are chains of fused multiply-adds, in the
           order of dimensions and of tokens. A hidden token adds nothing to a chain: left out, it changes no bit.
Does not   import torch, or know requests.

The text is cut into splits of ``SPLIT`` tokens, from token 0 on. The part of a split that a query sees is a piece. A
piece leaves its greatest score, the sum of its weights (exponentials of scores less the greatest) and the weighted sum
of values. ``merge`` adds pieces up in the order of the text. Scores come from ``score`` or from a product, weighted
sums from ``mix`` or from a product. All else has one entry here, which both ways use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.attention._decode_loops import END, ENTRY, FIRST, PIECE, ROW, Size, _locate, cut
from kvtier.machine.loops.chains import HEADS, KEYS, chains
from kvtier.machine.loops.exponential import exp
from kvtier.machine.loops.jit import floats, jit, jit_chains, jit_floats, prefetch

SPLIT = PIECE
"""512 tokens. oneDNN sums no more than that in one chain."""
TILE = 64
"""Tokens of which weights are added up at once; a divisor of ``SPLIT``."""
_LINE = 16  # floats in a cache line
_U = np.uint64
_F = np.float32
_LOWEST = _F(-np.inf)
_KV_HEADS, _DIM, _DIM_V = map(int, (Size.KV_HEADS, Size.DIM, Size.DIM_V))
_K, _V = int(Size.K_BLOCK), int(Size.V_BLOCK)


@jit
def plan(pieces: Any, query_start: Any, seq_lens: Any, chosen: Any, span: Any, chunked: Any) -> int:
    """Fills ``pieces`` [n, 4] for the queries of the ``chosen`` entries, bool [entries]; returns n.

    ``span`` and ``chunked``: as in ``cut``.
    """
    count = 0
    for entry in range(len(seq_lens)):
        rows = query_start[entry + 1] - query_start[entry]
        if not chosen[entry]:
            continue
        for i in range(rows):
            end = seq_lens[entry] - rows + i + 1
            count = cut(pieces, count, query_start[entry] + i, entry, end, span, chunked, True)
    return count


@jit
def score(scores: Any, query: Any, k: Any, table: Any, pieces: Any, sizes: Any, room: Any, at: Any) -> bool:
    """``scores`` [pieces, heads, SPLIT] of ``pieces`` [n, 4], at the tokens' places in their split.

    ``query`` [T, heads, D] is scaled. ``room`` float32 [HEADS * (D + KEYS)], ``at`` int64 [2, SPLIT + KEYS]: scratch.
    False if the table names a block that is not in the pool, or does not reach.
    """
    k, heads, dim = floats(k), scores.shape[1], sizes[_DIM]
    group = heads // sizes[_KV_HEADS]
    q, out = room[: HEADS * dim], room[HEADS * dim :]
    for piece in range(len(pieces)):
        first = pieces[piece, FIRST]
        n, to, row = pieces[piece, END] - first, first % SPLIT, pieces[piece, ROW]
        if not _locate(at, table, pieces[piece, ENTRY], first, n, sizes, KEYS):
            return False
        for kv_head in range(sizes[_KV_HEADS]):
            stride = kv_head * sizes[_K + 2]
            for t in range((n + KEYS - 1) // KEYS * KEYS):
                at[0, t] += stride
            for begin in range(0, group, HEADS):
                count = min(HEADS, group - begin)
                head = kv_head * group + begin
                for h in range(HEADS):
                    for i in range(dim):
                        q[HEADS * i + h] = query[row, head + h, i] if h < count else _F(0.0)
                for t in range(0, n, KEYS):
                    for ahead in range(t + KEYS, min(t + 2 * KEYS, n)):
                        for i in range(0, dim, _LINE):
                            prefetch(k, _U(at[0, ahead] + i))
                    chains(out, q, 0, k, at[0], t, dim)
                    for h in range(count):
                        for j in range(min(KEYS, n - t)):
                            scores[piece, head + h, to + t + j] = out[HEADS * j + h]
            for t in range((n + KEYS - 1) // KEYS * KEYS):
                at[0, t] -= stride
    return True


@jit_floats
def weigh(scores: Any, state: Any, bounds: Any, softcap: Any) -> None:
    """Scores [n, heads, W] become weights; ``state`` [n, heads, 2]: the greatest score, and the sum of weights.

    Piece i of n sees the columns ``bounds`` [i, 0] to [i, 1]; the weights of all others are 0. W is a multiple of
    ``TILE``, and column 0 a multiple of it in the text. ``softcap``: 0 for none.
    """
    width = scores.shape[2]
    for i in range(scores.shape[0]):
        first, end = bounds[i, 0], bounds[i, 1]
        begin, stop = first // TILE * TILE, (end + TILE - 1) // TILE * TILE
        for h in range(scores.shape[1]):
            row = scores[i, h]
            for t in range(begin):
                row[t] = _F(0.0)
            for t in range(stop, width):
                row[t] = _F(0.0)
            top = _LOWEST
            for at in range(begin, stop, TILE):
                tile = row[at : at + TILE]
                if softcap > 0:
                    for t in range(TILE):
                        x = tile[t]
                        y = exp(_F(-2.0) * abs(x))
                        y = softcap * (_F(1.0) - y) / (_F(1.0) + y)
                        tile[t] = -y if x < 0 else y
                if at < first or at + TILE > end:
                    for t in range(TILE):
                        tile[t] = tile[t] if first <= at + t and at + t < end else _LOWEST
                best = _LOWEST
                for t in range(TILE):
                    best = max(best, tile[t])
                top = max(top, best)
            total = _F(0.0)
            for at in range(begin, stop, TILE):
                tile = row[at : at + TILE]
                part = _F(0.0)
                for t in range(TILE):
                    weight = exp(tile[t] - top)
                    tile[t] = weight
                    part += weight
                total += part
            state[i, h, 0] = top
            state[i, h, 1] = total


@jit_chains
def mix(mixed: Any, weights: Any, v: Any, table: Any, pieces: Any, sizes: Any, at: Any) -> bool:
    """``mixed`` [pieces, heads, Dv]: values weighted with ``weights`` [pieces, heads, SPLIT]; else as ``score``."""
    v, heads, dim, stride = floats(v), mixed.shape[1], sizes[_DIM_V], sizes[_V + 2]
    group = heads // sizes[_KV_HEADS]
    for piece in range(len(pieces)):
        first = pieces[piece, FIRST]
        n, to = pieces[piece, END] - first, first % SPLIT
        if not _locate(at, table, pieces[piece, ENTRY], first, n, sizes, KEYS):
            return False
        for h in range(heads):
            for i in range(dim):
                mixed[piece, h, i] = _F(0.0)
        even = n // 4 * 4
        for t in range(0, even, 4):
            for h in range(heads):
                head = h // group * stride
                v0, v1 = _U(at[1, t] + head), _U(at[1, t + 1] + head)
                v2, v3 = _U(at[1, t + 2] + head), _U(at[1, t + 3] + head)
                w0, w1 = weights[piece, h, to + t], weights[piece, h, to + t + 1]
                w2, w3 = weights[piece, h, to + t + 2], weights[piece, h, to + t + 3]
                for i in range(_U(dim)):
                    mixed[piece, h, i] = (
                        ((mixed[piece, h, i] + w0 * v[v0 + i]) + w1 * v[v1 + i]) + w2 * v[v2 + i]
                    ) + w3 * v[v3 + i]
        for t in range(even, n):
            for h in range(heads):
                place, w = _U(at[1, t] + h // group * stride), weights[piece, h, to + t]
                for i in range(_U(dim)):
                    mixed[piece, h, i] += w * v[place + i]
    return True


@jit_floats
def merge(sums: Any, state: Any, mixed: Any, of: Any, rows: Any, head: Any) -> None:
    """Adds pieces to their rows, one after the other: ``sums`` [T, H, Dv] and ``state`` [T, H, 2].

    ``mixed`` [n, heads, Dv] and ``of`` [n, heads, 2] are the pieces', of the heads from ``head`` on; ``rows`` [n].
    """
    for i in range(len(rows)):
        row = rows[i]
        for h in range(of.shape[1]):
            old, new = state[row, head + h, 0], of[i, h, 0]
            top = max(old, new)
            a, b = exp(old - top), exp(new - top)
            state[row, head + h, 0] = top
            state[row, head + h, 1] = a * state[row, head + h, 1] + b * of[i, h, 1]
            for j in range(sums.shape[2]):
                sums[row, head + h, j] = a * sums[row, head + h, j] + b * mixed[i, h, j]


@jit_floats
def finish(sums: Any, state: Any, sinks: Any) -> None:
    """``sums`` [T, H, Dv] become means; ``sinks`` [H or 0]: one more logit in each denominator."""
    for row in range(sums.shape[0]):
        for h in range(sums.shape[1]):
            top, factor, total = state[row, h, 0], _F(1.0), state[row, h, 1]
            if len(sinks):
                new = max(top, sinks[h])
                factor = exp(top - new)
                total = factor * total + exp(sinks[h] - new)
            factor /= total
            for i in range(sums.shape[2]):
                sums[row, h, i] *= factor
