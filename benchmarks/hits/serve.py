"""Serves a workload with kvtier's own scheduler and pools; answers are forced. No byte is held or moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.hits.child import Found, Sizes, answer_all
from benchmarks.hits.order import Order
from benchmarks.hits.shapes import Local, Shape
from benchmarks.hits.workloads import Ask
from kvtier import (
    CacheSpec,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    KVCache,
    Request,
    RequestTooLarge,
    Scheduler,
    SlidingWindow,
)


def spec_of(shape: Shape, block_tokens: int) -> CacheSpec:
    """As kvtier describes it."""
    heads, size, dtype = shape.num_kv_heads, shape.head_dim, "bfloat16"
    layers = [GroupSpec("full", FullAttention(), shape.full_layers, heads, size, dtype, block_tokens)]
    if shape.local is not Local.NONE:
        span = shape.span_tokens
        local = SlidingWindow(span) if shape.local is Local.WINDOW else ChunkedLocal(span)
        layers.append(GroupSpec("local", local, shape.local_layers, heads, size, dtype, block_tokens))
    return CacheSpec(layers)


def serve(
    asked: Sequence[Ask],
    shape: Shape,
    block_tokens: int,
    sizes: Sizes,
    at_once: int = 1,
    queued: int = 0,
    step_tokens: int = 2048,
) -> Found:
    """``at_once``: requests that run at a time; ``queued``: others that wait in the engine meanwhile."""
    order, said, found = Order(asked, at_once + queued), dict[str, int](), Found()
    cache = KVCache(
        spec_of(shape, block_tokens),
        device_bytes=sizes.device_bytes,
        host_bytes=sizes.host_bytes,
        device="meta",
        key_secret=b"s",
        model_id="m",
    )
    with cache:
        scheduler = Scheduler(cache, max_batched_tokens=step_tokens, max_running=at_once)
        while order:
            for k in order.begin():
                try:
                    scheduler.add(Request(str(k), asked[k].prompt, len(asked[k].answer)))
                    said[str(k)] = 0
                except RequestTooLarge:
                    found.prompt_tokens += len(asked[k].prompt)
                    found.failed += 1
                    order.end(k)
            step = scheduler.schedule()
            ids = np.empty(len(step.sample_rows), np.int64)
            for k, row in enumerate(step.sample_rows):
                name = step.request_ids[row]
                ids[k] = asked[int(name)].answer[said[name]]
                said[name] += 1
            for done in scheduler.commit(step, ids):
                found.prompt_tokens += len(asked[int(done.request_id)].prompt)
                if done.finish_reason == "length":
                    for tier, count in done.cached_tokens.items():
                        found.tiers[tier] += count
                else:
                    found.failed += 1
                order.end(int(done.request_id))
            if not step.num_tokens and order:
                scheduler.wait(0.5)
    return found


if __name__ == "__main__":
    answer_all(serve, {})
