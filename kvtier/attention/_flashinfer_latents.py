"""FlashInfer's kernels for latents (MLA): what one of their wrappers is made, planned and run for.

Owns       the sizes and heads that these kernels compute, and the input of their plans.
Promises   latents and rotated keys are read where they lie, as two views. Heads that do not divide a tile of queries
           are padded: with others, kernels and plans of 0.7.2 round a tile's last key differently.
Does not   absorb weights (runner/model/latents.py), or know steps.

``BatchMLAPagedAttentionWrapper`` makes new buffers for its integers at each plan, but on the device for captured steps.
It copies them by torch, which keeps them until that is done. Its kernels have no window, no soft cap, no sinks, and no
switch that keeps the keys of a query on one thread block.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvtier.attention._flashinfer_plan import INT_WORKSPACE_BYTES, GraphBuffers, Indices
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import GroupSpec
from kvtier.machine.errors import ConfigError

LATENT_DIMS = (512, 64)
"""Sizes of a latent and a rotated key that are computed; of 8 bits, FlashInfer has no others."""
MOST_HEADS = 128
MOST_WORK = 16384
"""Tiles of queries, and parts of their keys, that one plan has room for."""
_TILE = 128
"""Rows of two thread blocks: query heads of consecutive tokens. Steps of few rows an entry use one, of half as many."""
_STAGED_BYTES = 1 << 20
_HALF = (torch.float16, torch.bfloat16)


class LatentKey(NamedTuple):
    """A key (``Key``) of layers with latents of size ``rank`` and rotated keys of size ``rotated``."""

    group: str
    block_tokens: int
    num_heads: int
    rank: int
    rotated: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    kernels: str
    """FlashInfer's name of them: "fa2" or "fa3"."""

    @property
    def int_bytes(self) -> tuple[int, int]:
        """As in ``Key``. While one of a ring of two is planned again, a third is held."""
        return INT_WORKSPACE_BYTES * 3 // 2 + 2 * _STAGED_BYTES, INT_WORKSPACE_BYTES + _STAGED_BYTES

    def make(self, library: Any, workspace: Tensor, buffers: GraphBuffers | None) -> Any:
        """As in ``Key``. Of ``buffers`` the last is given the lengths of entries."""
        options: dict[str, Any] = {"backend": self.kernels}
        if buffers is not None:
            options |= {
                "use_cuda_graph": True,
                "qo_indptr": buffers.qo_indptr,
                "kv_indptr": buffers.kv_indptr,
                "kv_indices": buffers.kv_indices,
                "kv_len_arr": buffers.kv_last_page_len,
            }
        return library.BatchMLAPagedAttentionWrapper(workspace, **options)

    def plan(self, wrapper: Any, indices: Indices, split_kv: bool) -> None:
        """As in ``Key``; keys of a query are always split as the load of the batch asks for."""
        pages = indices.kv_indptr.diff() - 1
        mla = importlib.import_module("flashinfer.mla")
        wrapper.plan(
            metadata=mla.MLAPlanMetadata.csr(
                qo_indptr=indices.qo_indptr,
                kv_indptr=indices.kv_indptr,
                kv_indices=indices.kv_indices,
                kv_len_arr=pages * self.block_tokens + indices.kv_last_page_len,
            ),
            num_heads=self.num_heads,
            head_dim_ckv=self.rank,
            head_dim_kpe=self.rotated,
            page_size=self.block_tokens,
            causal=True,
            sm_scale=self.scale,
            q_data_type=self.q_dtype,
            kv_data_type=self.kv_dtype,
            kv_cache_layout="split",
        )

    def run(self, wrapper: Any, query: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor) -> None:
        """As in ``Key``. Scales of 8-bit values are folded into ``query`` and the output by the caller."""
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if self.kv_dtype.itemsize == 1 else {}
        wrapper.run(query=query, kv_cache=(k[:, :, 0], v[:, :, 0]), out=out, **scales)

    def described(self) -> str:
        """As in ``Key``."""
        return (
            f"latents of {self.rank} with rotated keys of {self.rotated}, {self.num_heads} heads, {self.q_dtype}, "
            f"pools in {self.kv_dtype}"
        )


def cannot_run_latents(
    group: GroupSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    capability: tuple[int, int] | None,
    *,
    heads: int = 1,
    batch_invariant: bool = False,
) -> str | None:
    """Why FlashInfer's kernels cannot attend to this group's latents; None if they can.

    ``dtype``: of queries; ``kv_dtype``: of the pools; ``heads``: of queries; ``capability``: of the device.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in _HALF:
        return f"it computes in float16 and bfloat16, not {name}; load the model with dtype='bfloat16'"
    if group.head_dims != LATENT_DIMS:
        return "it computes latents of {} with rotated keys of {}, not {} with {}".format(
            *LATENT_DIMS, *group.head_dims
        )
    if group.attention.kind is Kind.WINDOW:
        return "it has no kernel for latents in a sliding window"
    if heads > MOST_HEADS:
        return f"it computes up to {MOST_HEADS} query heads over latents, not {heads}"
    if batch_invariant:
        return "its kernels for latents split the keys of a query by the load of the batch; leave batch_invariant out"
    if kv_dtype.itemsize == 1:
        if kv_dtype is not torch.float8_e4m3fn or dtype is not torch.bfloat16 or (capability or (0, 0))[0] != 9:
            return (
                "over latents in 8 bits it computes e4m3, for models in bfloat16, on Hopper (compute capability 9.0), "
                f"not {str(kv_dtype).removeprefix('torch.')} for {name}"
            )
    elif kv_dtype is not dtype:
        return f"over latents in {str(kv_dtype).removeprefix('torch.')} it computes in the same dtype, not in {name}"
    return None


def by_rows(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Pools [blocks, block_tokens, 1, r or p] as pages of one row each, [N, 1, 1, r or p], that overlap in memory.

    The row of a slot is its block times the first number plus its place in the block times the second.
    """
    blocks, tokens = k.shape[:2]
    if k.stride()[:2] != v.stride()[:2]:
        raise ConfigError(f"latents have strides {k.stride()} and rotated keys {v.stride()}; rows need equal ones")
    apart = math.gcd(*k.stride()[:2])
    every = k.stride(0) // apart, k.stride(1) // apart
    count = (blocks - 1) * every[0] + (tokens - 1) * every[1] + 1
    if count >= 2**31:
        raise ConfigError(f"a pool of {blocks:,} blocks has {count:,} rows; FlashInfer counts them in 31 bits")
    strides = apart, apart, apart, 1
    rows, turned = (x.as_strided((count, 1, 1, x.shape[3]), strides, x.storage_offset()) for x in (k, v))
    return rows, turned, every


def padded_heads(heads: int) -> int:
    """The number of query heads to compute with: a divisor of a tile's rows, or of those of two."""
    return 1 << (heads - 1).bit_length()


def most_work(heads: int, tokens: int, rows: int, multiprocessors: int) -> int:
    """The most work of a step of this many tokens and entries: it must not be above ``MOST_WORK``."""
    return -(-tokens * padded_heads(heads) // _TILE) + 2 * rows + multiprocessors


def latent_workspace_bytes(rank: int, multiprocessors: int) -> int:
    """The bytes for partial results: two of a tile's halves for each multiprocessor, with their log-sum-exp."""
    return multiprocessors * _TILE * (2 * rank + 4) + 32
