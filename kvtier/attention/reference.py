"""Paged attention in plain torch, on any device.

Owns       reading K and V through block tables, and writing them through slot mappings.
Promises   unseen content never reaches the output, be it NaN: the null block, stale tails, tokens before a window. The
           arithmetic is float32, whatever the pools store. 90k tokens of context need no [queries, keys] matrix.
Does not   decide where blocks lie, or know requests.

``_plan`` cuts a step into work, ``_parts`` computes it; here it meets the pools.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier.attention import _decode
from kvtier.attention._decode import InPlace
from kvtier.attention._parts import Part, add_sinks, attend_part, has_flash, merge
from kvtier.attention._plan import Bands, Geometry, Keys, Singles, Span, Work
from kvtier.attention.fp8 import fold_output, fold_query, quantize, widen
from kvtier.geometry.kinds import Attention
from kvtier.geometry.spec import GroupSpec
from kvtier.machine.errors import StepError

_TILE_BYTES = {"cpu": 2 << 20}  # of float32 K read at once: on a CPU, K and V tiles stay in the cache
_TILE_BYTES_ELSEWHERE = 64 << 20

Kernel = Callable[..., Part]  # attend_part, but for the tensors and the mask


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """One step of one group, built once and used by every layer of the group.

    ``query_start`` [R + 1] and ``seq_lens`` [R]: entry r's queries are the rows query_start[r] to query_start[r + 1] of
    the step. They are the last of its seq_lens[r] tokens. ``block_table`` int64 [R, W]: logical block j of entry r; not
    read if the mask does not look there. ``slot_mapping`` int64 [T]: the slot of each new token's K and V.
    """

    attention: Attention
    block_tokens: int
    query_start: list[int] | tuple[int, ...]
    seq_lens: list[int] | tuple[int, ...]
    block_table: Tensor
    slot_mapping: Tensor
    _plans: dict[tuple[int, int, bool], list[Work]] = field(default_factory=dict, init=False, repr=False)
    _scratch: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_step(cls, step: Any, group: GroupSpec, device: torch.device | str) -> PagedBatch:
        """``group``'s part of a scheduled step. Copies its arrays: the batch outlives the step's arrays."""
        view = step.group(group.name)
        seq_lens = step.seq_lens.tolist()
        width = -(-max(seq_lens, default=0) // group.block_tokens)
        return cls(
            attention=group.attention,
            block_tokens=group.block_tokens,
            query_start=step.query_start.tolist(),
            seq_lens=seq_lens,
            block_table=torch.from_numpy(np.array(view.block_table[:, :width], np.int64)).to(device),
            slot_mapping=torch.from_numpy(np.array(view.slot_mapping, np.int64)).to(device),
        )

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Block id and offset in it of every new token, int64 [T] each."""
        return self.slot_mapping // self.block_tokens, self.slot_mapping % self.block_tokens

    @cached_property
    def in_place(self) -> InPlace:
        """The step, for the loops on a CPU."""
        return InPlace(self.attention, self.query_start, self.seq_lens, self.block_table, self.slot_mapping)

    def plan(self, tile_tokens: int, band_queries: int, in_place: bool = False) -> list[Work]:
        """The step's work, planned at the first layer that asks; if ``in_place``, without what loops compute."""
        key = tile_tokens, band_queries, in_place
        if key not in self._plans:
            geometry = Geometry(self.attention, self.block_tokens, self.query_start, self.seq_lens, self.block_table)
            self._plans[key] = geometry.plan(tile_tokens, band_queries, self.in_place.taken if in_place else None)
        return self._plans[key]


def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    batch: PagedBatch,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Puts K [T, Hkv, D] and V [T, Hkv, Dv] of the step's new tokens into their slots, and nothing elsewhere.

    ``k_cache`` and ``v_cache``: a layer's views [blocks, block_tokens, Hkv, D or Dv] of the pool. Values are cast to
    its dtype; in float8 they are first divided by the scales, float32 [Hkv]. Raises ``StepError`` if T is not the
    step's.
    """
    _check_rows(batch, key)
    if k_scale is None is v_scale and _decode.takes(k_cache, v_cache):
        batch.in_place.write(k_cache, v_cache, key, value)
        return
    with torch.no_grad():
        _raw(k_cache)[batch.slots] = _raw(quantize(key, k_scale, k_cache.dtype))
        _raw(v_cache)[batch.slots] = _raw(quantize(value, v_scale, v_cache.dtype))


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention of ``query`` [T, Hq, D] to the content of its entries' blocks; returns [T, Hq, Dv] in query's dtype.

    Call it after ``write_kv``. ``softcap`` c turns a score s into c * tanh(s / c). ``sinks`` [Hq] adds a logit per
    query head to the softmax's denominator, without a value. Values of float8 pools are multiplied by ``k_scale`` and
    ``v_scale`` [Hkv]. Raises ``StepError`` if T is not the step's.
    """
    _check_rows(batch, query)
    out: Tensor | None = None
    in_place = k_scale is None is v_scale and _decode.takes(k_cache, v_cache)
    if in_place and batch.in_place.queries:
        out = batch.in_place.attend(query, k_cache, v_cache, scale=scale, softcap=softcap, sinks=sinks)
        out = out if query.dtype is torch.float32 else out.to(query.dtype)
        if batch.in_place.queries == query.shape[0]:
            return out
    kernel = partial(attend_part, scale=scale, softcap=softcap)
    works = batch.plan(*_plan_sizes(k_cache, v_cache, batch.attention, softcap), in_place)
    return _attend(works, out, query, Reader(k_cache, v_cache, batch._scratch), kernel, sinks, k_scale, v_scale)


