"""A step's single queries on a CPU, attended to in place: torch tensors meet the compiled loops.

Owns       which tensors the loops take, and how pieces of work are spread over torch's number of threads.
Promises   no copy of K or V; results do not depend on the number of threads; with one thread, no pool is touched.
Does not   compute (``_decode_loops`` does), or know requests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.attention._decode_loops import (
    END,
    FIRST,
    PIECE,
    TILE,
    attend_pieces,
    merge_pieces,
    plan_pieces,
    write_slots,
)
from kvtier.errors import StepError
from kvtier.spec import Attention, Kind

_WORTH_A_THREAD = 1 << 21  # products of queries and keys, element by element: some 100 us
_NO_SINKS = np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class Decodes:
    """The entries of a step with one query: how many, and their keys in pieces, int64 [n, 4] (``_decode_loops``)."""

    entries: int
    pieces: npt.NDArray[np.int64]

    @classmethod
    def plan(cls, attention: Attention, query_start: Sequence[int], seq_lens: Sequence[int]) -> Decodes:
        """Those of a step with these rows and lengths."""
        starts, lens = np.asarray(query_start, np.int64), np.asarray(seq_lens, np.int64)
        room = np.empty((int(lens.sum()) // PIECE + len(lens), 4), np.int64)
        count = plan_pieces(room, starts, lens, attention.span_tokens, attention.kind is Kind.CHUNK)
        return cls(int((np.diff(starts) == 1).sum()), room[:count])


def takes(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the loops can work on these pools."""
    return (
        k_cache.dtype is torch.float32 is v_cache.dtype
        and k_cache.is_cpu
        and k_cache.stride(3) == 1 == v_cache.stride(3)
    )


def write(k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """K [T, Hkv, D] and V [T, Hkv, Dv] into their slots, int64 [T]. Raises ``StepError`` if one is not in the pool."""
    key, value = _rows(key), _rows(value)
    if key.shape[1:] != k_cache.shape[2:] or value.shape[1:] != v_cache.shape[2:]:
        raise StepError(f"keys {_shape(key)} and values {_shape(value)} do not fit the pool")
    if not len(key) == len(value) == len(slots):
        raise StepError(f"got {len(key)} keys, {len(value)} values and {len(slots)} slots")
    strides = np.array((*key.stride()[:2], *value.stride()[:2]))
    sizes = _sizes(key, k_cache, v_cache)
    if not write_slots(_flat(k_cache), _flat(v_cache), _flat(key), _flat(value), slots.numpy(), sizes, strides):
        raise StepError("the step's slot mapping names a block that is not in the pool")


def attend(
    out: Tensor,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    pieces: npt.NDArray[np.int64],
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Fills the rows of ``out`` float32 [T, Hq, Dv] that ``pieces`` name; other rows are left alone.

    Raises ``StepError`` if ``table`` does not reach, or names a block that is not in the pool.
    """
    query = _rows(query)
    if query.shape[1] % k_cache.shape[2] or query.shape[2] != k_cache.shape[3]:
        raise StepError(f"queries {_shape(query)} do not fit keys of {k_cache.shape[2]} x {k_cache.shape[3]}")
    if sinks is not None and len(sinks) != query.shape[1]:
        raise StepError(f"got {len(sinks)} sinks for {query.shape[1]} query heads")
    heads, dim, dim_v = query.shape[1], query.shape[2], v_cache.shape[3]
    means, state = np.empty(len(pieces) * heads * dim_v, np.float32), np.empty((len(pieces), heads, 2), np.float32)
    factors = np.array((scale, 0) if softcap is None else (scale / softcap, softcap), np.float32)
    sizes = _sizes(query, k_cache, v_cache)
    tensors = _flat(query), _flat(k_cache), _flat(v_cache), table.numpy()

    def compute(begin: int, end: int) -> bool:
        room, at = np.empty(heads * (dim + TILE), np.float32), np.empty((2, TILE), np.int64)
        return bool(attend_pieces(means, state, *tensors, pieces, begin, end, sizes, factors, room, at))

    if not all(_spread(compute, pieces, heads * (dim + dim_v))):
        raise StepError("the block table is too narrow, or names a block that is not in the pool")
    merge_pieces(out.numpy(), means, state, pieces, _NO_SINKS if sinks is None else sinks.detach().float().contiguous().numpy())


def _spread(compute: Any, pieces: npt.NDArray[np.int64], token_work: int) -> list[bool]:
    """``compute(begin, end)`` of all pieces, in shares of about equally many tokens for torch's number of threads."""
    threads = torch.get_num_threads()
    if threads == 1 or len(pieces) == 1:
        return [compute(0, len(pieces))]
    tokens = np.cumsum(pieces[:, END] - pieces[:, FIRST])
    threads = min(threads, len(pieces), int(tokens[-1]) * token_work // _WORTH_A_THREAD)
    if threads <= 1:
        return [compute(0, len(pieces))]
    ends = np.searchsorted(tokens, tokens[-1] * np.arange(1, threads) / threads)
    bounds = [0, *ends.tolist(), len(pieces)]
    others = [_workers(threads - 1, os.getpid()).submit(compute, *bounds[i : i + 2]) for i in range(1, threads)]
    return [compute(*bounds[:2]), *(other.result() for other in others)]


@lru_cache(maxsize=1)
def _workers(threads: int, _process: int) -> ThreadPoolExecutor:
    """Threads besides the one that calls; a process that was forked has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="kvtier-attention")


def _rows(x: Tensor) -> Tensor:
    """``x`` [T, H, D] float32, its innermost elements one after the other."""
    x = x.float()
    return x if x.stride(2) == 1 else x.contiguous()


def _shape(x: Tensor) -> str:
    return " x ".join(map(str, x.shape))


def _flat(x: Tensor) -> npt.NDArray[np.float32]:
    """The memory from the first element of ``x`` to its last."""
    size = 1
    for n, step in zip(x.shape, x.stride(), strict=True):
        size += (n - 1) * step
    flat: npt.NDArray[np.float32] = x.as_strided((size if x.numel() else 0,), (1,)).numpy()
    return flat


def _sizes(rows: Tensor, k_cache: Tensor, v_cache: Tensor) -> npt.NDArray[np.int64]:
    """``_decode_loops.Size`` of a call; ``rows`` [T, H, D] are its queries."""
    (blocks, block_tokens, kv_heads, dim), dim_v = k_cache.shape, v_cache.shape[3]
    strides = *rows.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]
    return np.array((rows.shape[1], kv_heads, dim, dim_v, blocks, block_tokens, *strides))
