"""A long prompt back from the host tier: from ``add`` to the step that may use it, through the whole cache.

No model runs: what a request waits for between its arrival and its first forward is matching, admission, submission,
the copies, and seeing them end. The time to first token adds one forward over the prompt's last tokens to that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu.figures import Budget, Figure
from benchmarks.gpu.link import GIB, Setup, load_peak, on_gpu
from benchmarks.gpu.rig import GROUPS
from kvtier import CacheSpec, KVCache, Request, Scheduler
from kvtier.cpu_offload.engines.cuda.link import CudaLink

MODELS = ("gpt-oss-20b", "Gemma-3-12B", "Llama-3.1-8B")
CHUNK = 8_192
SLACK_S = 3e-3
SHARE = 0.97


def spec_of(model: str) -> CacheSpec:
    """All groups of a model."""
    return CacheSpec([g for name, g in GROUPS.items() if name == model or name.startswith(f"{model} ")])


def run(budget: Budget, setup: Setup | None = None) -> Iterator[Figure]:
    """Each model's reload beside what its bytes take at the link's own peak."""
    setup = setup or on_gpu()
    peak = load_peak(setup)
    for model in MODELS:
        if budget.left_s < 20.0:
            yield Figure("reload", f"{model}: not run, no time is left", 0.0, "ms", at_least=1.0)
            continue
        yield from one(setup, model, peak)


def one(setup: Setup, model: str, peak: float) -> Iterator[Figure]:
    """A prompt is computed (by nobody), stored, forgotten by the device, and asked for again."""
    spec, tokens = spec_of(model), setup.tokens
    chunk = min(CHUNK, tokens)
    device = {g.name: g.peak_blocks(tokens + chunk) + chunk // g.block_tokens + 4 for g in spec.groups}
    host = {g.name: g.peak_blocks(tokens) + chunk // g.block_tokens + 4 for g in spec.groups}
    link = None if setup.device != "cpu" else CudaLink(api=setup.api, pci_bus_id="played")
    with KVCache(
        spec, device=setup.device, device_blocks=device, host_blocks=host, key_secret=b"gpu", copy_engine=link
    ) as cache:
        setup.on_device(cache.arenas[0])
        scheduler = Scheduler(cache, max_batched_tokens=chunk, max_running=2)
        prompt = np.random.default_rng(0).integers(0, 100_000, tokens + 1).astype(np.int32)
        serve(scheduler, Request("first", prompt, 1))
        took, moved = [], 0
        for i in range(setup.repeats):
            cache.core.coordinator.pools.forget_all()
            before = cache.stats().transfers.loaded_bytes
            took.append(serve(scheduler, Request(f"again {i}", prompt, 1)))
            moved = cache.stats().transfers.loaded_bytes - before
        seconds, size = statistics.median(took), moved / GIB
        must = 1e3 * (moved / (SHARE * peak * 1e9) + SLACK_S)
        rate = f"{size:.2f} GiB, {moved / seconds / 1e9:.1f} GB/s of {peak:.1f}"
        yield Figure(
            "reload", f"{model}, {tokens:,} tokens until they can be used", 1e3 * seconds, "ms", at_most=must, note=rate
        )


def serve(scheduler: Scheduler, request: Request) -> float:
    """Serves one request with zeros; seconds from ``add`` to the first step that computes something."""
    begun, first = time.perf_counter(), 0.0
    scheduler.add(request)
    while scheduler.has_work():
        step = scheduler.schedule()
        if step.num_tokens and not first:
            first = time.perf_counter() - begun
        scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
        if not step.num_tokens:
            scheduler.wait(1.0)
    return first
