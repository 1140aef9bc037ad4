"""Serves a workload with kvtier's own scheduler and pools; answers are forced. No byte is held or moved."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.hits.child import Found, Sizes, answer_all
from benchmarks.hits.shapes import Local, Shape
from benchmarks.hits.workloads import Ask
from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from runner.bench.replay.serve import serve as replay


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
    device_bytes, host_bytes = sizes.device_bytes, sizes.host_bytes
    found = replay(asked, spec_of(shape, block_tokens), device_bytes, host_bytes, at_once, step_tokens, queued)
    return Found(found.prompt_tokens, found.computed_tokens, found.tiers, found.too_large + found.failed)


if __name__ == "__main__":
    answer_all(serve, {})
