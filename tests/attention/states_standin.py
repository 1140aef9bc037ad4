"""FlashInfer's kernels for recurrent states without a GPU: its own Python code, over stand-ins for what it compiles.

The installed package checks and routes as on a Hopper GPU. Only what it compiles is a stand-in, which checks what that
demands (types, strides, alignment), and computes in float64 what the arrays that reached it mean:

  - the delta rule: state[V, K] decays by exp(g), then learns beta (v - state k) k; queries and keys have length one;
  - a decode reads blocks ``source`` and writes blocks ``target``; a negative source is a row without a state;
  - a prompt's last state is a tensor of its own; chunks are of 64 tokens;
  - Mamba2: state decays by exp(dt A), then learns dt x B; ``dt`` has its bias and softplus.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .flashinfer_standin import Gpu

HOPPER = 9, 0


@dataclass
class Kernels:
    """The launches so far, by name, and what a planted mistake changes on their way."""

    launches: list[str] = field(default_factory=list)
    swapped: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda source, target: (source, target)


def check_rows(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.is_contiguous() and x.data_ptr() % 16 == 0


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token: state [HV, V, K], q and k [HV, K], v [HV, V], decay and beta [HV]; float64. Output and new state."""
    state = state * decay[:, None, None]
    learned = (v - torch.einsum("hvk,hk->hv", state, k)) * beta[:, None]
    state = state + learned[:, :, None] * k[:, None, :]
    return torch.einsum("hvk,hk->hv", state, q), state


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def decoding(gpu: Gpu, kernels: Kernels) -> Callable[..., None]:
    def run_pretranspose_decode(
        pool: Tensor,
        a_log: Tensor,
        a: Tensor,
        dt_bias: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        b: Tensor,
        output: Tensor,
        *sizes: Any,
        use_pool_indexing: bool,
        initial_state_indices: Tensor,
        output_state_indices: Tensor,
    ) -> None:
        rows, tokens, heads_k, heads_v, size_k, size_v, scale, l2norm = sizes
        assert use_pool_indexing and l2norm and tokens == 1 and (size_k, size_v) == (128, 128)
        assert pool.dtype == a_log.dtype == dt_bias.dtype == torch.float32 and output.dtype == torch.bfloat16
        assert pool.stride()[1:] == (size_v * size_k, size_k, 1) and pool.stride(0) % 4 == 0
        assert pool.data_ptr() % 16 == 0
        check_rows(q, k, v, a, b, output, initial_state_indices, output_state_indices)
        assert initial_state_indices.dtype == output_state_indices.dtype == torch.int32
        assert len(initial_state_indices) == len(output_state_indices) == rows
        kernels.launches.append("delta decode")

        def kernel() -> None:
            source, target = kernels.swapped(initial_state_indices, output_state_indices)
            read, copies = pool.double(), heads_v // heads_k
            for i in range(rows):
                decay = torch.exp(-torch.exp(a_log.double()) * F.softplus(a[i, 0].double() + dt_bias.double()))
                # As in the kernel, queries and keys are rounded to bfloat16 whatever they were.
                query, key = (unit(x[i, 0].bfloat16().double()).repeat_interleave(copies, 0) for x in (q, k))
                value = v[i, 0].bfloat16().double()
                beta = torch.sigmoid(b[i, 0].double())
                out, state = delta_step(read[int(source[i])], query * scale, key, value, decay, beta)
                output[i, 0] = out
                pool[int(target[i])] = state.float()

        gpu.submit(kernel)

    return run_pretranspose_decode


def prompts(gpu: Gpu, kernels: Kernels) -> Callable[..., None]:
    def chunk_gated_delta_rule_sm90(
        output: Tensor,
        output_state: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial_state: Tensor | None,
        alpha: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        checkpoints: Any,
        checkpoint_starts: Any,
        every: int,
        state_indices: Any,
    ) -> None:
        assert checkpoints is None and checkpoint_starts is None and every == 0 and state_indices is None
        assert alpha.dtype == beta.dtype == output_state.dtype == torch.float32 and q.shape[2] == v.shape[2] == 128
        check_rows(q, k, v, alpha, beta, output, output_state, cu_seqlens)
        assert cu_seqlens.tolist() == [0, len(q)] and output_state.shape[0] == 1
        if initial_state is not None:
            check_rows(initial_state)
            assert initial_state.dtype == torch.float32
        kernels.launches.append("delta prompt")

        def kernel() -> None:
            state = torch.zeros_like(output_state[0]).double() if initial_state is None else initial_state[0].double()
            copies = v.shape[1] // q.shape[1]
            for i in range(len(q)):
                query, key = (x[i].double().repeat_interleave(copies, 0) for x in (q, k))
                out, state = delta_step(state, query * scale, key, v[i].double(), alpha[i].double(), beta[i].double())
                output[i] = out
            output_state[0] = state

        gpu.submit(kernel)

    return chunk_gated_delta_rule_sm90


