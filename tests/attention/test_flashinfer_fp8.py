"""FlashInfer over 8-bit floats: scales go in with the queries and come out with the output, whatever attends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.conftest import Backend, Serve, need_flashinfer
from attention.flashinfer_standin import Gpu
from attention.flashinfer_steps import KINDS, WINDOW, group_of
from attention.served_steps import HEADS, Served, assert_close, expected
from kvtier import ChunkedLocal, FullAttention, GroupSpec, Step
from kvtier.attention.flashinfer import FlashInfer
from kvtier.attention.fp8 import layer_scales
from kvtier.geometry.kinds import Attention
from kvtier.geometry.kv_scales import KVScales
from kvtier.machine.errors import AttentionUnavailable

need_flashinfer()
pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = {"k": 0.25, "v": 0.5}
"""Scales that are powers of two: folding rounds nothing, so comparisons are as sharp as with K and V in 16 bits."""
ROUNDING = {"k": 0.3, "v": 0.7}


def scaled(name: str, attention: Attention, by: dict[str, float] = EXACT, **shape: Any) -> GroupSpec:
    """A group in e4m3 whose layers and heads all have scales of their own."""
    group = group_of(name, attention, dtype=shape.pop("dtype", "fp8"), **shape)
    step = 2.0 if by is EXACT else 1.37
    k, v = (
        tuple(tuple(by[which] * step ** (2 * i - h) for h in range(group.num_kv_heads)) for i in range(2))
        for which in ("k", "v")
    )
    return group_of(name, attention, group.block_tokens, **shape, dtype=group.dtype, kv_scales=KVScales(k, v))


def scales_of(group: GroupSpec, layer: int) -> dict[str, Tensor]:
    """What ``write_kv`` and ``attend`` are given."""
    pair = layer_scales(group, layer, "cpu")
    return {} if pair is None else {"k_scale": pair[0], "v_scale": pair[1]}


def check_step(flash: FlashInfer, gpu: Gpu, served: Served, step: Step, limit: float = 1e-4, **how: Any) -> None:
    """All layers of all groups against the reference, which folds scales in float32; one plan a group."""
    how = {"scale": 0.2} | how
    planned = len(gpu.plans)
    batches = {g.name: flash.PagedBatch.from_step(step, g, "cpu") for g in served.cache.spec.groups}
    for layer in range(2):
        for group in served.cache.spec.groups:
            k, v = served.cache.kv(group.name, layer)
            scales = scales_of(group, layer)
            flash.write_kv(k, v, *served.new_kv(step, group, layer), batches[group.name], **scales)
            served.assert_written(step, group, layer)
            out = flash.attend(served.query(step, group, layer), k, v, batches[group.name], **how, **scales)
            assert_close(out, expected(served, step, group, layer, **how, **scales), limit)
    assert len(gpu.plans) == planned + len(batches)


@pytest.fixture(autouse=True)
def at_once(gpu: Gpu) -> None:
    """What comes after a kernel here, the output's scale, does not wait for it: kernels run when they are launched."""
    gpu.late = False


@pytest.mark.parametrize("seed", range(2))
def test_served_steps_of_all_kinds(backend: Backend, gpu: Gpu, serve: Serve, seed: int) -> None:
    served = serve([scaled(f"{i}", kind) for i, kind in enumerate(KINDS)], seed, requests=4)
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step)
    assert {(m.dtype_q, m.dtype_kv, m.dtype_o) for m in gpu.modules} == {
        (torch.float16, torch.float8_e4m3fn, torch.float16)
    }


@pytest.mark.parametrize("kind", [FullAttention(), WINDOW, ChunkedLocal(16)], ids=str)
@pytest.mark.parametrize(
    "how",
    [{"softcap": 3.0}, {"sinks": torch.linspace(-2, 3, HEADS)}, {"scale": 0.01, "softcap": 30.0}],
    ids=["softcap", "sinks", "both"],
)
def test_soft_caps_and_sinks_see_true_scores(
    backend: Backend, gpu: Gpu, serve: Serve, kind: Attention, how: dict[str, Any]
) -> None:
    served = serve([scaled("g", kind)], requests=3, most=40)
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step, **how)


