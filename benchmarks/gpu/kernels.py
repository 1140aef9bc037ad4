"""FlashInfer's kernels that a run uses, built before its clock starts: compiling takes minutes, and can be done ahead.

``python -m benchmarks.gpu --kernels`` only builds (with ``--only NAME``, what that section runs). It needs the CUDA
toolkit (``CUDA_HOME``) and no GPU: without one, say for which with ``FLASHINFER_CUDA_ARCH_LIST=9.0a``, and give the
linker a libcuda.so, such as the toolkit's stub (``LIBRARY_PATH``): it is tried first. Kernels lie below
``FLASHINFER_WORKSPACE_BASE`` (default: the home folder), and are built again where CUDA_HOME or FlashInfer's folder is
another. Where there is no nvcc, FlashInfer takes only those in its own folder: ``flashinfer/data/aot/NAME/NAME.so``.
"""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu import main_job
from benchmarks.gpu.figures import Figure
from benchmarks.models import MODELS as CONFIGS
from kvtier.attention._flashinfer_fa3 import HEAD_DIMS as HEAD_DIMS_FA3
from kvtier.attention._flashinfer_latents import LATENT_DIMS
from kvtier.attention._flashinfer_plan import PlanKey, _sink_kernel
from kvtier.attention._flashinfer_version import installed_version, too_old
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.device import install_extra
from runner.model.checkpoint import find_config
from runner.needle import weights_path

SECTION = "kernels"
WITH_SINKS = ("gpt_oss",)
"""Model types."""
COMPILERS = 4
"""That work on one kernel at the same time, which is ten files; more where there are more cores than kernels."""


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
    name: str = "fa2"
    """FlashInfer's; "fa3": Hopper's own."""
    is_latent: bool = False
    """For latents (MLA)."""


@dataclass(frozen=True)
class StateKernel:
    """What Mamba2's decode is compiled for; states and decays are float32."""

    dtype: torch.dtype
    head_dim: int
    state_size: int


def of_models(names: Iterable[str]) -> set[Kernel]:
    """Those that these models run (``benchmarks/models.py``)."""
    found = set()
    for name in names:
        config = CONFIGS[name]()
        for group in CacheSpec.from_config(config, dtype=torch.bfloat16).groups:
            window = group.attention.kind is Kind.WINDOW
            sinks = config.model_type in WITH_SINKS
            found.add(Kernel(torch.bfloat16, *group.head_dims, window, sinks=sinks))
    return _with_fa3(found)


def of_main_job() -> set[Kernel]:
    """Those that the bundled model runs in the main job."""
    dtype = getattr(torch, main_job.DTYPE)
    groups = CacheSpec.from_config(find_config(weights_path()), dtype=dtype).groups
    return _with_fa3({Kernel(dtype, *g.head_dims, g.attention.kind is Kind.WINDOW) for g in groups})


def _with_fa3(kernels: set[Kernel]) -> set[Kernel]:
    """With those that Hopper tries on prompts of full groups."""
    full = {k for k in kernels if not k.window and (k.head_dim, k.head_dim_v) in HEAD_DIMS_FA3}
    return kernels | {replace(k, name="fa3") for k in full}


def of_tests() -> set[Kernel]:
    """Those that the device tests run: each variant for two shapes, windows for the other sizes, 8 bits each way.

    Models have heads of 64 there; Hopper tries FA3 on them.
    """
    found = {
        Kernel(dtype, dim, dim, window, softcap, sinks)
        for dtype, dim in ((torch.float16, 64), (torch.bfloat16, 64), (torch.bfloat16, 128))
        for window in (False, True)
        for softcap, sinks in ((False, False), (True, False), (False, True))
    }
    found |= _with_fa3({kernel for kernel in found if (kernel.dtype, kernel.head_dim) == (torch.bfloat16, 64)})
    found |= {Kernel(torch.bfloat16, *dims, window=True) for dims in ((256, 256), (192, 128))}
    half, bfloat, fp8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
    return (
        found
        | of_latents()
        | {
            Kernel(half, 64, 64, window=False, softcap=True, kv_dtype=fp8),
            Kernel(bfloat, 64, 64, window=True, sinks=True, kv_dtype=fp8),
            Kernel(bfloat, 128, 128, window=False, kv_dtype=fp8),
            Kernel(bfloat, 256, 256, window=True, kv_dtype=fp8),
        }
    )


def of_latents() -> set[Kernel]:
    """Those for latents that a GPU's own kernels are tried on: Hopper's, those of older ones, and in 8 bits."""
    bfloat, fp8 = torch.bfloat16, torch.float8_e4m3fn
    ways = (("fa3", None), ("fa2", None), ("fa3", fp8))
    return {Kernel(bfloat, *LATENT_DIMS, window=False, kv_dtype=kv, name=name, is_latent=True) for name, kv in ways}


