"""FlashInfer without a GPU: its own Python code, over kernels written from its documentation.

The installed package plans and runs as it does on a GPU: its signatures bind our arguments, its ``plan`` turns index
arrays into what a kernel reads, its ``run`` routes by strides and drops what a kernel has no parameter for. Only the
compiled module at the bottom is a stand-in. It checks what the kernels demand (types, strides, alignment), and computes
in float64 what the arrays that reached it mean:

  - entry e has qo_indptr[e+1] - qo_indptr[e] queries; its keys are on its pages, page_size on each but the last;
  - causal is aligned to the end of both; a window lets through query - key <= window_left;
  - a window and a soft cap act only in a module that was compiled with them;
  - a sink is one more logit in the denominator, in the module compiled with it;
  - fa3 takes no graph, no window and one type and size of heads, and has no switch for the split of keys;
  - of a head, whole strips are loaded: 64 numbers in 16 bits, 128 in 8 bits, but 64 in 8 bits where V's heads are 64;
  - a window's keys are loaded from the first query's first key on, and what is loaded but masked has weight 0: not
    finite there is not finite in the output.

Kernels for latents are in flashinfer_latents_standin.py.

The stream runs as late as it may: a copy or kernel runs when somebody waits for a moment behind it, or at ``drain``.
"""

from __future__ import annotations

import importlib
import inspect
import math
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attention import flashinfer_latents_standin as latents
from attention.flashinfer_latents_standin import Latents

CAUSAL, NHD = 1, 0
_PLAN_ARGS = (
    "float_workspace",
    "int_workspace",
    "pinned",
    "qo_indptr",
    "kv_indptr",
    "kv_lens",
    "total_rows",
    "batch_size",
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "cuda_graph",
    "head_dim_qk",
    "head_dim_vo",
    "causal",
    "window_left",
    "fixed_split_size",
    "disable_split_kv",
    "num_colocated_ctas",
    "uniform_q_len",
)


@dataclass(frozen=True)
class Compiled:
    """What a kernel module is compiled for."""

    uri: str
    dtype_q: torch.dtype
    dtype_kv: torch.dtype
    dtype_o: torch.dtype
    dtype_index: torch.dtype
    head_dim_qk: int
    head_dim_vo: int
    window: bool
    softcap: bool
    sinks: bool
    kernels: str = "fa2"


@dataclass
class Launch:
    """One run as it reached the kernel."""

    compiled: Compiled
    plan: SimpleNamespace
    window_left: int
    scale: float
    softcap: float
    sinks: Tensor | None


@dataclass
class Gpu:
    """A stream of queued work, and all plans and runs so far."""

    late: bool = True
    """False: everything runs at once, for models whose next layer reads the output on the CPU."""
    recorded: list[Callable[[], None]] | None = None
    """Where a graph that is being captured keeps its kernels; None: none is."""
    plans: list[SimpleNamespace] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    modules: list[Compiled] = field(default_factory=list)
    latents: Latents = field(default_factory=Latents)
    """Those of kernels for latents."""
    cannot_build: Callable[[Any], bool] = lambda compiled: False
    wrong: Callable[[Launch], bool] = lambda launch: False
    """Of which launches the output is 2 % too large."""
    waits: int = 0
    """Waits that found work undone."""
    _queue: list[Callable[[], None]] = field(default_factory=list)
    _ran: int = 0

    def submit(self, work: Callable[[], None]) -> None:
        if self.recorded is not None:
            self.recorded.append(work)
            with _disable_current_modes():
                work()
            return
        self._queue.append(work)
        if not self.late:
            self.drain()

    def drain(self, until: int | None = None) -> None:
        """Runs what is queued, up to a point."""
        end = len(self._queue) if until is None else until
        while self._ran < end:
            self._ran += 1
            self._queue[self._ran - 1]()

    def stop(self) -> None:
        """What is queued never runs: whoever waits for it, when a test has ended, does not run kernels."""
        self._ran = len(self._queue)

    def moment(self, device: Any = None) -> Moment:
        return Moment(self)