def attend_latent(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    attend: Callable[..., Tensor] = attend,
) -> Tensor:
    """Attention of ``query`` [T, Hq, r + p] to latents and rotated keys; returns mixed latents [T, Hq, r].

    They are in query's dtype. ``k_cache`` [blocks, block_tokens, 1, r] has the latents, ``v_cache`` [..., p] the
    rotated keys: together they are a token's key, and the latent is its value, too. Scales of float8 pools are float32
    [1]. ``attend`` is what attends to them, and raises.
    """
    rank, dtype = k_cache.shape[3], query.dtype
    if k_scale is not None and v_scale is not None:
        query = torch.cat([query[..., :rank].float() * k_scale, query[..., rank:].float() * v_scale], -1)
    rows = _rows(k_cache, v_cache)
    out = attend(query, rows, rows[..., :rank], batch, scale=scale)
    return out if k_scale is None else (out * k_scale).to(dtype)


def _rows(k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Latent and rotated key of each token, side by side as they lie in a pool; of other pools a copy."""
    rank, size = k_cache.shape[3], v_cache.shape[3]
    beside = k_cache.data_ptr() + rank * k_cache.element_size() == v_cache.data_ptr()
    if beside and k_cache.stride() == v_cache.stride() and k_cache.stride(2) == rank + size:
        return k_cache.as_strided((*k_cache.shape[:3], rank + size), k_cache.stride(), k_cache.storage_offset())
    return torch.cat([_raw(k_cache), _raw(v_cache)], -1).view(k_cache.dtype)


@torch.no_grad()
def _attend(
    works: list[Work],
    out: Tensor | None,
    query: Tensor,
    reader: Reader,
    kernel: Kernel,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """The result of ``attend``; ``out`` already has the rows that no work covers."""
    q = fold_query(query.float(), k_scale)
    for work in works:
        part = _compute(work, q[work.rows], reader, kernel)
        mixed = part[0] if sinks is None else add_sinks(part, sinks)
        rows = fold_output(mixed.transpose(1, 2).reshape(-1, q.shape[1], mixed.shape[-1]), v_scale).to(query.dtype)
        if len(rows) == len(query):
            return rows.contiguous()  # families take views of it
        out = query.new_empty(len(query), *rows.shape[1:]) if out is None else out
        out[work.rows] = rows
    return query.new_empty(0, q.shape[1], reader.value_dim) if out is None else out


def _raw(x: Tensor) -> Tensor:
    """8-bit values as bytes, which can be indexed on every device; other dtypes as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _check_rows(batch: PagedBatch, rows: Tensor) -> None:
    if rows.shape[0] != batch.query_start[-1]:
        raise StepError(f"got {len(rows)} tokens for a step of {batch.query_start[-1]}")


def _plan_sizes(k_cache: Tensor, v_cache: Tensor, attention: Attention, softcap: float | None) -> tuple[int, int]:
    """``PagedBatch.plan``'s arguments: keys to read at once, and queries in a window's tile."""
    tile_bytes = _TILE_BYTES.get(k_cache.device.type, _TILE_BYTES_ELSEWHERE)
    token_bytes = 4 * k_cache.shape[2] * max(k_cache.shape[3], v_cache.shape[3])
    # The fused kernel is as fast on small tiles; a window's materialised scores like them larger.
    small = has_flash(k_cache.device, softcap)
    return max(1024, tile_bytes // token_bytes), 32 if small else max(32, min(128, attention.span_tokens // 4))


def _compute(work: Work, q: Tensor, kv: Reader, kernel: Kernel) -> Part:
    """A part [B, Hq, n, Dv] whose B * n are the rows of q [rows, Hq, D], in order."""
    match work:
        case Span():
            return _span(work, q, kv, kernel)
        case Bands():
            return _bands(work, q, kv, kernel)
        case Singles():
            return _singles(work, q, kv, kernel)


def _span(work: Span, q: Tensor, kv: Reader, kernel: Kernel) -> Part:
    """On the past, no mask tells apart the query heads of a KV head: they are rows of one product."""
    queries, heads, head_dim = q.shape
    q = q.transpose(0, 1).contiguous()
    part: Part | None = None
    for keys in work.past:
        k, v = (_heads_first(x) for x in kv.read(keys))
        part = merge(part, kernel(q.view(1, k.shape[1], -1, head_dim), k, v))
    if part is not None:
        part = part[0].reshape(1, heads, queries, -1), part[1].reshape(1, heads, queries)
    if work.own is not None:
        k, v = (_heads_first(x) for x in kv.read(work.own))
        part = merge(part, kernel(q.unsqueeze(0), k, v, causal=True))
    assert part is not None
    return part


def _bands(work: Bands, q: Tensor, kv: Reader, kernel: Kernel) -> Part:
    """The tiles' ranges of keys overlap in memory; none is copied."""
    k, v = (x.unfold(0, work.width, work.queries).transpose(2, 3) for x in kv.read(work.keys))
    tiles = q.reshape(-1, work.queries, *q.shape[1:]).transpose(1, 2)
    return kernel(tiles, k, v, mask=work.mask, causal=work.mask is None)


def _singles(work: Singles, q: Tensor, kv: Reader, kernel: Kernel) -> Part:
    """The query heads of a KV head are rows of one product, as in ``_span``."""
    k, v = (x.transpose(1, 2) for x in kv.read_padded(work.blocks, work.hidden))
    out, lse = kernel(q.reshape(len(q), k.shape[1], -1, q.shape[-1]), k, v, mask=work.mask)
    return out.reshape(*q.shape[:2], 1, -1), lse.reshape(*q.shape[:2], 1)


def _heads_first(x: Tensor) -> Tensor:
    """[m, H, D] as [1, H, m, D]."""
    return x.transpose(0, 1).unsqueeze(0)


class Reader:
    """A layer's K and V [blocks, block_tokens, Hkv, D], read as float32.

    The result of a read is overwritten by the next. Reads share the batch's ``scratch``, because on a CPU fresh memory
    costs more than the copy into it.
    """

    def __init__(self, k_cache: Tensor, v_cache: Tensor, scratch: dict[tuple[int, torch.dtype], Tensor]) -> None:
        self._caches = k_cache, v_cache
        self.value_dim = v_cache.shape[3]
        self._scratch = scratch

    def read(self, keys: Keys) -> tuple[Tensor, Tensor]:
        """K and V [tokens, Hkv, D] of consecutive tokens, without the rest of their blocks."""
        tokens = slice(keys.skip, keys.skip + keys.tokens)
        return self._gather(0, keys.blocks)[tokens], self._gather(1, keys.blocks)[tokens]

    def blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [n, block_tokens, Hkv, D] of ``blocks`` [n]."""
        k, v = (self._gather(which, blocks) for which in (0, 1))
        return k.view(len(blocks), -1, *k.shape[1:]), v.view(len(blocks), -1, *v.shape[1:])

    def read_padded(self, blocks: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [B, n * block_tokens, Hkv, D] of ``blocks`` [B, n], zeros in the slots ``hidden``."""
        k, v = (self._gather(which, blocks.flatten()).index_fill_(0, hidden, 0) for which in (0, 1))
        return k.view(len(blocks), -1, *k.shape[1:]), v.view(len(blocks), -1, *v.shape[1:])

    def _gather(self, which: int, blocks: Tensor) -> Tensor:
        """Whole blocks of K (0) or V (1), float32 [n * block_tokens, Hkv, D]."""
        cache = self._caches[which]
        shape, raw = (len(blocks), *cache.shape[1:]), _raw(cache)
        rows = torch.index_select(raw, 0, blocks, out=self._room(which, raw.dtype, shape)).view(cache.dtype)
        if cache.dtype.itemsize == 1:
            rows = widen(rows, self._room(which, torch.float32, shape), self._room(which, torch.int16, shape))
        elif cache.dtype is not torch.float32:
            rows = self._room(which, torch.float32, shape).copy_(rows)
        return rows.flatten(0, 1)

    def _room(self, which: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        room = self._scratch.get((which, dtype))
        if room is None or room.numel() < size:
            room = self._scratch[which, dtype] = torch.empty(size, dtype=dtype, device=self._caches[which].device)
        return room[:size].view(shape)
