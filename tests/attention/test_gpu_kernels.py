"""The step of ``make gpu`` that builds kernels: it asks for the very modules that the backend loads later."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.flashinfer_latents_standin import CompiledLatents
from benchmarks.gpu import __main__ as command, kernels, main_job, states
from benchmarks.gpu.figures import Figure, Section
from benchmarks.gpu.kernels import Kernel
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.ttft import MODELS
from kvtier.attention._flashinfer_latents import LatentKey
from kvtier.attention._flashinfer_plan import Indices, PlanKey, Wrappers
from kvtier.attention.choice import Machine, choose
from kvtier.geometry.spec import CacheSpec
from runner.model.checkpoint import find_config
from runner.needle import weights_path


def needs_flashinfer() -> None:
    if importlib.util.find_spec("flashinfer") is None:
        if os.environ.get("KVTIER_NEED_FLASHINFER"):
            raise ModuleNotFoundError("CI runs these tests: `make test` installs flashinfer-python")
        pytest.skip("flashinfer-python is not installed; `make test` installs what these tests need")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    needs_flashinfer()
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    from attention.flashinfer_standin import on_a_late_stream

    with on_a_late_stream(monkeypatch) as gpu:
        yield gpu


ALL = {k for section in SECTIONS for k in section.kernels() if isinstance(k, Kernel)}


@pytest.mark.parametrize("kernel", sorted(ALL, key=str), ids=str)
def test_what_is_built_is_what_the_backend_loads(gpu: Any, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers = Wrappers(torch.device("cpu"), 1 << 10, 2, split_kv=True)
    ends, page = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    indices = Indices(ends, ends, torch.ones(1, dtype=torch.int32), page)
    if kernel.is_latent:
        dims, kv = (kernel.head_dim, kernel.head_dim_v), kernel.kv_dtype or kernel.dtype
        wrappers.eager(LatentKey("g", 16, 8, *dims, kernel.dtype, kv, 0.1, kernel.name), wrappers, indices)
        with monkeypatch.context() as patch:
            patch.setattr("flashinfer.jit.gen_batch_mla_module", lambda *args: args)
            name, *args = kernels.spec_of(kernel)
        assert CompiledLatents(name, *args) == gpu.latents.modules[-1]
        return
    with monkeypatch.context() as patch:  # the generator itself would write sources
        patch.setattr("flashinfer.prefill.gen_customize_batch_prefill_module", lambda *args, **how: (args, how))
        spec = kernels.spec_of(kernel)
    key = PlanKey(
        "g",
        block_tokens=16,
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=kernel.head_dim,
        head_dim_v=kernel.head_dim_v,
        q_dtype=kernel.dtype,
        kv_dtype=kernel.kv_dtype or kernel.dtype,
        window_left=39 if kernel.window else -1,
        softcap=3.0 if kernel.softcap else None,
        scale=0.1,
        sinks=kernel.sinks,
        kernels=kernel.name,
    )
    wrappers.eager(key, wrappers, indices)
    loaded = gpu.modules[-1]
    if not kernel.sinks:
        assert spec._compiled == loaded
        return
    (backend, uri, *args), how = spec
    assert (backend, uri) == (kernel.name, loaded.uri)
    assert args[:4] == [loaded.dtype_q, loaded.dtype_kv, loaded.dtype_o, loaded.dtype_index]
    assert args[4:6] == [loaded.head_dim_qk, loaded.head_dim_vo]
    assert how == {"use_sliding_window": loaded.window}


def test_the_models_of_the_figures_have_kernels_with_sinks_and_for_wide_heads() -> None:
    found = kernels.of_models(MODELS)
    assert {(k.head_dim, k.window, k.sinks) for k in found} == {
        (64, True, True),
        (64, False, True),
        (256, True, False),
        (256, False, False),
        (128, False, False),
    }


def test_what_hopper_tries_on_prompts_is_built_ahead() -> None:
    """Else it would be compiled within a run, or fail its trial where nothing can be compiled."""
    for found in (kernels.of_models(MODELS), kernels.of_main_job()):
        full = {k for k in found if k.name == "fa2" and not k.window}
        assert full and {k for k in found if k.name == "fa3"} == {replace(k, name="fa3") for k in full}
    tests = {k for k in kernels.of_tests() if k.name == "fa3" and not k.is_latent}
    assert {(k.dtype, k.head_dim) for k in tests} == {(torch.bfloat16, 64)} and len(tests) == 3


def test_what_is_built_for_states_is_what_a_decode_loads(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, which says all that a module is compiled for."""
    [kernel] = states.kernels()
    assert (kernel.dtype, kernel.head_dim, kernel.state_size) == (torch.bfloat16, 64, 128)  # type: ignore[union-attr]
    module, named = importlib.import_module("flashinfer.jit.mamba.selective_state_update"), list[str]()
    monkeypatch.setattr(module, "_gen_module", lambda uri, *args, **options: named.append(uri) or SimpleNamespace())
    kernels.spec_of(kernel)
    update = sys.modules["flashinfer.mamba.selective_state_update"]
    monkeypatch.setattr(update, "get_compute_capability", lambda _: (9, 0))
    x, pool, at = torch.zeros(2, 4, 64).bfloat16(), torch.zeros(3, 4, 64, 128), torch.tensor([1, 2], dtype=torch.int32)
    rate, skip = torch.zeros(4)[:, None, None].expand(-1, 64, 128), torch.zeros(4).bfloat16()[:, None].expand(-1, 64)
    into = torch.zeros(2, 1, 128).bfloat16()
    with pytest.raises(AttributeError, match="build_and_load"):
        update.selective_state_update(
            pool, x, x, rate, into, into, skip, state_batch_indices=at, dst_state_batch_indices=at
        )
    assert len(named) == 2 and named[0] == named[1]