class Moment:
    """A CUDA event."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._at = gpu, 0

    def record(self) -> None:
        self._at = len(self._gpu._queue)

    def synchronize(self) -> None:
        self._gpu.waits += self._at > self._gpu._ran
        self._gpu.drain(self._at)


class Module:
    """A compiled kernel module: FlashInfer's own code calls ``plan`` and ``paged_run``."""

    def __init__(self, gpu: Gpu, compiled: Compiled) -> None:
        if gpu.cannot_build(compiled):
            fail_to_build("nvcc not found")
        self._gpu, self._compiled = gpu, compiled
        gpu.modules.append(compiled)

    def ragged_run(self, *args: Any) -> None:
        raise AssertionError("paged batches only")

    def plan(self, *args: Any) -> list[int]:
        """Fills the pinned buffer and queues its copy, as the C++ scheduler does."""
        assert self._gpu.recorded is None, "a plan cannot be captured"
        fast = self._compiled.kernels == "fa3"
        names = _PLAN_ARGS[:16] if fast else _PLAN_ARGS
        plan = SimpleNamespace(**dict(zip(names, args, strict=True)), number=len(self._gpu.plans))
        if fast:
            sizes = plan.head_dim_qk, self._compiled.dtype_q
            assert sizes == (plan.head_dim_vo, self._compiled.dtype_kv)
            assert plan.window_left == -1 and not plan.cuda_graph
        for array in (plan.qo_indptr, plan.kv_indptr, plan.kv_lens):
            assert array.dtype == torch.int32 and array.device.type == "cpu" and array.is_contiguous()
        assert plan.num_qo_heads % plan.num_kv_heads == 0
        assert (plan.head_dim_qk, plan.head_dim_vo) == (self._compiled.head_dim_qk, self._compiled.head_dim_vo)
        assert plan.batch_size == len(plan.qo_indptr) - 1 == len(plan.kv_lens)
        assert (plan.window_left >= 0) == self._compiled.window
        for workspace in (plan.float_workspace, plan.int_workspace):
            assert workspace.data_ptr() % 16 == 0
        self._gpu.plans.append(plan)
        plan.lens, plan.qo = plan.kv_lens.clone(), plan.qo_indptr.clone()
        _stamp(plan.pinned, plan.number)
        self._gpu.submit(lambda: plan.int_workspace[:8].copy_(plan.pinned[:8]))
        return [plan.number]

    def paged_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        plan_info: list[int],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_len: Tensor,
        out: Tensor,
        lse: Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *variant: Any,
    ) -> None:
        plan, compiled = self._gpu.plans[plan_info[0]], self._compiled
        if compiled.sinks:
            sinks, scale, softcap = *variant, 0.0
            assert sinks.dtype == torch.float32 and sinks.is_contiguous() and sinks.shape == (plan.num_qo_heads,)
        elif compiled.kernels == "fa3":
            assert len(variant) == 8
            sinks, (softcap, scale) = None, variant[-4:-2]
        else:
            sinks, (softcap, scale) = None, variant[-5:-3]
        launch = Launch(compiled, plan, window_left, scale, softcap, sinks)
        self._gpu.launches.append(launch)
        pages = Pages(qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
        assert mask_mode == CAUSAL and layout == NHD and window_left == plan.window_left
        check_tensors(compiled, plan, q, k, v, pages, out)

        def kernel() -> None:
            found = self._gpu.plans[_stamped(int_workspace)]
            # A captured kernel takes its tiles from the last plan of its wrapper, whose shape must be what it was.
            replayed = plan.cuda_graph and found.int_workspace is int_workspace and _shape(found) == _shape(plan)
            if found is plan or replayed:
                attention(q, k, v, pages, out, replace(launch, plan=found))
                if self._gpu.wrong(launch):
                    out.mul_(1.02)
            else:
                out.fill_(math.nan)  # the tiles of another plan

        self._gpu.submit(kernel)


@dataclass(frozen=True)
class Pages:
    """The index arrays as a kernel reads them."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor


def check_tensors(
    compiled: Compiled, plan: SimpleNamespace, q: Tensor, k: Tensor, v: Tensor, pages: Pages, out: Tensor
) -> None:
    """What the kernels demand of what they are given."""
    assert (q.dtype, k.dtype, v.dtype, out.dtype) == (
        compiled.dtype_q,
        compiled.dtype_kv,
        compiled.dtype_kv,
        compiled.dtype_o,
    )
    assert q.shape[1:] == (plan.num_qo_heads, plan.head_dim_qk) and out.shape == (*q.shape[:2], plan.head_dim_vo)
    assert k.shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim_qk)
    assert v.shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim_vo)
    assert k.stride() == v.stride(), "another kernel would be compiled for unequal strides"
    assert out.is_contiguous()
    for x in (q, k, v, out):
        assert x.device == plan.float_workspace.device and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
        assert all(s * x.element_size() % 16 == 0 and s < 2**32 for s in x.stride()[:-1])
    batch = len(pages.kv_last_page_len)
    for array in (pages.qo_indptr, pages.kv_indptr, pages.kv_indices, pages.kv_last_page_len):
        assert array.dtype == compiled.dtype_index and array.is_contiguous() and array.device == q.device
    assert len(pages.qo_indptr) == len(pages.kv_indptr) == batch + 1 == plan.batch_size + 1


def attention(q: Tensor, k: Tensor, v: Tensor, pages: Pages, out: Tensor, launch: Launch) -> None:
    """What the arrays mean, by brute force."""
    page_size = k.shape[1]
    qo, kv, last = (x.tolist() for x in (pages.qo_indptr, pages.kv_indptr, pages.kv_last_page_len))
    assert qo == launch.plan.qo.tolist()
    for e in range(len(last)):
        ids = pages.kv_indices[kv[e] : kv[e + 1]].long()
        length = (len(ids) - 1) * page_size + last[e]
        assert length == int(launch.plan.lens[e])
        queries = q[qo[e] : qo[e + 1]].double().transpose(0, 1)
        n = queries.shape[1]
        window = launch.window_left if launch.compiled.window else length
        begin = max(0, length - n - window)
        keys, values = (as_loaded(x[ids].flatten(0, 1)[begin:length], v.shape[3]) for x in (k, v))
        groups = queries.shape[0] // k.shape[2]
        keys, values = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (keys, values))
        scores = queries @ keys.transpose(1, 2) * launch.scale
        if launch.compiled.softcap:
            scores = launch.softcap * torch.tanh(scores / launch.softcap)
        i, j = torch.arange(n)[:, None] + length - n, torch.arange(begin, length)[None, :]
        scores = scores.masked_fill((j > i) | (i - j > window), -math.inf)
        sinks = torch.full((queries.shape[0],), -math.inf) if launch.sinks is None else launch.sinks
        weights = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1).softmax(-1)[..., :-1]
        out[qo[e] : qo[e + 1]] = (weights @ values).transpose(0, 1).to(out.dtype)


def as_loaded(x: Tensor, head_dim_v: int) -> Tensor:
    """K or V [n, Hkv, D] as float64, NaN where ``page_produce_kv`` leaves a head's end out."""
    dim = x.shape[-1]
    if x.element_size() == 1:
        whole = min(dim, 64) if head_dim_v == 64 else dim - dim % 128
    else:
        whole = dim - dim % 64
    loaded = x.double()
    loaded[..., whole:] = math.nan
    return loaded


def _shape(plan: SimpleNamespace) -> tuple[Any, ...]:
    """What a captured kernel is launched with, whatever is planned later."""
    return plan.batch_size, plan.total_rows, plan.cuda_graph, plan.disable_split_kv, plan.fixed_split_size


def _stamp(buffer: Tensor, number: int) -> None:
    buffer[:8] = torch.tensor([number], dtype=torch.int64).view(torch.uint8)


def _stamped(buffer: Tensor) -> int:
    return int(buffer[:8].clone().view(torch.int64))


def fail_to_build(said: str) -> None:
    """Raises what FlashInfer's own code raises when the compiler says something."""
    cpp_ext = importlib.import_module("flashinfer.jit.cpp_ext")

    def fails(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, said)

    names = {name: getattr(subprocess, name) for name in ("CalledProcessError", "PIPE", "STDOUT")}
    with MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(cpp_ext, "subprocess", SimpleNamespace(run=fails, **names))
        cpp_ext.run_ninja(Path(folder), Path(folder, "build.ninja"), verbose=False)


class _Spec:
    """What FlashInfer builds and loads a module from."""

    def __init__(self, gpu: Gpu, compiled: Compiled) -> None:
        self._gpu, self._compiled = gpu, compiled

    def build_and_load(self) -> Module:
        return Module(self._gpu, self._compiled)


class Unpinned:
    """torch, but for pinned memory, which takes a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*args, **options)


def _with_sinks(asked: SimpleNamespace) -> Compiled:
    """The kernel that these arguments of FlashInfer's generator ask for: kvtier's one with sinks."""
    assert asked.backend in ("fa2", "fa3") and asked.variant_name == "AttentionSink"
    owner = {"fa2": "params.", "fa3": "params.additional_params."}[asked.backend]
    assert "struct AttentionSink" in asked.variant_decl and f" {owner}sink[qo_head_idx]" in asked.variant_decl
    assert (asked.additional_tensor_names, asked.additional_tensor_dtypes) == (["sink"], ["float"])
    assert (asked.additional_scalar_names, asked.additional_scalar_dtypes) == (["sm_scale"], ["double"])
    assert not (asked.pos_encoding_mode or asked.use_logits_soft_cap or asked.use_fp16_qk_reduction)
    return Compiled(
        asked.uri,
        asked.dtype_q,
        asked.dtype_kv,
        asked.dtype_o,
        asked.idtype,
        asked.head_dim_qk,
        asked.head_dim_vo,
        asked.use_sliding_window,
        softcap=False,
        sinks=True,
        kernels=asked.backend,
    )


@contextmanager
def on_a_late_stream(monkeypatch: Any) -> Iterator[Gpu]:
    """FlashInfer over stand-in kernels, and kvtier's moments on their stream."""
    prefill = importlib.import_module("flashinfer.prefill")
    plans = importlib.import_module("kvtier.attention._flashinfer_plan")
    gpu, loaded = Gpu(), {}

    def default(backend: str, *args: Any) -> _Spec:
        assert backend in ("fa2", "fa3")
        q, kv, o, index, dim_qk, dim_vo, position, window, softcap, fp16 = args
        assert position == 0 and not fp16 and q.itemsize == 2
        uri = prefill.get_batch_prefill_uri(backend, *args)
        return _Spec(gpu, Compiled(uri, q, kv, o, index, dim_qk, dim_vo, window, softcap, False, backend))

    def customised(*args: Any, **options: Any) -> Module:
        given = inspect.signature(prefill.gen_customize_batch_prefill_module).bind(*args, **options)
        given.apply_defaults()
        asked = SimpleNamespace(**given.arguments)
        # A library of that name that was built before is loaded as it is, whatever it was built for.
        return Module(gpu, loaded.setdefault(asked.uri, _with_sinks(asked)))

    def unequal(*args: Any) -> _Spec:
        return _Spec(gpu, None)  # type: ignore[arg-type]

    for name in ("get_batch_prefill_module", "get_batch_prefill_jit_module"):
        getattr(prefill, name).cache_clear()
    latents.forget()
    stand_ins = {
        "gen_batch_prefill_module": default,
        "_gen_batch_prefill_primary_module": default,
        "_gen_batch_prefill_independent_paged_module": unequal,
        "get_customize_batch_prefill_module": customised,
    }
    with monkeypatch.context() as patch:
        for name, stand_in in stand_ins.items():
            patch.setattr(prefill, name, stand_in, raising=not name.startswith("_"))
        patch.setattr(prefill, "torch", Unpinned())
        latents.patch_in(patch, gpu, Unpinned())
        patch.setattr(plans, "new_moment", gpu.moment)
        try:
            yield gpu
        finally:
            gpu.stop()
            latents.forget()
    for name in ("get_batch_prefill_module", "get_batch_prefill_jit_module"):
        getattr(prefill, name).cache_clear()
