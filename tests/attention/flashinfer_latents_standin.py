"""FlashInfer's kernels for latents (MLA) without a GPU, below its own ``BatchMLAPagedAttentionWrapper``.

As in flashinfer_standin.py only the compiled module is a stand-in. It computes in float64 what its arrays mean:

  - entry e has q_len queries of all heads; its keys are the first kv_len tokens of its pages, of page_size each;
  - a token's key is its latent beside its rotated key, and its value is its latent;
  - causal is aligned to the end of both;
  - what lies behind kv_len is not loaded. All before it is, whatever the mask says: weight 0 of a value that is not
    finite is not finite in the output;
  - of a tile of queries, the last tile of keys is found by rounding down. A wrapper that knows better refuses it.

A plan travels in the buffer of integers, which a captured kernel finds where it was, whatever is planned later.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MULTIPROCESSORS = 132
TILE_KEYS = 64
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CompiledLatents:
    """What a kernel module is compiled for."""

    kernels: str
    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype
    dtype_index: torch.dtype
    rank: int
    rotated: int
    profiler: bool


@dataclass
class Latents:
    """All plans and runs of these kernels so far."""

    modules: list[CompiledLatents] = field(default_factory=list)
    plans: list[SimpleNamespace] = field(default_factory=list)
    launches: list[SimpleNamespace] = field(default_factory=list)


class LatentModule:
    """A compiled kernel module: FlashInfer's own code calls ``plan_with_staged_workspace_bytes`` and ``run``."""

    def __init__(self, gpu: Any, compiled: CompiledLatents) -> None:
        if gpu.cannot_build(compiled):
            importlib.import_module("attention.flashinfer_standin").fail_to_build("nvcc not found")
        self._gpu, self._compiled = gpu, compiled
        gpu.latents.modules.append(compiled)

    def plan_with_staged_workspace_bytes(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        num_heads: int,
        rank: int,
        causal: bool,
    ) -> tuple[list[int], int]:
        """Queues the copy of a plan to the device, as FlashInfer's own Python around its planner does."""
        assert self._gpu.recorded is None, "a plan cannot be captured"
        for array in (qo_indptr, kv_indptr, kv_lens):
            assert array.dtype == torch.int32 and array.device.type == "cpu" and array.is_contiguous()
        assert rank == self._compiled.rank and pinned.shape == int_workspace.shape
        found = self._gpu.latents.plans
        rows = int(qo_indptr[-1]) * num_heads // len(kv_lens)
        found.append(
            SimpleNamespace(
                float_workspace=float_workspace,
                int_workspace=int_workspace,
                qo=qo_indptr.tolist(),
                kv=kv_indptr.tolist(),
                lens=kv_lens.tolist(),
                num_heads=num_heads,
                causal=causal,
                tile=128 if rows > 64 else 64,
            )
        )
        stamp = torch.tensor([len(found) - 1], dtype=torch.int64).view(torch.uint8)
        self._gpu.submit(lambda: int_workspace[:8].copy_(stamp))
        return [found[-1].tile], 8

    def run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: list[int],
        q_nope: Tensor,
        q_pe: Tensor,
        ckv: Tensor,
        kpe: Tensor,
        kv_indices: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        num_heads: int,
        page_size: int,
        sm_scale: float,
        base_e: bool,
        ckv_scale: float,
        kpe_scale: float,
        ckv_scale_arr: Tensor | None,
    ) -> None:
        """Queues the kernel."""
        compiled = self._compiled
        assert lse is None and ckv_scale_arr is None and not base_e
        assert q_nope.dtype == q_pe.dtype == compiled.dtype_q and out.dtype == compiled.dtype_o
        assert ckv.dtype == kpe.dtype == compiled.dtype_kv and kv_indices.dtype == torch.int32
        assert (q_nope.shape[1:], q_pe.shape[1:]) == ((num_heads, compiled.rank), (num_heads, compiled.rotated))
        assert (ckv.shape[1:], kpe.shape[1:]) == ((page_size, compiled.rank), (page_size, compiled.rotated))
        assert out.shape == q_nope.shape and (compiled.rank, compiled.rotated) == (512, 64)
        for x in (q_nope, q_pe, ckv, kpe, out):
            assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0
            assert all(s * x.element_size() % 16 == 0 and s < 2**32 for s in x.stride()[:-1])
        if compiled.dtype_kv.itemsize == 1:
            assert compiled.dtype_q is torch.bfloat16 and compiled.dtype_kv is torch.float8_e4m3fn
        launch = SimpleNamespace(
            compiled=compiled,
            int_workspace=int_workspace,
            mask_mode=mask_mode,
            scale=sm_scale,
            addresses=tuple(x.data_ptr() for x in (ckv, kpe, kv_indices)),
        )
        self._gpu.latents.launches.append(launch)

        def kernel() -> None:
            plan = self._gpu.latents.plans[int(int_workspace[:8].clone().view(torch.int64))]
            if plan.num_heads != num_heads or [plan.tile] != plan_info or plan.causal != bool(mask_mode):
                out.fill_(math.nan)  # the tiles of another plan
                return
            queries = torch.cat([q_nope, q_pe], -1)
            keys = ckv * ckv_scale if ckv_scale != 1 else ckv, kpe * kpe_scale if kpe_scale != 1 else kpe
            attend(queries, *keys, kv_indices, out, plan, sm_scale)

        self._gpu.submit(kernel)


