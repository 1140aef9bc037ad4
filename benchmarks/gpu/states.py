"""Recurrent layers of real shapes, one layer at a time: by FlashInfer's kernels, and by transformers' code.

A decode is captured and replayed: each request goes on from a state where it lies, as 63 of 64 steps do. What a layer
must move is each state once in and once out. A prompt runs eagerly, from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gpu import serving
from benchmarks.gpu.figures import Budget, Figure
from benchmarks.gpu.kernels import Kernel, StateKernel
from benchmarks.gpu.serving import Stage
from benchmarks.models import RECURRENT
from kvtier.geometry.kinds import Part, RecurrentState
from runner.model.attention import NAME
from runner.model.hybrid import HybridModel
from runner.model.states import Call, Mixer

SECTION = "states"
ROWS = 1, 64, 256
REPLAYS = 20
PROMPT = 4096


def kernels() -> set[Kernel | StateKernel]:
    """Mamba2's; those of the delta rule are CuTe's, which are compiled as they are first used."""
    found = set[Kernel | StateKernel]()
    for make in RECURRENT.values():
        config = make()
        if (heads := getattr(config, "mamba_d_head", None)) is not None:
            found.add(StateKernel(torch.bfloat16, int(heads), int(config.mamba_d_state)))
    return found


def run(
    budget: Budget, stage: Stage | None = None, rows: tuple[int, ...] = ROWS, prompt: int = PROMPT
) -> Iterator[Figure]:
    """Of each model a decode of some numbers of requests, and a prompt."""
    stage = stage or serving.on_gpu()
    for name, make in RECURRENT.items():
        yield from _layer(stage, name, make(), rows, prompt)


@torch.no_grad()
def _layer(stage: Stage, name: str, config: Any, rows: tuple[int, ...], prompt: int) -> Iterator[Figure]:
    with torch.device(stage.link.device):
        made = AutoModelForCausalLM.from_config(config, dtype=stage.dtype, attn_implementation=NAME)
    model = HybridModel(made.eval().requires_grad_(False), name=name, backend=stage.backend())
    yield Figure(SECTION, f"{name}: FlashInfer's kernels", float(not model.pooled), "", at_least=1.0, note=model.pooled)
    state = model.spec(64).group("state").attention
    assert isinstance(state, RecurrentState)
    module: Any = next(iter(model.mixers.modules))
    mixer: Mixer = module.forward
    ways = {"transformers' code": None} | ({"FlashInfer": mixer.pooled} if mixer.pooled else {})
    for way, pooled in ways.items():
        for count in rows:
            call, hidden = _call(mixer, pooled, state.parts, stage, count), _random(model, count, 1)
            at = torch.arange(1, count + 1, dtype=torch.int32, device=model.device)
            seconds = _replayed(stage, partial(call.decode, hidden, at, at))
            moved = 2 * count * state.layer_bytes
            note = f"{moved / 1e6:,.0f} MB of states in and out: {moved / seconds / 1e9:,.0f} GB/s"
            yield Figure(SECTION, f"{name}: a layer's decode of {count} by {way}", 1e6 * seconds, "us", note=note)
        call, hidden = _call(mixer, pooled, state.parts, stage, 1), _random(model, 1, prompt)
        seconds = _timed(stage, partial(call, hidden, None), 2)
        yield Figure(SECTION, f"{name}: a layer's {prompt:,} tokens by {way}", 1e6 * seconds, "us")


def _call(mixer: Mixer, pooled: Any, parts: tuple[Part, ...], stage: Stage, rows: int) -> Call:
    device = stage.link.device
    pools = [torch.zeros(rows + 1, *part.shape, dtype=getattr(torch, part.dtype), device=device) for part in parts]
    return Call(mixer.inner, mixer.argument, parts, pools, {}, pooled)


def _random(model: HybridModel, rows: int, tokens: int) -> Tensor:
    size = model.config.get_text_config(decoder=True).hidden_size
    return torch.randn(rows, tokens, size, device=model.device, dtype=torch.float32).to(model.dtype)


def _replayed(stage: Stage, work: Callable[[], Tensor]) -> float:
    replay, _ = stage.capture()(work)
    return _timed(stage, replay, REPLAYS)


def _timed(stage: Stage, work: Callable[[], object], times: int) -> float:
    work()
    first = stage.clock.mark()
    for _ in range(times):
        work()
    return stage.clock.seconds(first, stage.clock.mark()) / times
