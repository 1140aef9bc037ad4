"""Models with latents (MLA) over FlashInfer's own Python and stand-in kernels: logits, captures, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from breadth import sample
from families import zoo

from kvtier import CacheSpec
from kvtier.attention.choice import Choice, Machine
from kvtier.geometry.kinds import Kind
from kvtier.machine.errors import AttentionUnavailable
from runner import LLM, SamplingParams
from runner.model.graphs import DecodeGraphs
from runner.model.hybrid import HybridModel, _chosen

from .conftest import MAX_RUNNING, SHAPES, Serving
from .cpu_graph import CpuGraphs
from .test_graphs import requests

FAMILIES = ["deepseek_v3", "glm4_moe_lite", "kimi_linear", "deepseek_v32", "glm_moe_dsa"]
FAMILIES = [name for name in FAMILIES if name in zoo.ZOO]


def folder_of(model: HybridModel) -> str:
    """Where it was loaded from: a model that two backends share would hand latents on to both."""
    return str(model.model.config._name_or_path)


def states_of(cache: Any) -> list[Any]:
    """All parts of all states on the device."""
    groups = [g for g in cache.spec.groups if g.attention.kind is Kind.STATE]
    return [part for g in groups for layer in range(g.num_layers) for part in cache.state(g.name, layer)]


@pytest.mark.parametrize("name", sample(FAMILIES, ["glm4_moe_lite", "kimi_linear", "glm_moe_dsa"]))
def test_steps_give_the_logits_of_the_torch_reference(
    name: str, serve: Callable[..., Serving], flashinfer: Any
) -> None:
    """Eagerly and captured; 5 heads, which are padded; beside recurrent layers, and picked by an index, which are not
    captured."""
    model, cache, scheduler = serve(name)
    reference = HybridModel.load(folder_of(model), dtype="float16", attention="reference")
    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=CpuGraphs(flashinfer))
    eager_alone = bool(model.mixers.layers or model.compressed.layers)
    if not eager_alone:
        graphs.capture()
    for request in requests(5):
        scheduler.add(request)
    compared = 0
    while scheduler.has_work():
        step = scheduler.schedule()
        before = [(part, part.clone()) for part in states_of(cache)]
        want = reference.forward(step, cache)
        for part, old in before:  # a second forward would go on from the first's
            part.copy_(old)
        eager = model.forward(step, cache)
        got = graphs.forward(step)
        for logits in (eager, got):
            if logits is not None and want.numel():
                gaps = (logits - want).abs() / want.abs().max()
                # Half precision may pick another of two tokens whose scores hardly differ; that shows in few logits.
                assert float(gaps.median() if model.compressed.layers else gaps.max()) <= 0.02
        compared += len(want)
        scheduler.commit(step, want.argmax(-1).numpy())
    assert compared > 20 and flashinfer.latents.launches and flashinfer.plans == []
    assert graphs.replayed > 2 or eager_alone
    assert graphs.stats()["reasons"] == []


def test_what_the_attention_will_hold_is_known_before_it_does(serve: Callable[..., Serving], flashinfer: Any) -> None:
    model, cache, scheduler = serve("deepseek_v3")
    kinds = model.try_attention(cache.spec)
    assert kinds == 1
    most = model.attention_memory(kinds, captured=4)
    graphs = DecodeGraphs(model, cache, MAX_RUNNING, capture=CpuGraphs(flashinfer))
    graphs.capture()
    for request in requests(3):
        scheduler.add(request)
    for _ in range(4):
        step = scheduler.schedule()
        logits = model.forward(step, cache)
        scheduler.commit(step, logits.argmax(-1).numpy())
    assert most == (model.backend.workspace_bytes(), model.backend.pinned_bytes())


@pytest.fixture
def as_if_on_cuda(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def choose(required: bool) -> None:
        chosen = Choice("flashinfer", "as if on CUDA", required)
        monkeypatch.setattr("kvtier.attention.choice.choose", lambda *_, **options: chosen)

    return choose


@pytest.mark.parametrize("required", [False, True])
def test_steps_too_large_for_a_plan(
    required: bool, as_if_on_cuda: Callable[[bool], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before the cache is built, not amid a prompt."""
    as_if_on_cuda(required)
    model = HybridModel.load(zoo.build("deepseek_v3", tmp_path, **SHAPES["deepseek_v3"]), dtype="float16")
    model.check_steps(8192, 256)
    assert model.attention.name == "flashinfer"
    how: Any = {"device_memory": "64MiB", "host_memory": 0, "max_batched_tokens": 600_000}
    if required:
        with pytest.raises(AttentionUnavailable, match=r"600,000 tokens with 4 heads over latents; lower max_batched"):
            LLM(model, "cpu", **how)
    else:
        model.check_steps(600_000, 256)
        assert model.attention.name == "reference" and "max_batched_tokens" in model.attention.reason
        with LLM(model, "cpu", **how | {"max_batched_tokens": 64}) as llm:
            assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)


@pytest.mark.parametrize("name", [name for name in ("deepseek_v3", "glm_moe_dsa") if name in zoo.ZOO])
@pytest.mark.parametrize("required", [False, True])
def test_kernels_that_nobody_can_compile(
    required: bool, name: str, as_if_on_cuda: Callable[[bool], None], flashinfer: Any, tmp_path: Path
) -> None:
    """Layers that pick tokens by an index expand latents again."""
    as_if_on_cuda(required)
    flashinfer.cannot_build = lambda compiled: True
    folder = zoo.build(name, tmp_path, **SHAPES[name])
    if required:
        with pytest.raises(AttentionUnavailable, match=r"(?s)latents of 512 with rotated keys of 64, 4 heads.*nvcc"):
            HybridModel.load(folder, dtype="float16")
    else:
        model = HybridModel.load(folder, dtype="float16")
        assert model.attention.name == "reference" and "nvcc not found" in model.attention.reason
        assert bool(model.latents) is (name == "deepseek_v3")


@pytest.mark.skipif("hy_v4" not in zoo.ZOO, reason="this transformers has no hy_v4")
def test_sinks_over_what_is_picked_are_refused_by_name(as_if_on_cuda: Callable[[bool], None], tmp_path: Path) -> None:
    as_if_on_cuda(False)
    model = HybridModel.load(zoo.build("hy_v4", tmp_path, **SHAPES["deepseek_v32"]), dtype="float16")
    assert model.attention.name == "reference" and "picked latents with sinks" in model.attention.reason


def test_what_is_chosen_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent layers and index keys are no obstacle; entries that tokens share, and sizes without kernels, are."""
    hopper = Machine("0.7.2.post1", (9, 0))
    monkeypatch.setattr(Machine, "here", lambda device: hopper)
    expected = {
        "kimi_linear": "FlashInfer 0.7.2.post1",
        "deepseek_v32": "FlashInfer 0.7.2.post1",
        "deepseek_v4": "only the torch reference attends to compressed entries",
        "minicpm3": "latents of 512 with rotated keys of 64, not 32 with 8",
    }
    for name, reason in expected.items():
        if name in zoo.ZOO:
            config = zoo.config(name, **SHAPES.get(name, {}))
            spec = CacheSpec.from_config(config, "bfloat16")
            assert reason in _chosen("auto", "cuda:0", spec, torch.bfloat16, config, False).reason
