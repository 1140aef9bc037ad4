"""The same attention over pages that lie block by block, all layers of a block together, or layer by layer.

Steps come from a real scheduler; the pages of both layouts have the same ids. Block-major pages are the pools' own
views, which FlashInfer reads with strides; contiguous ones are what a cache with a tensor per layer has.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.serving import Served, Stage
from kvtier import CacheSpec, KVCache, Request, Scheduler
from kvtier.coordinator.step import Step
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import GroupSpec

SECTION = "layouts"
REPEATS = 5
CHUNKS = 4
"""Of the long prompt."""
Views = Sequence[tuple[Tensor, Tensor]]


def run(stage: Stage, subject: Served, model: str, rows: int, context: int) -> Iterator[Figure]:
    """The last chunk of a long prompt, and a decode step of ``rows`` requests of ``context`` tokens."""
    text = subject.llm.model.config.get_text_config(decoder=True)
    group = next(g for g in subject.spec.groups if g.attention.kind is Kind.FULL)
    new_tokens, pages = room(group, rows, context, stage.chunk)
    with KVCache(CacheSpec([group]), device=stage.link.device, device_blocks={group.name: pages}) as cache:
        strided = [cache.kv(group.name, i) for i in range(group.num_layers)]
        together = [torch.empty(2, *k.shape, dtype=k.dtype, device=k.device) for k, _ in strided]
        contiguous = [(kv[0], kv[1]) for kv in together]
        for k, v in [*strided, *contiguous]:
            k.normal_()
            v.normal_()
        attend = Attend(stage, subject, text.num_attention_heads, group)
        scheduler = Scheduler(cache, max_batched_tokens=stage.chunk, max_running=rows)
        for what, step in steps(scheduler, rows, context, CHUNKS * stage.chunk, new_tokens):
            per_layer = {
                name: attend.seconds(step, views) / group.num_layers
                for name, views in (("block-major", strided), ("per layer", contiguous))
            }
            for name, value in per_layer.items():
                yield Figure(SECTION, f"{model} {what}, pages {name}", 1e6 * value, "us a layer")
            more = 100 * (per_layer["block-major"] / per_layer["per layer"] - 1)
            yield Figure(SECTION, f"{model} {what}, block-major takes", more, "% longer")
            yield Figure(
                SECTION, f"{model} {what}, arrays and plan of one group, eager", attend.plan_us(step, strided), "us"
            )


def room(group: GroupSpec, rows: int, context: int, chunk: int) -> tuple[int, int]:
    """(tokens that each request generates at most: the first does while the last is in chunks, blocks of the pool)"""
    new_tokens = rows * context // (chunk - rows) + rows + 8
    pages = (max(rows * (context + new_tokens), CHUNKS * chunk) + chunk) // group.block_tokens + rows
    return new_tokens, pages


def steps(scheduler: Scheduler, rows: int, context: int, prompt: int, new_tokens: int) -> Iterator[tuple[str, Step]]:
    """A long prompt's last chunk, then a decode of ``rows`` requests, each before it is committed; nothing is computed.

    ``prompt``: tokens of the long one; ``context``: of the others, which generate ``new_tokens`` at most.
    """
    rng = np.random.default_rng(0)
    scheduler.add(Request("long", rng.integers(0, 1000, prompt), 1))
    while scheduler.has_work():
        step = scheduler.schedule()
        if len(step.sample_rows):
            yield f"chunk of {step.num_tokens:,} up to {prompt:,} tokens", step
        _commit(scheduler, step)
    for i in range(rows):
        scheduler.add(Request(f"r{i}", rng.integers(0, 1000, context), new_tokens))
    step = scheduler.schedule()
    while not step.num_tokens == len(step.request_ids) == rows:
        _commit(scheduler, step)
        if not scheduler.has_work():
            raise RuntimeError(f"{rows} requests never decoded together")
        step = scheduler.schedule()
    yield f"decode of {rows} x {context:,} tokens", step
    _commit(scheduler, step)


def _commit(scheduler: Scheduler, step: Step) -> None:
    scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))


class Attend:
    """The model's attention backend, over given pages."""

    def __init__(self, stage: Stage, subject: Served, heads: int, group: GroupSpec) -> None:
        model = subject.llm.model
        self._clock, self._backend, self._device = stage.clock, model.backend, model.device
        self._group, self._heads = group, heads
        self._options: dict[str, Any] = {"scale": group.head_dim**-0.5}
        if any(name.endswith("sinks") for name, _ in model.model.named_parameters()):
            self._options["sinks"] = torch.zeros(heads, device=model.device)

    def _query(self, step: Step) -> Tensor:
        shape = step.num_tokens, self._heads, self._group.head_dim
        return torch.randn(shape, device=self._device).to(getattr(torch, self._group.dtype))

    def _batch(self, step: Step) -> Any:
        return self._backend.PagedBatch.from_step(step, self._group, self._device)

    @torch.no_grad()
    def seconds(self, step: Step, views: Views) -> float:
        """Attention of all layers, planned already."""
        query, batch = self._query(step), self._batch(step)

        def every_layer() -> None:
            for k, v in views:
                self._backend.attend(query, k, v, batch, **self._options)

        every_layer()
        first = self._clock.mark()
        for _ in range(REPEATS):
            every_layer()
        return self._clock.seconds(first, self._clock.mark()) / REPEATS

    @torch.no_grad()
    def plan_us(self, step: Step, views: Views) -> float:
        """What the host does for a step before its first layer's kernel, beyond what it does for every layer."""
        query, (k, v) = self._query(step), views[0]
        found = []
        for _ in range(REPEATS):
            self._clock.wait()
            moments = [time.perf_counter()]
            batch = self._batch(step)
            for _ in range(2):
                self._backend.attend(query, k, v, batch, **self._options)
                moments.append(time.perf_counter())
            found.append(2 * moments[1] - moments[0] - moments[2])
        return 1e6 * statistics.median(found)
