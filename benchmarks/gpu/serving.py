"""Models of real shapes with random weights, made on the device and served by the runner.

The figures of a forward pass depend on shapes, types and kernels, hardly on what the weights are. Nothing is fetched.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import link
from benchmarks.gpu.clock import Clock, CudaClock
from benchmarks.gpu.link import Setup
from benchmarks.models import MODELS
from kvtier import AttentionUnavailable, FinishedRequest, Request
from kvtier.cpu_offload.engines.cuda.link import CudaLink
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from runner.api.llm import LLM
from runner.engine.loop import StepOutput
from runner.model.attention import NAME
from runner.model.graphs import Capture, Captured, CudaCapture, DecodeGraphs
from runner.model.hybrid import HybridModel
from runner.plan import compute
from runner.sampling.params import SamplingParams

GIB = 1 << 30
OVERHEAD_BYTES = 8 * GIB
"""Of device memory beside weights and pools: activations of a chunk, workspaces, captured graphs."""


@dataclass(frozen=True)
class Stage:
    """Where models are served. Tests play the device and shrink everything."""

    link: Setup
    clock: Clock
    capture: Callable[[], Capture]
    chip: str
    """The device's name."""
    free_bytes: Callable[[], int]
    """Of device memory."""
    configs: Mapping[str, Callable[[], Any]] = field(default_factory=lambda: MODELS)
    dtype: torch.dtype = torch.bfloat16
    backend: Callable[[], Any] = lambda: None
    """An attention backend; None for what suits the device."""
    chunk: int = 8192
    """Tokens a step computes at most."""
    needs: str = ""
    """The attention backend without which a long prompt takes minutes; "" if any will do."""


def on_gpu() -> Stage:
    """The first GPU."""

    def free() -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(0)[0])

    setup = link.on_gpu()
    return Stage(
        setup,
        CudaClock(setup.device),
        lambda: CudaCapture(torch.device(setup.device)),
        torch.cuda.get_device_properties(0).name,
        free,
        needs="flashinfer",
    )


class Kept:
    """A capture that keeps what replays its graphs; the largest bucket's comes first."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.replays: list[Callable[[], None]] = []

    def __call__(self, forward: Callable[[], torch.Tensor]) -> Captured:
        captured = self._capture(forward)
        self.replays.append(captured[0])
        return captured


@dataclass
class Served:
    """A model that is being served."""

    llm: LLM
    kept: Kept
    weights: compute.Weights
    note: str = ""
    """Which attention runs, and what did not work."""

    @property
    def spec(self) -> CacheSpec:
        return self.llm.spec


def spec_of(stage: Stage, name: str) -> CacheSpec:
    """The groups of a model's cache."""
    return CacheSpec.from_config(stage.configs[name](), dtype=stage.dtype)


def is_hybrid(spec: CacheSpec) -> bool:
    """Whether some layers do not attend to everything."""
    return any(group.attention.kind is not Kind.FULL for group in spec.groups)


def shortage(stage: Stage, name: str, blocks: Mapping[str, int]) -> str:
    """Why a model and its device pools do not fit; "" if they do."""
    gc.collect()
    weights = compute.weights(stage.configs[name]()).total * stage.dtype.itemsize
    pools = sum(blocks[group.name] * group.block_bytes for group in spec_of(stage, name).groups)
    free, need = stage.free_bytes(), weights + pools + OVERHEAD_BYTES
    if need <= free:
        return ""
    return (
        f"does not fit: {weights / GIB:.1f} GiB of weights, {pools / GIB:.1f} of pools and {OVERHEAD_BYTES / GIB:.0f} "
        f"beside them, {free / GIB:.1f} GiB are free"
    )


@contextmanager
def served(
    stage: Stage, name: str, device_blocks: Mapping[str, int], host_blocks: Mapping[str, int], max_running: int
) -> Iterator[Served]:
    """A model behind an ``LLM``, tried and warm, its decode steps captured where they can be."""
    config = stage.configs[name]()
    weights = compute.weights(config)
    with torch.device(stage.link.device), torch.no_grad():
        made = AutoModelForCausalLM.from_config(config, dtype=stage.dtype, attn_implementation=NAME)
    model = HybridModel(made.eval().requires_grad_(False), name=name, backend=stage.backend())
    played: dict[str, Any] = {}
    if stage.link.device == "cpu":
        played["copy_engine"] = CudaLink(api=stage.link.api, pci_bus_id="played")
    with LLM(
        model,
        stage.link.device,
        device_blocks,
        host_blocks,
        max_batched_tokens=stage.chunk,
        max_running=max_running,
        cuda_graphs=False,
        **played,
    ) as llm:
        stage.link.on_device(llm.cache.arenas[0])
        subject = Served(llm, Kept(stage.capture()), weights)
        _warm_up(stage, subject, max_running)
        yield subject


def _warm_up(stage: Stage, subject: Served, max_running: int) -> None:
    """A chunk and a bit of prompt, whose kernels are then there; graphs; the prompt from the device and the host."""
    llm, prompt = subject.llm, random_tokens(subject.llm.model, stage.chunk + stage.chunk // 2, seed=1)
    try:
        first_token(llm, "warm up", prompt)
    except AttentionUnavailable as problem:  # such as kernels that nobody can compile here
        llm.engine.drop_all()
        llm.model.fall_back(problem)
        first_token(llm, "warm up", prompt)
    graphs = DecodeGraphs(llm.model, llm.cache, max_running, capture=subject.kept)
    graphs.capture()
    llm.graphs = llm.engine.graphs = graphs
    stats = llm.model.attention_stats()
    parts = [f"{stats['backend']} attention"]
    if stats["backend"] == "reference":
        parts.append(stats["reason"])
    parts += graphs.stats()["reasons"]
    subject.note = "; ".join(parts)
    for again in ("device", "host"):
        first_token(llm, f"warm up, {again}", prompt)
        forget(llm)


def random_tokens(model: HybridModel, count: int, seed: int) -> np.ndarray:
    """int32 [count]; the lowest ids are left out, where families keep their special tokens."""
    return np.random.default_rng(seed).integers(10, model.vocab_size, count).astype(np.int32)


@dataclass(frozen=True)
class FirstToken:
    """When it came, from ``add`` on, and how many tokens of its prompt were found in each tier."""

    ttft_s: float
    cached_tokens: dict[str, int]


def first_token(llm: LLM, name: str, prompt: np.ndarray) -> FirstToken:
    """Serves a request of one new token alone, until its last copy has ended."""
    begun, seconds, reports = time.perf_counter(), 0.0, list[FinishedRequest]()
    llm.engine.add(Request(name, prompt, 1), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    while llm.engine.has_work():
        output = step(llm)
        if len(output.token_ids):
            seconds = time.perf_counter() - begun
        reports += output.finished
    return FirstToken(seconds, reports[0].cached_tokens)


def step(llm: LLM) -> StepOutput:
    """A step on this thread; raises what the last one's forward has raised."""
    output = llm.engine.step()
    output.check()
    return output


def forget(llm: LLM) -> None:
    """The device's pools lose what they have cached; the host's do not."""
    pools = llm.cache.core.coordinator.pools
    pools.forget_all()
