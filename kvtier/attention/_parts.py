"""Softmax attention over a set of keys, in parts that merge by log-sum-exp.

Owns       the arithmetic: scores, soft cap, softmax, the merge of two parts, sinks.
Promises   parts over disjoint sets of keys merge to the attention over their union, in float32. Every key it is
           given must be finite, masked or not (0 * NaN is NaN).
Does not   know blocks, tables, requests or attention kinds.

A part is (out [B, Hq, n, Dv], lse [B, Hq, n]), float32. It is the softmax-weighted mean of the values, and the log of
the sum of exponentials it was divided by. On the CPU it comes from torch's flash kernel, in float32 whatever the pools
store. Half precision is not faster there, and bfloat16 scores of some hundreds would be off by one. The kernel has no
soft cap and crashes on zero keys. Elsewhere, and with a soft cap, score tiles are materialised.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Part = tuple[Tensor, Tensor]

_FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_LOG2E = 1 / math.log(2)
_ROWS, _KEYS = 512, 1024  # the most, per side of a materialised score tile


def has_flash(device: torch.device, softcap: float | None) -> bool:
    """Whether ``attend_part`` runs torch's fused CPU kernel."""
    return _FLASH is not None and device.type == "cpu" and softcap is None


def attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Part:
    """q [B, Hq, n, D] over k [B, Hkv, m, D] and v [B, Hkv, m, Dv], m > 0.

    Query head h reads KV head h // (Hq / Hkv). All float32, any strides. ``mask`` [B or 1, 1, n or 1, m] is added to
    the scores. -inf hides a key; no query may have all hidden. ``causal`` (n == m) lets query i see keys 0..i.
    """
    if not has_flash(q.device, softcap):
        return _tiled(q, k, v, scale, softcap, mask, causal)
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if head_dim != head_dim_v:  # the kernel wants equal sizes: zeros change neither scores nor the values kept
        q, k, v = (F.pad(x, (0, max(head_dim, head_dim_v) - x.shape[-1])) for x in (q, k, v))
    out, lse = _flash(q, k, v, scale, mask, causal)
    return out[..., :head_dim_v], lse


def merge(a: Part | None, b: Part) -> Part:
    """The part over the keys of both; ``a`` is consumed. Two parts without any visible key give zeros and -inf."""
    if a is None:
        return b
    weight = (b[1] - a[1]).nan_to_num_(0.0).sigmoid_()
    return a[0].lerp_(b[0], weight.unsqueeze(-1)), torch.logaddexp(a[1], b[1])


def add_sinks(part: Part, sinks: Tensor) -> Tensor:
    """``part``'s output with one more logit per query head, ``sinks`` [Hq], in the denominator only."""
    out, lse = part
    return out * torch.sigmoid(lse - sinks.float()[:, None]).unsqueeze(-1)


