"""Float32 pools on a CPU: K and V are written, and queries that see few keys attend to them, in place.

Owns       which pools the compiled loops take, and how pieces of work are spread over torch's number of threads.
Promises   no copy of K or V; results do not depend on the number of threads; with one thread, no other is started.
Does not   compute (``_decode_loops`` does), or know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.attention._decode_loops import (
    END,
    FEW,
    FIRST,
    PIECE,
    TILE,
    attend_pieces,
    merge_pieces,
    plan_pieces,
    write_slots,
)
from kvtier.attention.workers import in_shares
from kvtier.geometry.kinds import Attention, Kind
from kvtier.machine.errors import StepError

Ints = npt.NDArray[np.int64]

_WORTH_A_THREAD = 1 << 21  # products of elements: some 100 us
_NO_SINKS: npt.NDArray[np.float32] = np.empty(0, np.float32)


def takes(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the loops can work on these pools."""
    floats = k_cache.dtype is torch.float32 is v_cache.dtype
    return floats and k_cache.is_cpu and k_cache.stride(3) == 1 == v_cache.stride(3)


class Pools:
    """A layer's K and V [blocks, block_tokens, Hkv, D or Dv] for the loops: addresses, sizes and strides."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        self.tensors = k_cache, v_cache
        self.k, self.v = k_cache.data_ptr(), v_cache.data_ptr()
        k, v = k_cache.shape, v_cache.shape
        self.sizes = _sizes(k, v, k_cache.stride(), v_cache.stride())
        self.kv_heads, self.dim, self.dim_v = k[2], k[3], v[3]


@lru_cache(maxsize=64)
def _sizes(k: torch.Size, v: torch.Size, k_strides: tuple[int, ...], v_strides: tuple[int, ...]) -> Ints:
    """``Size`` of pools of these shapes and strides. Loops read it."""
    if v[:3] != k[:3]:
        raise StepError(f"K {_shape(k)} and V {_shape(v)} are no pools of the same blocks")
    return np.array((*k, v[3], *k_strides[:3], *v_strides[:3]))


class InPlace:
    """One step of one group on a CPU, as in ``PagedBatch``."""

    def __init__(
        self,
        attention: Attention,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        starts, lens = np.array(query_start, np.int64), np.array(seq_lens, np.int64)
        self._table: Ints = np.ascontiguousarray(block_table.numpy(), np.int64)
        self._slots: Ints = np.ascontiguousarray(slot_mapping.numpy(), np.int64)
        self._last: Pools | None = None
        if len(self._table) != len(lens) or len(starts) != len(lens) + 1:
            raise StepError(f"got {len(self._table)} rows of a block table for {len(lens)} entries")
        most = int(starts[-1]) + sum(seq_lens) // PIECE + len(lens) * (FEW // PIECE)
        room = np.empty((most, 4), np.int64)
        self.taken = np.empty(len(lens), np.bool_)
        """[entries], whether they are computed here: those with one query, or little work."""
        chunked = attention.kind is Kind.CHUNK
        self.queries, pieces = plan_pieces(room, self.taken, starts, lens, attention.span_tokens, chunked)
        """How many queries they have."""
        self._pieces: Ints = room[:pieces]

    def pools(self, k_cache: Tensor, v_cache: Tensor) -> Pools:
        """A layer that has written attends to the same pools."""
        if self._last is None or self._last.tensors[0] is not k_cache or self._last.tensors[1] is not v_cache:
            self._last = Pools(k_cache, v_cache)
        return self._last

    def write(self, k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor) -> None:
        """K [T, Hkv, D] and V [T, Hkv, Dv] into their slots. Raises ``StepError`` if they do not fit the pools."""
        pools = self.pools(k_cache, v_cache)
        key, value = _rows(key), _rows(value)
        if key.shape[1:] != k_cache.shape[2:] or value.shape[1:] != v_cache.shape[2:]:
            raise StepError(f"keys {_shape(key)} and values {_shape(value)} do not fit the pool")
        if not key.shape[0] == value.shape[0] == len(self._slots):
            raise StepError(f"got {key.shape[0]} keys, {value.shape[0]} values and {len(self._slots)} slots")
        strides = *key.stride()[:2], *value.stride()[:2]
        if not write_slots(pools.k, pools.v, key.data_ptr(), value.data_ptr(), self._slots, pools.sizes, strides):
            raise StepError("the step's slot mapping names a block that is not in the pool")

    def attend(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[T, Hq, Dv] float32 of ``query`` [T, Hq, D]; only the rows of ``taken`` are filled.

        Raises ``StepError`` if they do not fit, or the table does not reach or names a block that is not in the pool.
        """
        pools, pieces = self.pools(k_cache, v_cache), self._pieces
        query = _rows(query)
        rows, heads, dim = query.shape
        if heads % pools.kv_heads or dim != pools.dim:
            raise StepError(f"queries {_shape(query)} do not fit keys of {pools.kv_heads} x {pools.dim}")
        if sinks is not None and sinks.shape[0] != heads:
            raise StepError(f"got {sinks.shape[0]} sinks for {heads} query heads")
        means = np.empty((len(pieces), heads, pools.dim_v), np.float32)
        state = np.empty((len(pieces), heads, 2), np.float32)
        cap = 0.0 if softcap is None else float(softcap)
        factors = (float(scale) / cap if cap else float(scale), cap)
        strides = query.stride()[:2]

        def compute(begin: int, end: int) -> bool:
            room, at = np.empty(heads * (dim + TILE), np.float32), np.empty((2, TILE), np.int64)
            arrays = means.reshape(-1), state, query.data_ptr(), pools.k, pools.v, self._table, pieces
            return bool(attend_pieces(*arrays, begin, end, pools.sizes, strides, factors, room, at))

        if not spread(compute, pieces, heads * (dim + pools.dim_v)):
            raise StepError("the block table is too narrow, or names a block that is not in the pool")
        out = torch.empty(rows, heads, pools.dim_v)
        extra = _NO_SINKS if sinks is None else sinks.detach().float().contiguous().numpy()
        merge_pieces(out.numpy(), means, state, pieces, extra)
        return out


def spread(compute: Callable[[int, int], bool], pieces: Ints, token_work: int) -> bool:
    """``compute(begin, end)`` of all pieces, in shares of about equally many tokens for torch's number of threads."""
    threads = min(torch.get_num_threads(), len(pieces))
    if threads > 1:
        tokens = np.cumsum(pieces[:, END] - pieces[:, FIRST])
        threads = min(threads, int(tokens[-1]) * token_work // _WORTH_A_THREAD)
    if threads <= 1:
        return compute(0, len(pieces))
    shares = np.searchsorted(tokens, tokens[-1] * np.arange(1, threads) / threads).tolist()
    return in_shares(compute, [0, *shares, len(pieces)])


def _rows(x: Tensor) -> Tensor:
    """``x`` [T, H, D] float32, its innermost elements one after the other."""
    if x.dtype is torch.float32 and x.stride(2) == 1 and not x.is_neg():
        return x
    x = x.float().resolve_neg()
    return x if x.stride(2) == 1 else x.contiguous()


def _shape(x: Tensor | torch.Size) -> str:
    return " x ".join(map(str, x if isinstance(x, torch.Size) else x.shape))