def test_the_main_job_runs_the_bundled_model_on_flashinfer() -> None:
    """In its own dtype it would run on the torch reference."""
    dtype = getattr(torch, main_job.DTYPE)
    groups = CacheSpec.from_config(find_config(weights_path()), block_tokens=1).groups
    hopper = Machine("0.7.2", (9, 0))
    assert choose("auto", "cuda:0", groups, dtype, hopper).name == "flashinfer"
    assert choose("auto", "cuda:0", groups, torch.float32, hopper).name == "reference"
    assert {(k.dtype, k.head_dim, k.window) for k in kernels.of_main_job()} == {(dtype, 64, False), (dtype, 64, True)}
    assert main_job.OPTIONS[-2:] == ("--dtype", main_job.DTYPE)


# --- building --------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """FlashInfer's own builds, by ninja, of modules that need no nvcc: a function that makes one from its source."""
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        pytest.skip("no ninja or no C++ compiler here; apt install ninja-build g++")
    needs_flashinfer()
    env, core, cpp_ext = (importlib.import_module(f"flashinfer.jit.{name}") for name in ("env", "core", "cpp_ext"))
    cuda = tmp_path / "cuda"
    for folder in ("bin", "lib64"):
        (cuda / folder).mkdir(parents=True)
    (cuda / "bin" / "nvcc").write_text("#!/bin/sh\necho release 13.0, V13.0.88\n")
    (cuda / "bin" / "nvcc").chmod(0o755)
    for library in ("libcudart.a", "libcuda.a"):
        (cuda / "lib64" / library).write_bytes(b"!<arch>\n")
    for name, value in (("CUDA_HOME", cuda), ("FLASHINFER_CUDA_ARCH_LIST", "9.0a"), ("MAX_JOBS", 2)):
        monkeypatch.setenv(name, str(value))
    for name in ("JIT", "AOT"):
        monkeypatch.setattr(env, f"FLASHINFER_{name}_DIR", tmp_path / name)
    monkeypatch.setattr(kernels, "installed_version", lambda: "0.7.2")
    wanted: list[Any] = []
    monkeypatch.setattr(kernels, "spec_of", lambda kernel: wanted[kernel.head_dim])

    def make(source: str = "int nothing() { return 0; }") -> Any:
        path = tmp_path / f"kernel_{len(wanted)}.cc"
        path.write_text(source)
        wanted.append(core.gen_jit_spec(path.stem, [path]))
        return wanted[-1]

    asked = cpp_ext.get_cuda_path, cpp_ext.get_cuda_version
    for function in asked:
        function.cache_clear()
    yield make
    for function in asked:
        function.cache_clear()


def built(count: int) -> list[Figure]:
    """What is said of the first kernels that were made."""
    return list(kernels.run(Kernel(torch.float16, number, number, False) for number in range(count)))


def stamps(*specs: Any) -> list[int]:
    return [file.stat().st_mtime_ns for spec in specs for file in sorted(spec.build_dir.glob("*.[os]*"))]


def test_what_is_built_is_not_compiled_again_when_it_is_loaded(compiler: Any) -> None:
    specs = [compiler(), compiler(), compiler()]
    there, made, took = built(3)
    assert (there.value, made.value, made.ok, took.unit) == (0, 3, True, "s")
    before = stamps(*specs)
    for spec in specs:
        spec.build_and_load()
    assert stamps(*specs) == before and len(before) == 6
    assert [f.value for f in built(3)] == [3]
    assert os.environ["MAX_JOBS"] == "2"


