"""The step of ``make gpu`` that builds kernels: it asks for the very modules that the backend loads later."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import kernels, main_job
from benchmarks.gpu.kernels import Kernel
from kvtier.attention._flashinfer_plan import Indices, PlanKey, Wrappers
from kvtier.attention.choice import Machine, choose
from kvtier.spec import CacheSpec
from runner.checkpoint import find_config
from runner.needle import weights_path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    if importlib.util.find_spec("flashinfer") is None:
        if os.environ.get("KVTIER_NEED_FLASHINFER"):
            raise ModuleNotFoundError("CI runs these tests: `make test` installs flashinfer-python")
        pytest.skip("flashinfer-python is not installed; `make test` installs what these tests need")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    from attention.flashinfer_standin import on_a_late_stream

    with on_a_late_stream(monkeypatch) as gpu:
        yield gpu


ALL = kernels.of_models() | kernels.of_main_job() | kernels.of_tests()


@pytest.mark.parametrize("kernel", sorted(ALL, key=str), ids=str)
def test_what_is_built_is_what_the_backend_loads(gpu: Any, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
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
    )
    ends, page = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    indices = Indices(ends, ends, torch.ones(1, dtype=torch.int32), page)
    wrappers = Wrappers(torch.device("cpu"), 1 << 10, 2, split_kv=True)
    wrappers.eager(key, wrappers, indices)
    loaded = gpu.modules[-1]
    if not kernel.sinks:
        assert spec._compiled == loaded
        return
    (backend, uri, *args), how = spec
    assert (backend, uri) == ("fa2", loaded.uri)
    assert args[:4] == [loaded.dtype_q, loaded.dtype_kv, loaded.dtype_o, loaded.dtype_index]
    assert args[4:6] == [loaded.head_dim_qk, loaded.head_dim_vo]
    assert how == {"use_sliding_window": loaded.window}


def test_the_models_of_the_figures_have_kernels_with_sinks_and_for_wide_heads() -> None:
    found = kernels.of_models()
    assert {(k.head_dim, k.window, k.sinks) for k in found} == {
        (64, True, True),
        (64, False, True),
        (256, True, False),
        (256, False, False),
        (128, False, False),
    }


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


@dataclass
class Spec:
    """A kernel that may be there."""

    is_compiled: bool


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for FlashInfer's: compiles ``most`` of what it is given, then complains."""
    made = SimpleNamespace(most=9, given=[], specs=[Spec(True), Spec(False), Spec(False)])

    def build(specs: list[Spec]) -> None:
        made.given += specs
        for spec in specs[: made.most]:
            spec.is_compiled = True
        if len(specs) > made.most:
            raise RuntimeError("Ninja build failed.\n[3/9] nvcc: no such file")

    left = iter(made.specs)
    monkeypatch.setattr(kernels, "installed_version", lambda: "0.7.2")
    monkeypatch.setattr(kernels, "spec_of", lambda kernel: next(left))
    monkeypatch.setattr(kernels.importlib, "import_module", lambda name: SimpleNamespace(build_jit_specs=build))
    return made


THREE = [Kernel(torch.float16, dim, dim, False) for dim in (64, 128, 256)]


def test_what_is_missing_is_built(compiler: SimpleNamespace) -> None:
    there, built, took = kernels.run(THREE)
    assert (there.value, built.value, built.ok) == (1, 2, True)
    assert compiler.given == compiler.specs[1:] and took.unit == "s"


def test_a_build_that_fails_misses_its_mark_and_says_why(compiler: SimpleNamespace) -> None:
    compiler.most = 1
    _, built, _ = kernels.run(THREE)
    assert (built.value, built.ok) == (1, False)
    assert built.note.endswith("nvcc: no such file")


def test_nothing_is_built_where_everything_is_there(compiler: SimpleNamespace) -> None:
    for spec in compiler.specs:
        spec.is_compiled = True
    assert [f.name for f in kernels.run(THREE)] == ["there already"]
    assert compiler.given == []


def test_without_flashinfer_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "installed_version", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert command.main(["--kernels"]) == 1
    assert "'kvtier[gpu-cuda13]'" in capsys.readouterr().out