@pytest.mark.parametrize(
    "shape", [{"num_kv_heads": 1}, {"num_kv_heads": 4}, {"head_dim": 128}, {"head_dim": 256}, {"dtype": "fp8_e5m2"}]
)
def test_shapes(backend: Backend, gpu: Gpu, serve: Serve, shape: dict[str, Any]) -> None:
    served = serve([scaled("win", WINDOW, **shape)], requests=2, most=30)
    served.half = torch.bfloat16
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_any_scales_cost_one_more_rounding(backend: Backend, gpu: Gpu, serve: Serve, half: torch.dtype) -> None:
    """Of the folded query, half a unit in its last place: scores of some 3 move by a few thousandths of that."""
    served = serve([scaled("g", FullAttention(), ROUNDING)], requests=3, most=40)
    served.half = half
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step, limit=16 * torch.finfo(half).eps)


def test_no_scales_are_scales_of_one(backend: Backend, gpu: Gpu, serve: Serve) -> None:
    group = group_of("g", WINDOW, dtype="fp8")
    served, flash = serve([group], requests=2, most=30), backend()
    assert scales_of(group, 0) == {}
    for step in served.steps():
        check_step(flash, gpu, served, step)


def test_sinks_over_8_and_16_bits_are_two_kernels(backend: Backend, gpu: Gpu, serve: Serve) -> None:
    served = serve([scaled("a", WINDOW), group_of("b", WINDOW)], requests=2, most=30)
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step, sinks=torch.zeros(HEADS))
    assert len({m.uri for m in gpu.modules}) == 2


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_captured_batch_is_refilled(backend: Backend, gpu: Gpu, serve: Serve, kind: Attention) -> None:
    """Decode steps of changing size in one batch of 6 rows; rows of no token write nothing."""
    group = scaled("g", kind)
    served, flash = serve([group], most=9, answer=20), backend()
    batch = flash.GraphBatch(group, 6, torch.zeros(64, dtype=torch.int32))
    k, v = served.cache.kv("g", 1)
    scales = scales_of(group, 1)
    query = torch.zeros(6, HEADS, 64, dtype=torch.float16)
    flash.attend(query, k, v, batch, scale=0.2, **scales)  # what a capture does, on null rows
    checked = 0
    for step in served.steps():
        n = len(step.request_ids)
        if step.num_tokens != n:
            continue
        new = [torch.cat([x, torch.full((6 - n, 2, 64), 7.0, dtype=x.dtype)]) for x in served.new_kv(step, group, 1)]
        query[:n] = served.query(step, group, 1)
        flash.refill(batch, step.group("g"))
        flash.write_kv(k, v, *new, batch, **scales)
        out = flash.attend(query, k, v, batch, scale=0.2, **scales)
        assert_close(out[:n], expected(served, step, group, 1, scale=0.2, **scales))
        assert k[0].float().isnan().all() and v[0].float().isnan().all()
        checked += 1
    assert checked > 5 and gpu.plans[-1].cuda_graph


@pytest.mark.parametrize("head_dims", [(192, 192), (192, 128), (128, 64), (80, 80)], ids=str)
def test_heads_of_which_the_kernel_would_leave_the_end_out(
    backend: Backend, gpu: Gpu, serve: Serve, head_dims: tuple[int, int]
) -> None:
    """K of 192 works in 16 bits; 8-bit values are loaded 128 at a time."""
    group = group_of("g", WINDOW, dtype="fp8", head_dim=head_dims[0], head_dim_v=head_dims[1])
    served, flash = serve([group], requests=1, most=9), backend()
    step = next(served.steps())
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    with pytest.raises(AttentionUnavailable, match=r"64, 128, 256 over K and V in 8 bits, not \d+"):
        flash.attend(served.query(step, group, 0), *served.cache.kv("g", 0), batch, scale=0.2)
    assert gpu.plans == []
