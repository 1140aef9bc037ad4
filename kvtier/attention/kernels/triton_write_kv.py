"""The Triton kernel of ``write_kv``: one program per token and tile of heads.

e4m3 is rounded in integers, to nearest even. So it gives the same bits on every GPU and in Triton's interpreter. The
interpreter's own cast loses the carry from mantissa to exponent (3.7 to 3.9, seen).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.attention.kernels.launch import launching_on

_TILE = 2048
"""Elements of K (and of V) that a program holds at once."""


@triton.jit
def to_e4m3(x):
    """The bits of float32 ``x`` as e4m3, uint8: nearest even, saturating at 448 (0x43E00000); NaN keeps its sign."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, 0x43E00000)  # floats above zero are ordered by their bits
    normal = (clamped - 0x3C000000 + 0x7FFFF + ((clamped >> 20) & 1)) >> 20
    # Below 2**-6 the steps are 2**-9, and so are the steps of floats from 2**14 (0x46800000) on: an addition rounds.
    tiny = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    rounded = tl.where(clamped < 0x3C800000, tiny, normal)
    rounded = tl.where(magnitude > 0x7F800000, 0x7F, rounded)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _put(
    cache,
    new,
    scales,
    token,
    block,
    offset,
    usable,
    first_head,
    cache_block,
    cache_token,
    cache_head,
    new_token,
    new_head,
    new_dim,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One token's row of one tile of heads, to slot ``offset`` of ``block``; nothing unless ``usable``."""
    heads = first_head + tl.arange(0, TILE_HEADS)
    dims = tl.arange(0, TILE_DIM)
    mask = (heads < tl.where(usable, HEADS, 0))[:, None] & (dims < DIM)[None, :]
    source = new + token.to(tl.int64) * new_token + heads[:, None].to(tl.int64) * new_head + dims[None, :] * new_dim
    x = tl.load(source, mask=mask, other=0.0)
    if QUANTIZE:
        x = x.to(tl.float32)
        if SCALED:
            x = tl.div_rn(x, tl.load(scales + heads, mask=heads < HEADS, other=1.0)[:, None])
        x = to_e4m3(x)
    row = block * cache_block + offset * cache_token
    tl.store(cache + row + heads[:, None] * cache_head + dims[None, :], x, mask=mask)


@triton.jit
def write_kv_kernel(
    k_cache,
    v_cache,
    key,
    value,
    slot_mapping,
    k_scale,
    v_scale,
    slots,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    key_token,
    key_head,
    key_dim,
    value_token,
    value_head,
    value_dim,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    TILE_DIM_V: tl.constexpr,
    QUANTIZE: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
):
    """Grid (tokens, tiles of heads). Strides in elements; ``slots``: of the whole pool, the null block's included."""
    token = tl.program_id(0)
    first_head = tl.program_id(1) * TILE_HEADS
    slot = tl.load(slot_mapping + token)
    usable = (slot >= BLOCK_TOKENS) & (slot < slots)
    block = slot // BLOCK_TOKENS
    offset = slot % BLOCK_TOKENS
    # fmt: off
    _put(k_cache, key, k_scale, token, block, offset, usable, first_head, k_block, k_token, k_head,
         key_token, key_head, key_dim, HEADS, DIM, TILE_HEADS, TILE_DIM, QUANTIZE, K_SCALED)
    _put(v_cache, value, v_scale, token, block, offset, usable, first_head, v_block, v_token, v_head,
         value_token, value_head, value_dim, HEADS, DIM_V, TILE_HEADS, TILE_DIM_V, QUANTIZE, V_SCALED)
    # fmt: on


def launch(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """``write_kv`` on a device; the tensors are as ``write_kv`` has checked them."""
    tokens, heads, dim = key.shape
    dim_v = value.shape[2]
    if not tokens or not heads:
        return
    quantized = k_cache.dtype is torch.float8_e4m3fn
    if quantized:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    else:
        key, value = key.to(k_cache.dtype), value.to(v_cache.dtype)
    tile_dim, tile_dim_v = triton.next_power_of_2(dim), triton.next_power_of_2(dim_v)
    tile_heads = min(triton.next_power_of_2(heads), max(1, _TILE // max(tile_dim, tile_dim_v)))
    with launching_on(k_cache):
        write_kv_kernel[(tokens, triton.cdiv(heads, tile_heads))](
            k_cache,
            v_cache,
            key,
            value,
            slot_mapping,
            k_scale,
            v_scale,
            k_cache.shape[0] * k_cache.shape[1],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *key.stride(),
            *value.stride(),
            BLOCK_TOKENS=k_cache.shape[1],
            HEADS=heads,
            DIM=dim,
            DIM_V=dim_v,
            TILE_HEADS=tile_heads,
            TILE_DIM=tile_dim,
            TILE_DIM_V=tile_dim_v,
            QUANTIZE=quantized,
            K_SCALED=k_scale is not None,
            V_SCALED=v_scale is not None,
        )