def spec_of(kernel: Kernel | StateKernel) -> Any:
    """What FlashInfer compiles for it: the module that the backend's wrappers load, or ``selective_state_update``."""
    if isinstance(kernel, StateKernel):
        f32, index, dtype = torch.float32, torch.int32, kernel.dtype
        generate = importlib.import_module("flashinfer.jit.mamba").gen_selective_state_update_sm90_module
        sizes = kernel.head_dim, kernel.state_size, 1
        return generate(f32, dtype, dtype, f32, index, None, *sizes, index, torch.int64, 0)
    if kernel.is_latent:
        generate = importlib.import_module("flashinfer.jit").gen_batch_mla_module
        dtypes = kernel.dtype, kernel.kv_dtype or kernel.dtype, kernel.dtype, torch.int32
        return generate(kernel.name, *dtypes, kernel.head_dim, kernel.head_dim_v, False)
    prefill = importlib.import_module("flashinfer.prefill")
    kv_dtype = kernel.kv_dtype or kernel.dtype
    if kernel.sinks:
        window = 0 if kernel.window else -1
        dims = kernel.head_dim, kernel.head_dim_v
        key = PlanKey("", 16, 1, 1, *dims, kernel.dtype, kv_dtype, window, None, 1.0, True, kernel.name)
        options = _sink_kernel(key)
        return prefill.gen_customize_batch_prefill_module(kernel.name, *options["jit_args"], **options["jit_kwargs"])
    fast = kernel.name == "fa3"
    generate = prefill.gen_batch_prefill_module if fast else prefill._gen_batch_prefill_primary_module
    dims, position = (kernel.head_dim, kernel.head_dim_v), 0
    dtypes = kernel.dtype, kv_dtype, kernel.dtype, torch.int32
    return generate(kernel.name, *dtypes, *dims, position, kernel.window, kernel.softcap, False)


def cannot_link(kernels: Iterable[Kernel | StateKernel]) -> str:
    """Why those of them that are not there yet could not be linked, and the fix; "" if they can be.

    Links an empty library as FlashInfer links its own, in a fraction of a second: compiling takes minutes before that.
    """
    if installed_version() is None or os.environ.get("FLASHINFER_DISABLE_JIT"):
        return ""
    try:
        specs = [spec_of(kernel) for kernel in kernels]
    except Exception:  # ``run`` says why
        return ""
    if all(spec.is_aot or spec.jit_library_path.exists() for spec in specs):
        return ""
    cuda = importlib.import_module("flashinfer.jit.cpp_ext").get_cuda_path()
    compiler, more = (shlex.split(os.environ.get(n, d)) for n, d in (("CXX", "c++"), ("FLASHINFER_EXTRA_LDFLAGS", "")))
    libraries = ["-shared", f"-L{cuda}/lib64", f"-L{cuda}/lib64/stubs", "-lcudart", "-lcuda", *more]
    with tempfile.TemporaryDirectory() as scratch:
        command = [*compiler, *libraries, "-o", f"{scratch}/tried.so"]
        try:
            subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
        except OSError as problem:
            return f"{problem}; FlashInfer links with a C++ compiler, c++ or what CXX says"
        except subprocess.CalledProcessError as problem:
            said = " ".join(problem.stderr.split())[-300:]
            return (
                f"{said}: set CUDA_HOME to the CUDA toolkit (libcudart.so lies in its lib64; now it is {cuda}), and "
                "LIBRARY_PATH to a folder with a libcuda.so: the toolkit's lib64/stubs, or a link to libcuda.so.1"
            )
    return ""


def run(kernels: Iterable[Kernel | StateKernel]) -> Iterator[Figure]:
    """Builds what is missing of them, on all cores (or as many as ``MAX_JOBS`` says)."""
    wanted = set(kernels)
    if not wanted:
        return
    version = installed_version()
    if note := f"FlashInfer is not installed; {install_extra()}" if version is None else too_old(version):
        yield Figure(SECTION, "cannot be built", 0.0, "", at_least=1.0, note=note)
        return
    try:
        specs = [spec_of(kernel) for kernel in wanted]
    except Exception as problem:
        yield Figure(SECTION, "cannot be built", 0.0, "", at_least=1.0, note=_line(problem))
        return
    begun = time.perf_counter()
    found = _build_all(specs)
    missing = len(found) - found.count(False)
    yield Figure(SECTION, "there already", len(found) - missing, "kernels", note=f"FlashInfer {version}")
    if not missing:
        return
    note = next((_line(problem) for problem in found if isinstance(problem, Exception)), "")
    yield Figure(SECTION, "built", found.count(True), "kernels", at_least=missing, note=note)
    yield Figure(SECTION, "took", time.perf_counter() - begun, "s", note="before the clock of the run starts")


def _build_all(specs: Sequence[Any]) -> list[bool | Exception]:
    """Of each, whether there was anything to build, or why it could not be."""
    most = os.environ.get("MAX_JOBS", "")
    cores = int(most) if most.isdigit() else os.cpu_count() or 1
    at_once = max(1, min(len(specs), cores // COMPILERS))
    with _max_jobs(max(1, cores // at_once)), ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(_build, specs))


def _build(spec: Any) -> bool | Exception:
    """Builds one as FlashInfer does before it loads it, so that nothing is left to do then.

    What its ``build_jit_specs`` builds is built again: that runs ninja in another folder, where it keeps another log.
    """
    try:
        if spec.is_aot:
            return False
        library = spec.jit_library_path
        before = library.stat().st_mtime_ns if library.exists() else None
        spec.build(need_lock=True)
        return bool(library.stat().st_mtime_ns != before)
    except Exception as problem:
        return problem


@contextmanager
def _max_jobs(count: int) -> Iterator[None]:
    """FlashInfer starts each ninja with so many jobs."""
    before = os.environ.get("MAX_JOBS")
    os.environ["MAX_JOBS"] = str(count)
    try:
        yield
    finally:
        del os.environ["MAX_JOBS"]
        if before is not None:
            os.environ["MAX_JOBS"] = before


def _line(problem: Exception) -> str:
    """An error's kind and its end, where compilers say what is wrong."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[-300:]}"
