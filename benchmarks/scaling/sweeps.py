"""The four sweeps: which points there are, and what one point measures."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.micro.rows import export
from benchmarks.micro.shapes import BLOCK_TOKENS, SHAPES, age, books, prompt
from kvtier import CacheSpec, Request, Scheduler

ROOM_TOKENS = 1 << 12
"""That a request may generate: it goes on while others are admitted and while it is measured."""
PREFILL_TOKENS = 1 << 16
"""Tokens of prompts in one step while a point is prepared."""


@dataclass(frozen=True)
class Sweep:
    """One panel: ``name`` is what varies over ``values``; lines are ``shapes`` of ``benchmarks.micro``."""

    name: str
    label: str
    values: tuple[int, ...]
    quick: tuple[int, ...]
    shapes: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """What a step is measured on. ``pool_blocks``: usable blocks of every group, full of cached content; None: as many
    as are needed, empty."""

    sweep: str
    shape: str
    value: int
    spec: CacheSpec
    running: int
    context: int
    pool_blocks: int | None = None


SWEEPS = (
    Sweep("running", "running requests (4,096 tokens each)", (16, 64, 256, 512, 1024, 2048), (4, 16), ("L", "G", "X")),
    Sweep(
        "context",
        "context of each request (tokens, 64 running)",
        (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 17, 1 << 19),
        (1 << 10, 1 << 12),
        ("L", "G", "X"),
    ),
    Sweep(
        "pool",
        "blocks in each pool (full of cached content)",
        (1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20),
        (1 << 12, 1 << 13),
        ("L", "G", "X"),
    ),
    Sweep("groups", "groups (one full, the others windows)", (1, 2, 3, 4, 5, 6), (1, 6), ("X",)),
)


def points(sweep: Sweep, quick: bool) -> Iterator[Point]:
    """All points of a sweep; ``quick`` ones are few and small."""
    running, pool_running, context = (4, 4, 512) if quick else (256, 64, 4096)
    for shape in sweep.shapes:
        for value in sweep.quick if quick else sweep.values:
            spec = SHAPES[shape]
            if sweep.name == "running":
                yield Point(sweep.name, shape, value, spec, value, context)
            elif sweep.name == "context":
                yield Point(sweep.name, shape, value, spec, pool_running, value)
            elif sweep.name == "pool":
                yield Point(sweep.name, shape, value, spec, pool_running, context, value)
            else:
                yield Point(sweep.name, shape, value, CacheSpec(spec.groups[:value]), running, context)


def measure(point: Point, repeats: int) -> dict[str, Any]:
    """Microseconds of schedule + commit, every array asked for, and the same without page lists and block tables."""
    scheduler = _decoding(point)
    ids = np.ones(point.running, np.int64)
    figures = {"sweep": point.sweep, "shape": point.shape, "value": point.value, "unit": "us", "repeats": repeats}
    for name, pages in (("with_pages", True), ("without_pages", False)):
        gc.collect()
        seconds = list(_steps(scheduler, point.spec.names, ids, pages, repeats + repeats // 4))
        kept = [value * 1e6 for value in seconds[repeats // 4 :]]  # the first ones warm caches
        figures[name] = {"median": statistics.median(kept), "least": min(kept), "most": max(kept)}
    return figures


def _steps(scheduler: Scheduler, names: tuple[str, ...], ids: np.ndarray, pages: bool, count: int) -> Iterator[float]:
    for _ in range(count):
        begun = time.perf_counter()
        step = scheduler.schedule()
        export(step, names, pages)
        scheduler.commit(step, ids)
        yield time.perf_counter() - begun


def _decoding(point: Point) -> Scheduler:
    """A scheduler whose requests all decode, lengths staggered over a block."""
    blocks = point.pool_blocks
    if blocks is None:
        blocks = point.running * (-(-(point.context + ROOM_TOKENS) // BLOCK_TOKENS) + 1)
    cache = books(point.spec, blocks)
    if point.pool_blocks is not None:
        age(cache.core.coordinator.pools)
    scheduler = Scheduler(cache, max_batched_tokens=PREFILL_TOKENS, max_running=point.running)
    for r in range(point.running):
        scheduler.add(Request(f"{r}", prompt(r, point.context - 2 * BLOCK_TOKENS + r % BLOCK_TOKENS), ROOM_TOKENS))
    while True:
        step = scheduler.schedule()
        scheduler.commit(step, np.ones(len(step.sample_rows), np.int64))
        if step.num_tokens == len(step.request_ids) == point.running:
            return scheduler
