"""Attention to latents (MLA) at DeepSeek-V3's sizes: what FlashInfer takes, and how far it is from the torch reference.

Pools, steps and pages are real; their content is random, and there is no model. Both backends read the same pools.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import layouts, serving
from benchmarks.gpu.figures import Budget, Figure
from benchmarks.gpu.serving import Stage
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Scheduler
from kvtier.attention import reference
from kvtier.attention._flashinfer_latents import LATENT_DIMS
from kvtier.attention.choice import choose
from kvtier.attention.flashinfer import FlashInfer
from kvtier.coordinator.step import Step
from kvtier.machine.errors import AttentionUnavailable

SECTION = "latents"
REPEATS = 5
MOST_OFF = 1e-2
"""Root mean square of the difference over the deviation of the reference's output: the kernels round weights to
bfloat16 before they multiply."""


@dataclass(frozen=True)
class Size:
    """``layers``: of the pools, so that no layer's latents are left in a cache of the GPU's by the layer before."""

    heads: int = 128
    layers: int = 4
    rows: int = 64
    context: int = 4096
    chunks: int = 4


def run(budget: Budget, stage: Stage | None = None, size: Size | None = None) -> Iterator[Figure]:
    """The last chunk of a long prompt, and a decode step of many requests."""
    stage, size = stage or serving.on_gpu(), size or Size()
    rank, rotated = LATENT_DIMS
    group = GroupSpec("latent", FullAttention(), size.layers, 1, rank, "bfloat16", head_dim_v=rotated)
    if stage.needs:
        how: Any = {"latents": {group.name}, "heads": size.heads}
        try:
            choose(stage.needs, stage.link.device, [group], **how)
        except AttentionUnavailable as problem:
            yield Figure(SECTION, "not run", 0.0, "", at_least=1.0, note=str(problem))
            return
    flash = FlashInfer(stage.link.device, check_indices=True)
    new_tokens, pages = layouts.room(group, size.rows, size.context, stage.chunk)
    with KVCache(CacheSpec([group]), device=stage.link.device, device_blocks={group.name: pages}) as cache:
        views = [cache.kv(group.name, i) for i in range(group.num_layers)]
        for k, v in views:
            k.normal_()
            v.normal_()
        scheduler = Scheduler(cache, max_batched_tokens=stage.chunk, max_running=size.rows)
        asked = size.rows, size.context, size.chunks * stage.chunk, new_tokens
        for what, step in layouts.steps(scheduler, *asked):
            yield from _attended(stage, flash, group, views, step, size.heads, what)


@torch.no_grad()
def _attended(
    stage: Stage, flash: FlashInfer, group: GroupSpec, views: Any, step: Step, heads: int, what: str
) -> Iterator[Figure]:
    """One step over all layers, and over the first by the reference."""
    query = torch.randn(step.num_tokens, heads, sum(group.head_dims), device=stage.link.device).bfloat16()
    scale, (k0, v0) = sum(group.head_dims) ** -0.5, views[0]
    plain = reference.PagedBatch.from_step(step, group, stage.link.device)
    want = reference.attend_latent(query, k0, v0, plain, scale=scale)
    stage.clock.wait()
    begun = time.perf_counter()
    batch = flash.PagedBatch.from_step(step, group, stage.link.device)
    got = flash.attend_latent(query, k0, v0, batch, scale=scale)
    planned = time.perf_counter() - begun
    yield Figure(SECTION, f"{what}, off the reference", off(got, want), "", at_most=MOST_OFF)
    yield Figure(SECTION, f"{what}, arrays, plan and first layer, on the host", 1e3 * planned, "ms")

    def every_layer() -> None:
        for k, v in views:
            flash.attend_latent(query, k, v, batch, scale=scale)

    every_layer()
    first = stage.clock.mark()
    for _ in range(REPEATS):
        every_layer()
    seconds = stage.clock.seconds(first, stage.clock.mark()) / REPEATS / group.num_layers
    tokens = int(step.seq_lens.sum())
    read = tokens * group.token_bytes / group.num_layers / max(seconds, 1e-9) / 1e9
    yield Figure(SECTION, f"{what}, FlashInfer", 1e6 * seconds, "us a layer", note=f"latents at {read:,.0f} GB/s")
    first = stage.clock.mark()
    reference.attend_latent(query, k0, v0, plain, scale=scale)
    torch_s = stage.clock.seconds(first, stage.clock.mark())
    yield Figure(SECTION, f"{what}, torch reference", 1e6 * torch_s, "us a layer")


def off(got: Tensor, want: Tensor) -> float:
    """How far ``got`` is from ``want``; infinity where it is not finite."""
    found = float((got.float() - want.float()).square().mean().sqrt() / want.float().std())
    return found if found == found else float("inf")
