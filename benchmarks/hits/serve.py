"""Serves a workload with kvtier's own scheduler and pools; answers are forced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hits.workloads import Ask
from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow

AHEAD = 64
"""Requests that are looked at for one whose session is free."""


class Shape(NamedTuple):
    """Layers of a model: full ones, local ones, and the bytes of K and V of a token in one layer at full size."""

    full: int
    local: int
    attention: Any
    layer_bytes: int

    def spec(self, block_tokens: int) -> CacheSpec:
        """With one head of one number a layer: 4 bytes a token."""
        layers = [GroupSpec("full", FullAttention(), self.full, 1, 1, block_tokens=block_tokens, dtype="bfloat16")]
        if self.local:
            layers.append(
                GroupSpec("local", self.attention, self.local, 1, 1, block_tokens=block_tokens, dtype="bfloat16")
            )
        return CacheSpec(layers)

    def working_set(self, distinct_tokens: int, sessions: int) -> int:
        """Bytes, with ``spec``: full layers of all tokens, and one window (half a chunk) a session."""
        span = 0
        if self.local:
            span = self.attention.span_tokens // (1 if isinstance(self.attention, SlidingWindow) else 2)
        return 4 * (distinct_tokens * self.full + sessions * self.local * span)


SHAPES = {
    "gemma3": Shape(10, 52, SlidingWindow(1024), 8192),
    "gptoss": Shape(18, 18, SlidingWindow(128), 2048),
    "llama4": Shape(12, 36, ChunkedLocal(8192), 4096),
    "full": Shape(32, 0, None, 4096),
}


class Found(NamedTuple):
    """Prompt tokens, and those of them that were found, by tier."""

    prompt_tokens: int
    tiers: dict[str, int]
    failed: int
    seconds: float

    @property
    def rate(self) -> float:
        """Of all tiers."""
        return sum(self.tiers.values()) / self.prompt_tokens


def serve(
    asked: Sequence[Ask],
    shape: Shape,
    block_tokens: int,
    device_bytes: int,
    host_bytes: int = 0,
    at_once: int = 1,
    step_tokens: int = 2048,
) -> Found:
    """``at_once``: requests that run at a time."""
    waiting, running, begun_s = list(range(len(asked))), dict[str, int](), time.monotonic()
    tiers, prompts, failed = {"device": 0, "host": 0}, 0, 0
    with KVCache(
        shape.spec(block_tokens), device_bytes=device_bytes, host_bytes=host_bytes, key_secret=b"s", model_id="m"
    ) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=step_tokens, max_running=at_once)
        while waiting or running:
            busy = {asked[int(name)].session for name in running}
            for k in waiting[:AHEAD]:
                if len(running) < at_once and asked[k].session not in busy:
                    scheduler.add(Request(str(k), asked[k].prompt, len(asked[k].answer)))
                    waiting.remove(k)
                    running[str(k)] = 0
                    busy.add(asked[k].session)
            step = scheduler.schedule()
            ids = np.empty(len(step.sample_rows), np.int64)
            for k, row in enumerate(step.sample_rows):
                name = step.request_ids[row]
                ids[k] = asked[int(name)].answer[running[name]]
                running[name] += 1
            for done in scheduler.commit(step, ids):
                prompts += len(asked[int(done.request_id)].prompt)
                if done.finish_reason == "length":
                    for tier, count in done.cached_tokens.items():
                        tiers[tier] += count
                else:
                    failed += 1
                del running[done.request_id]
            if not step.num_tokens and running:
                scheduler.wait(0.5)
    return Found(prompts, tiers, failed, time.monotonic() - begun_s)
