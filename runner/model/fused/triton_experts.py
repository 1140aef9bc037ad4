"""The Triton kernels of ``experts``: pairs of token and expert in the experts' order, two products, a sum.

A decode step reads each weight once, so it takes as long as the memory needs for them. No pair is copied or padded: a
tile of rows finds its expert and its tokens by ``starts`` and ``order``. Sums go in a fixed order, without atomics.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.attention.kernels.launch import launching_on


class Act(IntEnum):
    """What is made of gate and up."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2
    """gpt-oss's: both are clamped, and up counts from 1."""


_PAIRS = 1024
"""Pairs that a program of ``_route`` looks at at once."""
_SUMMED = 1024


class Tiles(NamedTuple):
    """How a product is cut: rows and columns of a program's tile, the inner size of a step, warps, stages.

    ``inner`` is of 16 bits; of MXFP4 a step takes twice as much.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


class Cuts(NamedTuple):
    """The tiles of both products, for ``few`` rows of an expert (the memory is the limit) and for more."""

    few: tuple[Tiles, Tiles]
    many: tuple[Tiles, Tiles]


HOPPER = Cuts(
    (Tiles(16, 64, 128, 4, 4), Tiles(16, 128, 64, 8, 4)), (Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4))
)
SMALLER = Cuts((Tiles(16, 32, 64, 4, 4), Tiles(16, 64, 64, 4, 4)), (Tiles(64, 64, 32, 4, 3), Tiles(64, 128, 32, 4, 3)))
"""The tiles for chips with less shared memory: at most 48 KiB are used."""
MANY_ROWS = 8
"""Rows of an expert, on average, from which on larger tiles are as fast, and faster the more there are (H100)."""


@triton.jit
def _route(ids, order, starts, pairs, PAIRS: tl.constexpr):
    """A program per expert: where its pairs begin among all, and which they are, in ascending order."""
    expert = tl.program_id(0)
    place = 0
    at = 0
    while at < pairs:
        pair = at + tl.arange(0, PAIRS)
        there = tl.load(ids + pair, mask=pair < pairs, other=2147483647)
        place += tl.sum((there < expert).to(tl.int32))
        at += PAIRS
    tl.store(starts + expert, place)
    at = 0
    while at < pairs:
        pair = at + tl.arange(0, PAIRS)
        mine = (tl.load(ids + pair, mask=pair < pairs, other=2147483647) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine) - mine, pair, mask=mine != 0)
        place += tl.sum(mine)
        at += PAIRS
    tl.store(starts + expert + 1, place)  # as the next program stores it too


@triton.jit
def _tile(starts, tile, experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """A tile's expert (``experts``: there is none), its first row, and the row behind the expert's last."""
    e = tl.arange(0, EXPERTS)
    begin = tl.load(starts + e, mask=e < experts, other=0)
    end = tl.load(starts + e + 1, mask=e < experts, other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    behind = tl.cumsum(tiles)
    expert = tl.sum(((behind <= tile) & (e < experts)).to(tl.int32))
    mine = e == expert
    row = tl.sum(tl.where(mine, begin + (tile - behind + tiles) * ROWS, 0))
    return expert, row, tl.sum(tl.where(mine, end, 0))


@triton.jit
def _activated(gate, up, limit, alpha, ACT: tl.constexpr):
    if ACT == 0:
        return gate * tl.sigmoid(gate) * up
    if ACT == 1:  # tanh(z) = 2 sigmoid(2 z) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2 * inner) * up
    gate = tl.minimum(gate, limit)
    return (tl.minimum(tl.maximum(up, -limit), limit) + 1) * gate * tl.sigmoid(gate * alpha)


@triton.jit
def _product(
    xs, rows, weight, scales, expert, column, inner, columns, w_expert, w_inner, w_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, MXFP4: tl.constexpr,
):  # fmt: skip
    """Rows of x times an expert's weight, float32 [ROWS, COLUMNS]. ``xs``: x of the first step; ``rows``: which count.

    MXFP4 is masked by 32 numbers, which share a scale: so the compiler sees that 16 bytes can be copied at once.
    """
    k = tl.arange(0, INNER)
    there = column < columns
    of_expert = weight + expert.to(tl.int64) * w_expert
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if MXFP4:
        byte, part = tl.arange(0, INNER // 2), tl.arange(0, INNER // 32)
        ws = of_expert + byte[:, None] * w_inner + column[None, :] * w_column
        ss = scales + (expert.to(tl.int64) * (inner // 32) + part)[None, :] * columns + column[:, None]
        for at in range(0, inner, INNER):
            a = tl.load(xs, mask=(k + at < inner)[None, :] & rows[:, None], other=0.0)
            w = tl.load(ws, mask=(byte // 16 + at // 32 < inner // 32)[:, None] & there[None, :], other=0)
            s = tl.load(ss, mask=(part + at // 32 < inner // 32)[None, :] & there[:, None], other=0)
            acc = tl.dot_scaled(a, None, "bf16", w, s, "e2m1", acc)
            xs += INNER
            ws += INNER // 2 * w_inner
            ss += INNER // 32 * columns
    else:
        ws = of_expert + k[:, None] * w_inner + column[None, :] * w_column
        for at in range(0, inner, INNER):
            inside = k + at < inner
            a = tl.load(xs, mask=inside[None, :] & rows[:, None], other=0.0)
            w = tl.load(ws, mask=inside[:, None] & there[None, :], other=0.0)
            acc = tl.dot(a, w, acc, input_precision="ieee")
            xs += INNER
            ws += INNER * w_inner
    return acc


@triton.jit
def _up(
    x, weight, scales, bias, out, order, starts, experts, inner, columns, limit, alpha, x_row, w_expert, w_inner,
    w_column, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    EXPERTS: tl.constexpr, ACT: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, MXFP4: tl.constexpr,
):  # fmt: skip
    """Gate and up of a tile, activated: out [pairs, columns] in the experts' order. ``columns``: of one of them."""
    expert, first, end = _tile(starts, tl.program_id(1), experts, ROWS, EXPERTS)
    if expert < experts:
        row = first + tl.arange(0, ROWS)
        token = tl.load(order + row, mask=row < end, other=0) // TOP_K
        k = tl.arange(0, INNER)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        xs = x + token[:, None].to(tl.int64) * x_row + k[None, :]
        if INTERLEAVED:
            both = tl.program_id(0) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)
            acc = _product(
                xs, row < end, weight, scales, expert, both, inner, 2 * columns, w_expert, w_inner, w_column,
                ROWS, 2 * COLUMNS, INNER, MXFP4,
            )  # fmt: skip
            if BIAS:
                b = tl.load(bias + expert * 2 * columns + both, mask=both < 2 * columns, other=0.0)
                acc += b.to(tl.float32)[None, :]
            gate, up = tl.split(tl.reshape(acc, (ROWS, COLUMNS, 2)))
        else:
            tl.static_assert(not MXFP4)
            ws = weight + expert.to(tl.int64) * w_expert + k[:, None] * w_inner + column[None, :] * w_column
            us = ws + columns * w_column
            gate = tl.zeros((ROWS, COLUMNS), tl.float32)
            up = tl.zeros((ROWS, COLUMNS), tl.float32)
            for at in range(0, inner, INNER):
                inside = k + at < inner
                a = tl.load(xs, mask=inside[None, :] & (row < end)[:, None], other=0.0)
                mask = inside[:, None] & (column < columns)[None, :]
                gate = tl.dot(a, tl.load(ws, mask=mask, other=0.0), gate, input_precision="ieee")
                up = tl.dot(a, tl.load(us, mask=mask, other=0.0), up, input_precision="ieee")
                xs += INNER
                ws += INNER * w_inner
                us += INNER * w_inner
            if BIAS:
                bs = bias + expert * 2 * columns + column
                gate += tl.load(bs, mask=column < columns, other=0.0).to(tl.float32)[None, :]
                up += tl.load(bs + columns, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        y = _activated(gate, up, limit, alpha, ACT)
        target = out + row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])


