"""The Triton kernel of ``rope``: one program per token turns all of its heads, in float32, and rounds once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtier.attention.kernels.launch import launching_on


@triton.jit
def _turned(
    x, out, c1, c2, s1, s2, token, x_head, x_token, out_head, out_token, HEADS: tl.constexpr, HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, TILE_HEADS)[:, None]
    i = tl.arange(0, TILE)[None, :]
    mask = (head < HEADS) & (i < HALF)
    source = x + token * x_token + head * x_head + i
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out + token * out_token + head * out_head + i
    tl.store(target, (first * c1 - second * s1).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (second * c2 + first * s2).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rope(
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    q_head,
    q_token,
    k_head,
    k_token,
    q_out_head,
    q_out_token,
    k_out_head,
    k_out_token,
    cos_token,
    cos_angle,
    sin_token,
    sin_angle,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Grid (tokens,). ``SECOND``: the first angle of the second half."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)[None, :]
    cs = cos + token * cos_token + i * cos_angle
    ss = sin + token * sin_token + i * sin_angle
    c1 = tl.load(cs, mask=i < HALF, other=0.0).to(tl.float32)
    s1 = tl.load(ss, mask=i < HALF, other=0.0).to(tl.float32)
    c2 = tl.load(cs + SECOND * cos_angle, mask=i < HALF, other=0.0).to(tl.float32)
    s2 = tl.load(ss + SECOND * sin_angle, mask=i < HALF, other=0.0).to(tl.float32)
    # fmt: off
    _turned(q, q_out, c1, c2, s1, s2, token, q_head, q_token, q_out_head, q_out_token, Q_HEADS, HALF, Q_TILE, TILE)
    _turned(k, k_out, c1, c2, s1, s2, token, k_head, k_token, k_out_head, k_out_token, K_HEADS, HALF, K_TILE, TILE)
    # fmt: on


def launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [1, heads, tokens, size], turned, with a token's heads side by side in memory.

    ``cos`` and ``sin``: [1, tokens, size], or [1, tokens, size / 2] if both halves have the same angles.
    """
    tokens, size = q.shape[2:]
    outs = [x.new_empty(1, tokens, x.shape[1], size).transpose(1, 2) for x in (q, k)]
    strides = [stride for x in (q, k, *outs) for stride in x.stride()[1:3]]
    with launching_on(q):
        _rope[(tokens,)](
            q,
            k,
            cos,
            sin,
            *outs,
            *strides,
            *cos.stride()[1:],
            *sin.stride()[1:],
            Q_HEADS=q.shape[1],
            K_HEADS=k.shape[1],
            Q_TILE=triton.next_power_of_2(q.shape[1]),
            K_TILE=triton.next_power_of_2(k.shape[1]),
            HALF=size // 2,
            TILE=triton.next_power_of_2(size // 2),
            SECOND=size // 2 if cos.shape[2] == size else 0,
        )
    return outs[0], outs[1]
