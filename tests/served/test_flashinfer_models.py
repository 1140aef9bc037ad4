"""Models over FlashInfer: K and V in fp8, new tokens written by the Triton kernel, the equivalence kit."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from breadth import breadth, sample
from families import zoo
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kvtier import Request
from kvtier.attention.choice import Choice
from kvtier.machine.errors import AttentionUnavailable
from runner import LLM, SamplingParams
from runner.model import graphs
from runner.model.attention import scales_of
from runner.model.graphs import DecodeGraphs
from runner.model.hybrid import HybridModel
from runner.verify import kit, show
from runner.verify.scenarios import SCENARIOS
from served.over_flashinfer import flash_model

from .conftest import MAX_RUNNING, SHAPES, Serving
from .cpu_graph import CpuGraphs
from .test_graphs import requests

LAYERS = 4
NAMES = [name for name in ("gemma3", "gemma2", "gpt_oss", "llama4", "mistral") if name in zoo.ZOO]
TYPICAL, LARGEST = 1e-2, 6e-2
"""Over the logits' deviation. Seen: 2.4e-3 and 2.2e-2; with one head's scale for another's 8.6e-2 and 1.3e-1."""


def uneven(model: HybridModel) -> dict[int, dict[str, list[float]]]:
    """Scales of which no two heads' are alike."""
    spec = model.spec()
    places = {place: n for n, place in enumerate(spec.places("kv"))}
    return {
        i: {
            which: [by * (1 + 0.37 * ((places[place] + h) % 4)) for h in range(spec.group(place[0]).num_kv_heads)]
            for which, by in (("k", 0.05), ("v", 0.03))
        }
        for i, place in enumerate(spec.places("kv"))
    }


@pytest.fixture
def written_by_triton(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New tokens are written by the kernel, in Triton's interpreter; a captured launch is one operation."""
    pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
    from kvtier.attention.kernels import triton_write_kv

    launch, launches = triton_write_kv.launch, []

    def on_the_stream(*args: Any) -> None:
        def work() -> None:
            launches.append(len(args[4]))
            with np.errstate(over="ignore"), _disable_current_modes():
                launch(*args)

        flashinfer.submit(work)

    monkeypatch.setattr(triton_write_kv, "launch", on_the_stream)
    monkeypatch.setattr(sys.modules["kvtier.attention.kernels.write_kv"], "runs_kernel", lambda device: True)
    return launches


def check_served(serving: Serving, flashinfer: Any, asked: Sequence[Request] = ()) -> DecodeGraphs:
    """Every step runs over the torch reference, eagerly over FlashInfer, and in a graph where it can.

    Hidden states in float16 differ in their last bit, and a value near a tie may then be rounded otherwise into 8 bits,
    or go to another expert. So the median is what must be small, and the root mean square not large.
    """
    model, cache, scheduler = serving
    reference = HybridModel(model.model, attention="reference")
    reference.temperatures = model.temperatures
    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=CpuGraphs(flashinfer))
    graphs.capture()
    assert graphs.stats()["captured"] == [1, 2, 4, 5], graphs.stats()["reasons"]
    for request in asked or requests(7):
        scheduler.add(request)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    while scheduler.has_work():
        step = scheduler.schedule()
        want = reference.forward(step, cache)
        for gaps, got in zip(found, (model.forward(step, cache), graphs.forward(step)), strict=True):
            if got is not None and want.numel():
                assert got.shape == want.shape
                gaps.append((got - want).abs().flatten() / want.std())
        scheduler.commit(step, want.argmax(-1).numpy())
    for gaps in found:
        gap = torch.cat(gaps)
        typical, largest = float(gap.median()), float(gap.square().mean().sqrt())
        assert typical <= TYPICAL and largest <= LARGEST, f"{typical:.1e} {largest:.1e}"
    assert graphs.replayed > 2
    return graphs


# --- K and V in fp8 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample(NAMES, ["llama4"]))
def test_fp8_eagerly_and_captured(name: str, serve: Callable[..., Serving], flashinfer: Any) -> None:
    check_served(serve(name, dtype="fp8", kv_scales=uneven), flashinfer)
    assert {m.dtype_kv for m in flashinfer.modules} == {
        torch.float8_e4m3fn,
        torch.float16,
    }


def test_a_captured_step_keeps_the_scales_that_it_reads(serve: Callable[..., Serving], flashinfer: Any) -> None:
    """Its graph knows their addresses only, and others may push them out of the cache that they came from."""
    model, cache, _ = serve("gemma3", dtype="fp8", kv_scales=uneven)
    scales_of.cache_clear()
    graphs = DecodeGraphs(model, cache, 2, capture=lambda forward: (lambda: None, forward()))
    graphs.capture()
    pairs = scales_of(cache.spec, model.device).values()
    kept = [weakref.ref(x) for pair in pairs for x in pair.values()]
    assert len(kept) == 2 * LAYERS and graphs.stats()["captured"] == [1, 2]
    del pairs
    scales_of.cache_clear()
    gc.collect()
    assert all(x() is not None for x in kept)


@pytest.mark.parametrize(
    "kv",
    [pytest.param({}, marks=breadth), {"dtype": "fp8", "kv_scales": uneven}],
    ids=["float16", "fp8"],
)
def test_the_triton_kernel_writes_eagerly_and_captured(
    kv: dict[str, Any], written_by_triton: list[int], serve: Callable[..., Serving], flashinfer: Any
) -> None:
    short = [Request(f"r{i}", [5 + i] * n, 4) for i, n in enumerate((4, 2))]
    graphs = check_served(serve("gemma3", **kv), flashinfer, short)
    small = [rows for rows in written_by_triton if rows <= 2]  # a decode step runs eagerly and is replayed
    assert len(written_by_triton) % LAYERS == 0 and len(small) >= 2 * LAYERS * graphs.replayed


