"""Decode steps of many requests, one step at a time: how long, how much of it the GPU idles, what the host does.

The engine is the runner's own, with eager stores going on beside it. What the GPU needs is what its captured graph
takes when it is replayed again and again with no host between; the rest of a step it idles, or chooses tokens, which
is counted as idling too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import interference, layouts, profile, serving
from benchmarks.gpu.figures import Budget, Figure
from benchmarks.gpu.serving import Served, Stage, random_tokens
from kvtier import Request
from kvtier.geometry.spec import CacheSpec
from runner.api.llm import LLM
from runner.sampling.params import SamplingParams

MODEL = "gpt-oss-20b"
SECTION = "decode"
REPLAYS = 20
LAYOUTS_NEED_S = 10.0


@dataclass(frozen=True)
class Size:
    """``steps``: of one measurement. ``settle``: before the first."""

    running: int = 64
    context: int = 2048
    steps: int = 60
    settle: int = 30

    @property
    def measured(self) -> int:
        """Steps of all measurements together."""
        return self.steps + interference.steps(self.steps)

    def new_tokens(self, chunk: int) -> int:
        """Of each request: the first generates while the last's prompt is still computed, ``chunk`` tokens a step."""
        prompts = self.running * self.context // (chunk - self.running) + self.running
        return prompts + self.settle + self.measured + 1


def run(budget: Budget, stage: Stage | None = None, size: Size | None = None) -> Iterator[Figure]:
    """Steps alone, steps beside copies, and the attention in them over pages that lie otherwise."""
    stage, size = stage or serving.on_gpu(), size or Size()
    device, host = _blocks(serving.spec_of(stage, MODEL), stage.chunk, size)
    if problem := serving.shortage(stage, MODEL, device):
        yield Figure(SECTION, f"{MODEL}: not run", 0.0, "", at_least=1.0, note=problem)
        return
    with serving.served(stage, MODEL, device, host, size.running) as subject:
        start(subject.llm, size, stage.chunk)
        yield from alone(stage, subject, size)
        yield from interference.run(stage, subject, size.steps)
        subject.llm.engine.drop_all()
        if budget.left_s < LAYOUTS_NEED_S:
            yield Figure("layouts", "not run: no time is left", 0.0, "", at_least=1.0)
            return
        yield from layouts.run(stage, subject, MODEL, size.running, 2 * size.context)


def _blocks(spec: CacheSpec, chunk: int, size: Size) -> tuple[dict[str, int], dict[str, int]]:
    """Room for all requests to their ends, and in the host tier for their prompts."""
    most, rows = size.context + size.new_tokens(chunk), size.running
    device = {g.name: rows * (g.peak_blocks(most) + 1) + chunk // g.block_tokens + 4 for g in spec.groups}
    host = {g.name: rows * (g.peak_blocks(most) + 1) + 2 * chunk // g.block_tokens + 4 for g in spec.groups}
    return device, host


def start(llm: LLM, size: Size, chunk: int) -> None:
    """All requests are past their prompts and generate."""
    new_tokens = size.new_tokens(chunk)
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    for i in range(size.running):
        prompt = random_tokens(llm.model, size.context, seed=100 + i)
        llm.engine.add(Request(f"decode {i}", prompt, new_tokens), params)
    before = -1
    while llm.engine.generated_tokens - before != size.running:
        if before >= 0 and not llm.engine.has_requests():
            raise RuntimeError(f"{size.running} requests never decoded together")
        before = llm.engine.generated_tokens
        serving.step(llm)
    for _ in range(size.settle):
        serving.step(llm)


def alone(stage: Stage, subject: Served, size: Size) -> Iterator[Figure]:
    """Steps with nothing beside them."""
    llm, what = subject.llm, f"{MODEL}, {size.running} requests of {size.context:,} tokens"
    with Spans(llm) as spans:
        walls = [_seconds(lambda: serving.step(llm)) for _ in range(size.steps)]
    stage.clock.wait()
    wall = statistics.fmean(walls)
    note = f"median {1e3 * statistics.median(walls):.3g}, {size.running / wall:,.0f} tokens/s, {subject.note}"
    yield Figure(SECTION, f"{what}, a step", 1e3 * wall, "ms", note=note)
    captured = llm.graphs is not None and size.running in llm.graphs.stats()["captured"]
    yield Figure(SECTION, "steps run as captured graphs", float(captured), "", at_least=1.0, note=subject.note)
    if captured:
        busy = _replay_s(stage, subject.kept.replays[0])
        yield Figure(SECTION, "the graph of a step, replayed alone", 1e3 * busy, "ms")
        yield from profile.of(subject.kept.replays[0], stage.clock.wait, on_gpu=stage.link.device != "cpu")
        yield Figure(SECTION, "of a step, the GPU idles", 100 * (1 - busy / wall), "%", at_most=5.0)
    us = {name: 1e6 * spent / size.steps for name, spent in spans.spent().items()}
    host = sum(walls) - spans.waiting_s()
    parts = ", ".join(f"{name} {value:.0f} us" for name, value in us.items())
    yield Figure(SECTION, "of a step, the host works", 100 * host / sum(walls), "%", note=parts)
    if "refill" in us:
        groups = len(subject.spec.groups)
        yield Figure(SECTION, f"arrays and plans of {groups} groups, a step", us["refill"], "us")


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _replay_s(stage: Stage, replay: Callable[[], None]) -> float:
    """What one replay takes among others. It writes what the last step wrote, where that wrote it."""
    replay()
    first = stage.clock.mark()
    for _ in range(REPLAYS):
        replay()
    return stage.clock.seconds(first, stage.clock.mark()) / REPLAYS


class Spans:
    """When the parts of a step begin and end on the host; watches them while it is entered."""

    def __init__(self, llm: LLM) -> None:
        self._watched = [(llm.scheduler, "schedule"), (llm.model, "forward"), (llm.scheduler, "commit")]
        if llm.graphs is not None:
            self._watched.append((llm.graphs, "forward"))
        if hasattr(llm.model.backend, "refill"):
            self._watched.append((llm.model.backend, "refill"))
        self._found: list[tuple[str, float, float]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Spans:
        for owner, name in self._watched:
            self._stack.enter_context(self._watch(owner, name))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @contextmanager
    def _watch(self, owner: Any, name: str) -> Iterator[None]:
        inner = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                self._found.append((name, begun, time.perf_counter()))

        setattr(owner, name, call)
        try:
            yield
        finally:
            delattr(owner, name)

    def spent(self) -> dict[str, float]:
        """Seconds by part; "refill" is within "forward"."""
        sums: dict[str, float] = {}
        for name, begun, ended in self._found:
            sums[name] = sums.get(name, 0.0) + ended - begun
        return sums

    def waiting_s(self) -> float:
        """Seconds from a forward that is launched to its tokens on the host."""
        total, launched = 0.0, 0.0
        for name, begun, ended in self._found:
            if name == "forward":
                launched = ended
            elif name == "commit":
                total += begun - launched
        return total