class MambaModule:
    """The compiled module of ``selective_state_update``."""

    def __init__(self, gpu: Gpu, kernels: Kernels) -> None:
        self._gpu, self._kernels = gpu, kernels

    def selective_state_update(self, *given: Any) -> None:
        pool, x, dt, rate, into, out_of, skip, *rest = given
        z, dt_bias, softplus, source_of, target_of, pad, scale, output, frozen, *more = rest
        assert z is None and scale is None and not frozen and softplus and pad == -1 and more[:4] == [None] * 4
        rows, heads, dim = x.shape
        groups, size = into.shape[1:]
        assert pool.shape[1:] == (heads, dim, size) and pool.stride()[1:] == (dim * size, size, 1)
        assert len(pool) >= rows and heads % groups == 0 and dim % 16 == 0 and pool.stride(0) * pool.itemsize % 16 == 0
        assert (x.stride()[1:], into.stride()[1:], out_of.stride()[1:]) == ((dim, 1), (size, 1), (size, 1))
        assert (
            dt.shape == x.shape
            and dt.stride()[1:] == (1, 0)
            and rate.stride() == (1, 0, 0)
            and rate.dtype == torch.float32
        )
        assert skip.stride() == dt_bias.stride() == (1, 0) and output.is_contiguous()
        assert skip.dtype == dt_bias.dtype == dt.dtype and x.dtype == into.dtype == out_of.dtype == output.dtype
        assert source_of.dtype == target_of.dtype == torch.int32 and len(source_of) == len(target_of) == rows
        for tensor in (x, into, out_of, pool):
            assert tensor.data_ptr() % 16 == 0
        self._kernels.launches.append("mamba2 decode")

        def kernel() -> None:
            source, target = self._kernels.swapped(source_of, target_of)
            read = pool.double()
            for i in range(rows):
                step = F.softplus(dt[i].double() + dt_bias.double())[..., None]
                learns, sees = (y[i].double().repeat_interleave(heads // groups, 0)[:, None] for y in (into, out_of))
                value = x[i].double()
                state = read[int(source[i])] * torch.exp(step * rate.double()) + step * value[..., None] * learns
                output[i] = (state * sees).sum(-1) + skip.double() * value
                pool[int(target[i])] = state.to(pool.dtype)

        self._gpu.submit(kernel)


@contextmanager
def states_on(gpu: Gpu, monkeypatch: Any) -> Iterator[Kernels]:
    """FlashInfer's functions for recurrent states, over stand-in kernels of a Hopper GPU."""
    kernels = Kernels()
    helper: Any = ModuleType("flashinfer.gdn_kernels.delta_rule_dsl.varlen_helper")
    helper.is_integer_dtype = lambda dtype: dtype in (torch.int32, torch.int64)
    helper.should_use_cp_host = lambda *_, **__: False
    norms: Any = ModuleType("flashinfer.gdn_kernels.qk_l2norm")
    norms.normalize_qk = lambda q, k: tuple(unit(x.double()).to(x.dtype) for x in (q, k))
    with monkeypatch.context() as patch:
        for module in (helper, norms):  # CuTe's, which is not installed here
            patch.setitem(sys.modules, module.__name__, module)
        decode, prefill = (importlib.import_module(f"flashinfer.gdn_{name}") for name in ("decode", "prefill"))
        importlib.import_module("flashinfer.mamba")
        patch.setattr(decode, "run_pretranspose_decode", decoding(gpu, kernels))
        for name, stand_in in {
            "chunk_gated_delta_rule_sm90": prompts(gpu, kernels),
            "get_compute_capability": lambda _: HOPPER,
            "get_device_sm_count": lambda _: 132,
            "get_device_name": lambda _: "H100",
            "is_cute_dsl_arch_supported": lambda *_: True,
        }.items():
            patch.setattr(prefill, name, stand_in)
        mamba = sys.modules["flashinfer.mamba.selective_state_update"]
        patch.setattr(mamba, "get_selective_state_update_module", lambda *_, **__: MambaModule(gpu, kernels))
        yield kernels