def test_what_is_there_but_would_be_compiled_again_is_not_there_already(compiler: Any) -> None:
    """Such as libraries without the log of ninja's that knows them."""
    specs = [compiler(), compiler()]
    importlib.import_module("flashinfer.jit.core").build_jit_specs(specs)
    specs[0].build_and_load()
    there, made, _ = built(2)
    assert all(spec.is_compiled for spec in specs) and (there.value, made.value) == (1, 1)


def test_a_build_that_fails_misses_its_mark_and_says_why_and_keeps_no_other_from_it(compiler: Any) -> None:
    specs = [compiler(), compiler("int nothing() { return unheard_of; }"), compiler()]
    _, made, _ = built(3)
    assert (made.value, made.at_least, made.ok) == (2, 3, False)
    assert "unheard_of" in made.note and [spec.is_compiled for spec in specs] == [True, False, True]


def test_what_came_with_flashinfer_is_not_built(compiler: Any) -> None:
    spec = compiler("no C++ at all")
    spec.aot_path.parent.mkdir(parents=True)
    spec.aot_path.touch()
    assert [(f.name, f.value) for f in built(1)] == [("there already", 1)]


def test_before_minutes_of_compiling_it_is_tried_whether_anything_can_be_linked(
    compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, wanted = compiler(), {Kernel(torch.float16, 0, 0, False)}
    monkeypatch.setattr(command, "SECTIONS", [Section("any", lambda budget: iter(()), 0.0, lambda: wanted)])
    assert kernels.cannot_link(wanted) == ""
    driver = tmp_path / "driver"
    driver.mkdir()
    (tmp_path / "cuda" / "lib64" / "libcuda.a").rename(driver / "libcuda.a")
    assert command.main(["--kernels"]) == 1
    said = capsys.readouterr().err
    assert all(part in said for part in ("-lcuda", "set CUDA_HOME to the CUDA toolkit (libcudart.so", "LIBRARY_PATH"))
    assert not spec.build_dir.exists()
    for name, value, said in (
        ("LIBRARY_PATH", str(driver), ""),
        ("FLASHINFER_DISABLE_JIT", "1", ""),
        ("CXX", "no-such-compiler", "No such file or directory: 'no-such-compiler'"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert said in kernels.cannot_link(wanted) and bool(said) is bool(kernels.cannot_link(wanted))
    spec.jit_library_path.parent.mkdir(parents=True)
    spec.jit_library_path.touch()
    assert kernels.cannot_link(wanted) == "", "there already"


def test_each_section_has_the_kernels_built_that_it_runs_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[set[Kernel]] = []
    monkeypatch.setattr(kernels, "cannot_link", lambda wanted: "")
    monkeypatch.setattr(kernels, "run", lambda wanted: built.append(wanted) or iter(()))
    for only in ("link", "reload", "decode", "main job", "e"):
        assert command.main(["--kernels", "--only", only]) == 0
    link, reload, decode, main, every = built
    assert (link, reload, main) == (set(), set(), kernels.of_main_job())
    assert {(k.head_dim, k.window, k.sinks) for k in decode} == {(64, True, True), (64, False, True)}
    assert every == ALL | states.kernels()


@pytest.mark.parametrize(
    ("cores", "given", "count", "at_once", "jobs"),
    [(2, "", 26, 1, 2), (16, "", 26, 4, 4), (200, "", 26, 26, 7), (16, "", 1, 1, 16), (16, "3", 26, 1, 3)],
)
def test_no_more_compilers_run_than_there_are_cores(
    cores: int, given: str, count: int, at_once: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("MAX_JOBS", given)
    pools: list[int] = []
    monkeypatch.setattr(kernels, "ThreadPoolExecutor", lambda most: pools.append(most) or ThreadPoolExecutor(most))
    spec = SimpleNamespace(is_aot=False, jit_library_path=Path(__file__))
    limits: set[str] = set()
    spec.build = lambda need_lock: limits.add(os.environ["MAX_JOBS"])
    assert kernels._build_all([spec] * count) == [False] * count
    assert (pools, limits, os.environ["MAX_JOBS"]) == ([at_once], {str(jobs)}, given)


def test_without_flashinfer_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "installed_version", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert command.main(["--kernels"]) == 1
    assert "'kvtier[gpu-cuda13]'" in capsys.readouterr().out