# --- torch's flash kernel ------------------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Part:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # the kernel assumes it, unchecked
    batch, heads, rows, _ = q.shape
    if batch > 1 or causal or mask is not None:
        out, lse = _FLASH(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    # One thread works on one row tile of one head; few heads need cutting, by rows or, for a few queries, by keys.
    pieces = _key_pieces(k.shape[1], rows, k.shape[2], torch.get_num_threads())
    if pieces > 1:
        k, v = (_cut(x, pieces) for x in (k, v))
        outs, lses = _FLASH(q.expand(pieces, -1, -1, -1), k, v, scale=scale)
        weights = torch.softmax(lses, 0).unsqueeze(-1)
        return (outs * weights).sum(0, keepdim=True), lses.logsumexp(0, keepdim=True)
    pieces = _row_pieces(heads, rows, torch.get_num_threads())
    out, lse = _FLASH(_cut(q, pieces), k.expand(pieces, -1, -1, -1), v.expand(pieces, -1, -1, -1), scale=scale)
    return out.transpose(0, 1).flatten(1, 2).unsqueeze(0), lse.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _cut(x: Tensor, pieces: int) -> Tensor:
    """[1, H, pieces * n, D] as a batch of pieces, [pieces, H, n, D], without a copy."""
    _, heads, rows, head_dim = x.shape
    return x.view(heads, pieces, rows // pieces, head_dim).transpose(0, 1)


def _row_tile(rows: int) -> int:
    """Queries that the kernel takes at a time."""
    return 256 if rows >= 768 else 64 if rows >= 192 else 32


@lru_cache(maxsize=1024)
def _row_pieces(heads: int, rows: int, threads: int) -> int:
    """The number of equal pieces of ``rows`` for threads to end together; small tiles run 8 % slower."""

    def cost(pieces: int) -> float:
        tile = _row_tile(rows // pieces)
        tiles = heads * pieces * math.ceil(rows / pieces / tile)
        return math.ceil(tiles / threads) * tile * (1.0 if tile == 256 else 1.08)

    return min((pieces for pieces in (1, 2, 3, 4, 6, 8, 12, 16) if rows % pieces == 0), key=cost)


def _key_pieces(kv_heads: int, rows: int, keys: int, threads: int) -> int:
    """The number of equal pieces of the keys of a few queries, so that every thread has a piece of 512 or more."""
    pieces = 1
    while kv_heads * math.ceil(rows / 32) * pieces < threads and keys % (2 * pieces) == 0 and keys >= 1024 * pieces:
        pieces *= 2
    return pieces


# --- materialised score tiles --------------------------------------------------------------------------------------


def _tiled(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, mask: Tensor | None, causal: bool
) -> Part:
    batch, heads, rows, _ = q.shape
    scores = 2**20 if q.device.type == "cpu" else 2**25  # at once; on a CPU they stay in its cache
    step = min(rows, _ROWS, max(64, scores // (heads * min(k.shape[2], _KEYS))))
    lot = max(1, scores // (heads * step * min(k.shape[2], _KEYS)))
    out, lse = q.new_empty(batch, heads, rows, v.shape[-1]), q.new_empty(batch, heads, rows)
    for b in range(0, batch, lot):
        for r in range(0, rows, step):
            part: Part | None = None
            r_end = min(r + step, rows)
            for c in range(0, r_end if causal else k.shape[2], _KEYS):
                keys = slice(c, min(c + _KEYS, r_end) if causal else c + _KEYS)
                hidden = _tile_mask(mask, q, causal, b, lot, slice(r, r_end), keys)
                tile = q[b : b + lot, :, r:r_end], k[b : b + lot, :, keys], v[b : b + lot, :, keys]
                part = merge(part, _dense(*tile, scale, softcap, hidden))
            assert part is not None
            out[b : b + lot, :, r:r_end], lse[b : b + lot, :, r:r_end] = part
    return out, lse


def _tile_mask(
    mask: Tensor | None, q: Tensor, causal: bool, b: int, lot: int, rows: slice, keys: slice
) -> Tensor | None:
    """The part of the mask that a tile needs, [b or 1, 1, n or 1, m]; None if it sees all."""
    if causal:
        if keys.stop <= rows.start + 1:
            return None
        hidden = q.new_full((1, 1, rows.stop - rows.start, keys.stop - keys.start), -math.inf)
        return hidden.triu_(rows.start - keys.start + 1)
    if mask is None:
        return None
    if mask.shape[0] > 1:
        mask = mask[b : b + lot]
    return mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys]


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, mask: Tensor | None) -> Part:
    """One tile, all scores at once. Powers of two: torch computes them several times faster than powers of e."""
    batch, heads, rows, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    q = (q * (scale * _LOG2E if softcap is None else scale / softcap)).reshape(batch * kv_heads, -1, q.shape[-1])
    scores = torch.bmm(q, k.reshape(batch * kv_heads, keys, -1).transpose(1, 2))
    if softcap is not None:
        scores.tanh_().mul_(softcap * _LOG2E)
    if mask is not None:
        scores.view(batch, heads, rows, keys).add_(mask)
    top = scores.amax(-1, keepdim=True).clamp_(min=-1e30)  # finite, also if the mask hides the whole tile
    total = scores.sub_(top).exp2_().sum(-1, keepdim=True)
    out = torch.bmm(scores, v.reshape(batch * kv_heads, keys, -1)).div_(total.clamp(min=1e-30))
    return out.view(batch, heads, rows, -1), (top + total.log2()).div_(_LOG2E).view(batch, heads, rows)