@triton.jit
def _down(
    x, weight, scales, bias, share, out, order, starts, experts, inner, columns, w_expert, w_inner, w_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, BIAS: tl.constexpr,
    MXFP4: tl.constexpr,
):  # fmt: skip
    """Down of a tile, times each pair's share of its token: out [pairs, columns] in the tokens' order."""
    expert, first, end = _tile(starts, tl.program_id(1), experts, ROWS, EXPERTS)
    if expert < experts:
        row = first + tl.arange(0, ROWS)
        k = tl.arange(0, INNER)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        xs = x + row[:, None].to(tl.int64) * inner + k[None, :]
        acc = _product(
            xs, row < end, weight, scales, expert, column, inner, columns, w_expert, w_inner, w_column,
            ROWS, COLUMNS, INNER, MXFP4,
        )  # fmt: skip
        if BIAS:
            acc += tl.load(bias + expert * columns + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        pair = tl.load(order + row, mask=row < end, other=0)
        acc *= tl.load(share + pair, mask=row < end, other=0.0).to(tl.float32)[:, None]
        target = out + pair[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < columns)[None, :])


@triton.jit
def _sum(x, out, columns, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """A token's experts, in the order of its router."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(TOP_K):
        acc += tl.load(x + (token * TOP_K + i) * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, acc.to(out.dtype.element_ty), mask=column < columns)


class Weights(NamedTuple):
    """An expert layer's: ``up`` [experts, inner, 2 x middle] and ``down`` [experts, middle, outer], any strides.

    ``interleaved``: gate and up take turns in the columns of ``up``; else gate comes first. Biases are contiguous.
    With scales, uint8 [experts, inner / 32, columns] and contiguous, they are MXFP4: uint8 with two numbers along the
    inner size in a byte; x is bfloat16, and gate and up are interleaved.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    act: Act
    interleaved: bool
    limit: float = 0.0
    alpha: float = 0.0
    up_scales: Tensor | None = None
    down_scales: Tensor | None = None


def launch(weights: Weights, cuts: Cuts, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """Output [tokens, outer] of x [tokens, inner]; ``ids`` and ``shares`` [tokens, k], contiguous as ``x``."""
    tokens, top_k = ids.shape
    experts, _, both = weights.up.shape
    inner, middle, outer = x.shape[1], both // 2, weights.down.shape[2]
    pairs = tokens * top_k
    for_up, for_down = cuts.many if pairs >= MANY_ROWS * experts else cuts.few
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    activated, parts = x.new_empty(pairs, middle), x.new_empty(pairs, outer)
    out = x.new_empty(tokens, outer)
    packed = weights.up_scales is not None
    same: dict[str, Any] = {"EXPERTS": triton.next_power_of_2(experts), "MXFP4": packed}
    with launching_on(x):
        _route[(experts,)](ids, order, starts, pairs, PAIRS=min(_PAIRS, triton.next_power_of_2(pairs)))
        cut, grid = _cut(for_up, middle, pairs, experts, packed)
        _up[grid](
            x,
            weights.up,
            weights.up_scales,
            weights.up_bias,
            activated,
            order,
            starts,
            experts,
            inner,
            middle,
            weights.limit,
            weights.alpha,
            x.stride(0),
            *weights.up.stride(),
            TOP_K=top_k,
            ACT=int(weights.act),
            INTERLEAVED=weights.interleaved,
            BIAS=weights.up_bias is not None,
            **cut,
            **same,
        )
        cut, grid = _cut(for_down, outer, pairs, experts, packed)
        _down[grid](
            activated,
            weights.down,
            weights.down_scales,
            weights.down_bias,
            shares,
            parts,
            order,
            starts,
            experts,
            middle,
            outer,
            *weights.down.stride(),
            BIAS=weights.down_bias is not None,
            **cut,
            **same,
        )
        _sum[(tokens, triton.cdiv(outer, _SUMMED))](parts, out, outer, TOP_K=top_k, COLUMNS=_SUMMED)
    return out


def _cut(
    tiles: Tiles, columns: int, pairs: int, experts: int, packed: bool = False
) -> tuple[dict[str, Any], tuple[int, int]]:
    """A product's options, and its grid: tiles of columns by at most so many tiles of rows."""
    rows = min(pairs, pairs // tiles.rows + experts)
    options = {
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "INNER": tiles.inner * (1 + packed),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    return options, (triton.cdiv(columns, tiles.columns), rows)
