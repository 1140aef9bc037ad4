"""Time to first token of a long prompt: computed, loaded from the host, and of its last token alone.

All through the runner, from ``Engine.add`` to the token on the host, with the layers of real models.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt

from benchmarks.gpu import serving
from benchmarks.gpu.chip import peak_flops
from benchmarks.gpu.figures import Budget, Figure
from benchmarks.gpu.link import load_peak
from benchmarks.gpu.serving import GIB, Served, Stage, first_token, forget, random_tokens
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from runner.plan import compute

MODELS = ("gpt-oss-20b", "Gemma-3-12B", "Llama-3.1-8B")
SLACK_S = 3e-3
SHARE = 0.97
RATIO = 30.0
BUSY_SHARE = 40.0
"""Percent of the dense peak at which a computed prompt is a fair rival."""
NEEDS_S = 25.0


def run(budget: Budget, stage: Stage | None = None) -> Iterator[Figure]:
    """Each model's first token, and the marks that follow from the link's own peak and the chip's."""
    stage = stage or serving.on_gpu()
    peak = load_peak(stage.link)
    for model in MODELS:
        if budget.left_s < NEEDS_S:
            yield Figure("ttft", f"{model}: not run, no time is left", 0.0, "", at_least=1.0)
            continue
        spec = serving.spec_of(stage, model)
        device, host = _blocks(stage, spec)
        if problem := serving.shortage(stage, model, device):
            yield Figure("ttft", f"{model}: not run", 0.0, "", at_least=1.0, note=problem)
            continue
        broke = ""
        try:
            yield from _served(stage, model, device, host, peak)
        except Exception as problem:  # the other models have figures of their own
            traceback.print_exc()
            broke = f"{type(problem).__name__}: {problem}"[:300]
        if broke:
            yield Figure("ttft", f"{model}: broke", 0.0, "", at_least=1.0, note=broke)


def _served(
    stage: Stage, model: str, device: Mapping[str, int], host: Mapping[str, int], peak: float
) -> Iterator[Figure]:
    """One model's figures; nothing holds its memory afterwards."""
    with serving.served(stage, model, device, host, max_running=2) as subject:
        attention = subject.llm.model.attention_stats()
        if stage.needs in ("", attention["backend"]):
            yield from one(stage, model, subject, peak)
        else:  # the reference would take all the time that there is
            yield Figure("ttft", f"{model}: not run", 0.0, "", at_least=1.0, note=attention["reason"])


def _blocks(stage: Stage, spec: CacheSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Room for one prompt and the chunk that is computed, and in the host tier for what was tried before it.

    Windows have room for what two prompts before have left as well: a chunk would be cut rather than push that out.
    """
    tokens, chunk = stage.link.tokens, stage.chunk
    device = {
        g.name: g.peak_blocks(tokens + chunk)
        + chunk // g.block_tokens
        + (0 if g.attention.kind is Kind.FULL else 2 * g.peak_blocks(tokens))
        + 4
        for g in spec.groups
    }
    host = {g.name: g.peak_blocks(tokens) + 3 * chunk // g.block_tokens + 4 for g in spec.groups}
    return device, host


def one(stage: Stage, model: str, subject: Served, peak: float) -> Iterator[Figure]:
    """One model's figures."""
    llm, tokens = subject.llm, stage.link.tokens
    prompt = random_tokens(llm.model, tokens + 1, seed=2)
    cold = first_token(llm, "cold", prompt).ttft_s
    flops = compute.weight_flops(subject.weights, tokens + 1) + compute.attention_flops(
        llm.model.config, subject.spec, tokens + 1
    )
    rate = f"{flops / 1e15:.3g} PFLOP, {flops / cold / 1e12:.0f} TFLOP/s, {subject.note}"
    yield Figure("ttft", f"{model}, {tokens:,} tokens computed", 1e3 * cold, "ms", note=rate)
    top = peak_flops(stage.chip)
    share = None if top is None else 100 * flops / cold / top
    unknown = f"the dense peak of {stage.chip!r} is not known here" if share is None else ""
    yield Figure("ttft", f"{model}, computing, of the dense peak", share or 0.0, "%", note=unknown)
    tails, loads, moved = [], [], 0
    for i in range(stage.link.repeats):
        tails.append(_hit(subject, f"device {i}", prompt, {"device": tokens, "host": 0}))
        forget(llm)
        before = llm.cache.stats().transfers.loaded_bytes
        loads.append(_hit(subject, f"host {i}", prompt, {"device": 0, "host": tokens}))
        moved = llm.cache.stats().transfers.loaded_bytes - before
    tail, load = statistics.median(tails), statistics.median(loads)
    yield Figure("ttft", f"{model}, all but one token on the device", 1e3 * tail, "ms")
    must = 1e3 * (moved / (SHARE * peak * 1e9) + tail + SLACK_S)
    size = f"{moved / GIB:.2f} GiB, {moved / load / 1e9:.1f} GB/s of {peak:.1f}"
    yield Figure("ttft", f"{model}, all but one token from the host", 1e3 * load, "ms", at_most=must, note=size)
    yield ratio(model, cold / load, share, serving.is_hybrid(subject.spec))


def ratio(model: str, value: float, share: float | None, hybrid: bool) -> Figure:
    """How many times sooner the loaded prompt answers; a mark only where computing it runs as well as it should."""
    name, unit = f"{model}, loaded against computed", "times sooner"
    if not hybrid:
        return Figure("ttft", name, value, unit, note="no mark: not a hybrid")
    if share is None or share < BUSY_SHARE:
        reason = f"no mark: computing does not show {BUSY_SHARE:.0f} % of the dense peak"
        return Figure("ttft", name, value, unit, note=reason)
    return Figure("ttft", name, value, unit, at_least=RATIO)


def _hit(subject: Served, name: str, prompt: npt.NDArray[Any], expected: Mapping[str, int]) -> float:
    """Seconds to the first token of a prompt that is cached where it should be."""
    output = first_token(subject.llm, name, prompt)
    if dict(output.cached_tokens) != dict(expected):
        raise RuntimeError(f"request {name!r} found {output.cached_tokens} tokens, not {expected}")
    return output.ttft_s