def attend(
    queries: Tensor, ckv: Tensor, kpe: Tensor, kv_indices: Tensor, out: Tensor, plan: SimpleNamespace, scale: float
) -> None:
    """What the arrays mean, by brute force."""
    rank, page_size = ckv.shape[2], ckv.shape[1]
    for e, length in enumerate(plan.lens):
        ids = kv_indices[plan.kv[e] : plan.kv[e] + -(-length // page_size)].long()
        loaded = torch.cat([ckv[ids].double(), kpe[ids].double()], -1).flatten(0, 1)[:length]
        rows = queries[plan.qo[e] : plan.qo[e + 1]].double()
        n = len(rows)
        scores = torch.einsum("nhd,sd->nhs", rows, loaded) * scale
        i, j = torch.arange(n)[:, None] + length - n, torch.arange(length)[None, :]
        if plan.causal:
            scores = scores.masked_fill((j > i)[:, None], -math.inf)
            for end in range(plan.tile, n * plan.num_heads, plan.tile):
                whole = length - n + end // plan.num_heads  # keys that the tile's kernel counts
                last = -(-whole // TILE_KEYS) * TILE_KEYS
                scores.flatten(0, 1)[end - plan.tile : end, last:] = -math.inf
        out[plan.qo[e] : plan.qo[e + 1]] = torch.einsum("nhs,sr->nhr", scores.softmax(-1), loaded[:, :rank]).to(
            out.dtype
        )


class _Spec:
    """What FlashInfer builds and loads a module from."""

    def __init__(self, gpu: Any, compiled: CompiledLatents) -> None:
        self._gpu, self._compiled = gpu, compiled

    def build_and_load(self) -> LatentModule:
        return LatentModule(self._gpu, self._compiled)


def forget() -> None:
    """FlashInfer keeps no module that it has loaded."""
    importlib.import_module("flashinfer.mla._batch_mla._backends._fa_common").get_batch_mla_module.cache_clear()


def patch_in(patch: Any, gpu: Any, unpinned: Any) -> None:
    """FlashInfer's own code for latents finds a Hopper GPU, and these kernels."""
    common = importlib.import_module("flashinfer.mla._batch_mla._backends._fa_common")

    def generate(kernels: str, *args: Any) -> _Spec:
        compiled = CompiledLatents(kernels, *args)
        assert compiled.dtype_q in _DTYPES and compiled.dtype_index == torch.int32 and not compiled.profiler
        return _Spec(gpu, compiled)

    stand_ins = {
        "gen_batch_mla_module": generate,
        "get_compute_capability": lambda device: (9, 0),
        "is_sm90a_supported": lambda device: True,
        "get_device_sm_count": lambda device: MULTIPROCESSORS,
        "_get_fa_shared_memory_limits": lambda device: (233472, 232448),
        "torch": unpinned,
    }
    for name, stand_in in stand_ins.items():
        patch.setattr(common, name, stand_in)
    wrapper = importlib.import_module("flashinfer.mla._batch_mla._wrapper")
    patch.setattr(wrapper, "_get_compute_capability", lambda device: (9, 0))
