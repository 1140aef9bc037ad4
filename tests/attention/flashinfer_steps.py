"""Steps over FlashInfer, compared with the reference."""

from __future__ import annotations

from typing import Any

from attention.flashinfer_standin import Gpu
from attention.served_steps import Served, assert_close, expected
from kvtier import ChunkedLocal, FullAttention, GroupSpec, SlidingWindow, Step
from kvtier.attention.flashinfer import FlashInfer
from kvtier.geometry.kinds import Attention

FULL, WINDOW, CHUNK = FullAttention(), SlidingWindow(11), ChunkedLocal(16)
KINDS = [FULL, WINDOW, SlidingWindow(8), SlidingWindow(1), CHUNK]
SCALE = 0.2  # not 64 ** -0.5


def group_of(name: str, attention: Attention, block_tokens: int = 4, **shape: Any) -> GroupSpec:
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "dtype": "float16"} | shape
    return GroupSpec(name, attention, block_tokens=block_tokens, **shape)


def attend(
    backend: FlashInfer, served: Served, step: Step, group: GroupSpec, batch: Any, layer: int, **how: Any
) -> Any:
    """Writes and attends, as a model's layer does."""
    k, v = served.cache.kv(group.name, layer)
    new_k, new_v = served.new_kv(step, group, layer)
    backend.write_kv(k, v, new_k, new_v, batch)
    return backend.attend(served.query(step, group, layer), k, v, batch, **({"scale": SCALE} | how))


def check_step(backend: FlashInfer, gpu: Gpu, served: Served, step: Step, **how: Any) -> None:
    """All layers of all groups against the reference; layers of one group share one plan."""
    how = {"scale": SCALE} | how
    batches = {g.name: backend.PagedBatch.from_step(step, g, "cpu") for g in served.cache.spec.groups}
    planned, outs = len(gpu.plans), []
    for layer in range(2):  # layers of the groups take turns, as in a model
        for group in served.cache.spec.groups:
            out = attend(backend, served, step, group, batches[group.name], layer, **how)
            outs.append((out, group, layer))
    assert len(gpu.plans) == planned + len(batches)
    gpu.drain()
    for out, group, layer in outs:
        assert_close(out, expected(served, step, group, layer, **how))