@pytest.fixture
def as_if_on_cuda(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """``attention="auto"``, or "flashinfer" if it is required, finds FlashInfer."""

    def choose(required: bool) -> None:
        chosen = Choice("flashinfer", "as if on CUDA", required)
        monkeypatch.setattr("kvtier.attention.choice.choose", lambda *_, **options: chosen)

    return choose


def load(name: str, tmp_path: Path) -> HybridModel:
    folder = zoo.build(name, tmp_path / name, **SHAPES.get(name, {"head_dim": 64}))
    return HybridModel.load(folder, dtype="float16")


@pytest.mark.parametrize("required", [False, True])
def test_head_sizes_that_flashinfer_cannot_compute_in_fp8(
    required: bool, as_if_on_cuda: Callable[[bool], None], tmp_path: Path
) -> None:
    """192 with 128 works in 16 bits, and so the model loads."""
    as_if_on_cuda(required)
    model = load("mimo_v2_flash", tmp_path)
    assert model.try_attention(model.spec()) > 0 and model.attention.name == "flashinfer"
    if required:
        with pytest.raises(AttentionUnavailable, match=r"group '\w+'.*64, 128, 256 over K and V in 8 bits"):
            LLM(model, "cpu", "64MiB", 0, kv_cache_dtype="fp8")
    else:
        with LLM(model, "cpu", "1MiB", 0, kv_cache_dtype="fp8") as llm:
            attention = llm.stats()["attention"]
            assert attention["backend"] == "reference" and "in 8 bits" in attention["reason"]
            assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)


@pytest.mark.parametrize("required", [False, True])
def test_fp8_kernels_that_nobody_can_compile(
    required: bool, as_if_on_cuda: Callable[[bool], None], flashinfer: Any, tmp_path: Path
) -> None:
    """Those for 16 bits may be there, built ahead: found before the cache is built, not amid a request."""
    as_if_on_cuda(required)
    model = load("gemma3", tmp_path)
    flashinfer.cannot_build = lambda compiled: compiled.dtype_kv.itemsize == 1
    assert model.try_attention(model.spec()) == 2
    spec = model.spec(dtype="fp8")
    if required:
        with pytest.raises(AttentionUnavailable, match=r"(?s)float8_e4m3fn.*nvcc not found"):
            model.try_attention(spec)
    else:
        assert model.try_attention(spec) == 0
        assert model.attention.name == "reference" and "nvcc not found" in model.attention.reason


# --- memory beside the pools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample(["gemma3", "gpt_oss", "mistral"], ["gpt_oss"]))
def test_what_the_attention_will_hold_is_known_before_it_does(
    name: str, serve: Callable[..., Serving], flashinfer: Any
) -> None:
    serving = serve(name)
    model, cache, _ = serving
    kinds = model.try_attention(cache.spec)
    assert kinds == len(cache.spec.groups)
    assert (model.backend.workspace_bytes(), model.backend.pinned_bytes()) == (1 << 10, 0), "the trial's are gone"
    most = model.attention_memory(kinds, captured=4)
    captured = check_served(serving, flashinfer)
    assert most == (model.backend.workspace_bytes(), model.backend.pinned_bytes())
    assert captured.stats()["captured"] == [1, 2, 4, 5]


# --- the equivalence kit ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("fails", sample([False, True], [False]), ids=["captured", "capture fails"])
def test_verify_runs_decode_steps_as_the_engine_does(
    fails: bool, flashinfer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(device: torch.device) -> Any:
        return (lambda forward: 1 / 0) if fails else CpuGraphs(flashinfer)

    model = flash_model(tmp_path, workspace=16)
    assert graphs.captured(model, None, 4) is None  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "CudaCapture", capture)
    for module in (graphs, kit):
        monkeypatch.setattr(module, "why_eager", lambda model: None)
    scenarios = [s for s in SCENARIOS if s.name in ("host hit", "batch", "resume")]
    report = kit.run(model, tokens=120, prompts=2, new_tokens=8, scenarios=scenarios)
    assert report.ok, [(r.name, r.missing, r.difference, r.violations) for r in report.results]
    used = report.graphs
    if fails:
        assert used["replayed"] == 0 and used["reasons"] == ["capturing failed (ZeroDivisionError: division by zero)"]
        assert show.graphs(report).startswith("Decode steps ran eagerly: capturing failed")
    else:
        assert used["replayed"] > 7 * 2 * 3 and used["eager"] > 0 and used["reasons"] == []
        assert show.graphs(report).endswith(f"{used['eager']:,} steps ran eagerly.")
        gc.collect()
        assert model.backend.workspace_bytes() == model.attention_memory(2, 0).device_bytes, "each cache's are gone"


def test_verify_says_why_decode_steps_are_not_captured(flashinfer: Any, tmp_path: Path) -> None:
    model = flash_model(tmp_path, workspace=16)
    report = kit.run(model, tokens=120, prompts=2, new_tokens=2, scenarios=[])
    assert "on cpu" in show.graphs(report) and report.graphs["replayed"] == 0
    of_cuda = {"device": torch.device("cuda:0"), "backend": object(), "attention": Choice("reference", "")}
    compressed = SimpleNamespace(layers={})
    on_cuda: Any = SimpleNamespace(**of_cuda, compressed=compressed)
    assert graphs.why_eager(on_cuda) == "the reference attention cannot be captured"
    on_cuda.backend = model.backend
    assert graphs.why_eager(on_cuda) is None
    compressed.layers = {0: object()}
    assert graphs.why_eager(on_cuda) == "steps of layers with compressed entries cannot be captured"
