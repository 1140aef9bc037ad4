"""FlashInfer's kernels that a run uses, built before its clock starts: compiling takes minutes, and can be done ahead.

``python -m benchmarks.gpu --kernels`` only builds. It needs the CUDA toolkit (``CUDA_HOME``) and no GPU: without one,
say for which with ``FLASHINFER_CUDA_ARCH_LIST=9.0a``, and give the linker a libcuda.so, such as the toolkit's stub
(``LIBRARY_PATH``). Kernels lie below ``FLASHINFER_WORKSPACE_BASE`` (default: the home folder). Where there is no nvcc,
FlashInfer takes only those in its own folder: ``flashinfer/data/aot/NAME/NAME.so``.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import main_job
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.ttft import MODELS
from benchmarks.models import MODELS as CONFIGS
from kvtier.attention._flashinfer_plan import PlanKey, _sink_kernel
from kvtier.attention.choice import installed_version
from kvtier.device import install_extra
from kvtier.spec import CacheSpec, Kind
from runner.checkpoint import find_config
from runner.needle import weights_path

SECTION = "kernels"
WITH_SINKS = ("gpt_oss",)
"""Model types."""


@dataclass(frozen=True)
class Kernel:
    """What one is compiled for."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    window: bool
    softcap: bool = False
    sinks: bool = False
    kv_dtype: torch.dtype | None = None
    """Of K and V, where it is another."""


def of_models() -> set[Kernel]:
    """Those that the models of the figures run."""
    found = set()
    for name in MODELS:
        config = CONFIGS[name]()
        for group in CacheSpec.from_config(config, dtype=torch.bfloat16).groups:
            window = group.attention.kind is Kind.WINDOW
            sinks = config.model_type in WITH_SINKS
            found.add(Kernel(torch.bfloat16, *group.head_dims, window, sinks=sinks))
    return found


def of_main_job() -> set[Kernel]:
    """Those that the bundled model runs in the main job."""
    dtype = getattr(torch, main_job.DTYPE)
    groups = CacheSpec.from_config(find_config(weights_path()), dtype=dtype).groups
    return {Kernel(dtype, *g.head_dims, g.attention.kind is Kind.WINDOW) for g in groups}


def of_tests() -> set[Kernel]:
    """Those that the device tests run: each variant for two shapes, windows for the other sizes, 8 bits each way."""
    found = {
        Kernel(dtype, dim, dim, window, softcap, sinks)
        for dtype, dim in ((torch.float16, 64), (torch.bfloat16, 64), (torch.bfloat16, 128))
        for window in (False, True)
        for softcap, sinks in ((False, False), (True, False), (False, True))
    }
    found |= {Kernel(torch.bfloat16, *dims, window=True) for dims in ((192, 192), (256, 256), (192, 128))}
    half, bfloat, fp8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
    return found | {
        Kernel(half, 64, 64, window=False, softcap=True, kv_dtype=fp8),
        Kernel(bfloat, 64, 64, window=True, sinks=True, kv_dtype=fp8),
        Kernel(bfloat, 128, 128, window=False, kv_dtype=fp8),
        Kernel(bfloat, 256, 256, window=True, kv_dtype=fp8),
    }


def spec_of(kernel: Kernel) -> Any:
    """What FlashInfer compiles for it: the module that the backend's wrappers load."""
    prefill = importlib.import_module("flashinfer.prefill")
    kv_dtype = kernel.kv_dtype or kernel.dtype
    if kernel.sinks:
        window = 0 if kernel.window else -1
        key = PlanKey("", 16, 1, 1, kernel.head_dim, kernel.head_dim_v, kernel.dtype, kv_dtype, window, None, 1.0, True)
        options = _sink_kernel(key)
        return prefill.gen_customize_batch_prefill_module("fa2", *options["jit_args"], **options["jit_kwargs"])
    generate = getattr(prefill, "_gen_batch_prefill_primary_module", prefill.gen_batch_prefill_module)  # from 0.7 on
    dims, position = (kernel.head_dim, kernel.head_dim_v), 0
    dtypes = kernel.dtype, kv_dtype, kernel.dtype, torch.int32
    return generate("fa2", *dtypes, *dims, position, kernel.window, kernel.softcap, False)


def run(kernels: Iterable[Kernel] | None = None) -> Iterator[Figure]:
    """Builds those that are not there, all at once on all cores."""
    version = installed_version()
    if version is None:
        note = f"FlashInfer is not installed; {install_extra()}"
        yield Figure(SECTION, "cannot be built", 0.0, "", at_least=1.0, note=note)
        return
    wanted = of_models() | of_main_job() | of_tests() if kernels is None else set(kernels)
    try:
        specs = [spec_of(kernel) for kernel in wanted]
    except Exception as problem:
        yield Figure(SECTION, "cannot be built", 0.0, "", at_least=1.0, note=_line(problem))
        return
    missing = [spec for spec in specs if not spec.is_compiled]
    yield Figure(SECTION, "there already", len(specs) - len(missing), "kernels", note=f"FlashInfer {version}")
    if not missing:
        return
    begun, note = time.perf_counter(), ""
    try:
        importlib.import_module("flashinfer.jit").build_jit_specs(missing)
    except Exception as problem:
        note = _line(problem)
    built = sum(spec.is_compiled for spec in missing)
    yield Figure(SECTION, "built", built, "kernels", at_least=len(missing), note=note)
    yield Figure(SECTION, "took", time.perf_counter() - begun, "s", note="before the clock of the run starts")


def _line(problem: Exception) -> str:
    """An error's kind and its end, where compilers say what is wrong."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[-300:]}"
