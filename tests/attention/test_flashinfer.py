"""The FlashInfer backend: FlashInfer's own Python runs on real steps, over kernels that compute what it documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from breadth import sample

from attention.conftest import Backend, need_flashinfer
from attention.flashinfer_standin import Gpu
from attention.flashinfer_steps import CHUNK, FULL, KINDS, SCALE, WINDOW, attend, check_step, group_of
from attention.served_steps import HEADS, Served, assert_close, expected
from kvtier.attention.paged import paged_from_table
from kvtier.geometry.kinds import Attention

need_flashinfer()
pytestmark = pytest.mark.usefixtures("one_thread")


# --- what the arrays mean --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sample(range(4), [0, 2]))
def test_served_steps_of_all_kinds(backend: Backend, gpu: Gpu, serve: Callable[..., Served], seed: int) -> None:
    served = serve([group_of(f"{i}", kind, 4 << seed % 3) for i, kind in enumerate(KINDS)], seed)
    flash, sizes = backend(), set()
    for step in served.steps():
        check_step(flash, gpu, served, step)
        sizes |= set(np.diff(step.query_start).tolist())
    assert 1 in sizes and max(sizes) > 8


@pytest.mark.parametrize("kind", [FULL, WINDOW, CHUNK], ids=str)
@pytest.mark.parametrize(
    "how",
    [{"softcap": 3.0}, {"sinks": torch.linspace(-2, 3, HEADS)}, {"scale": 1.0}, {"scale": 0.01, "softcap": 30.0}],
    ids=["softcap", "sinks", "scale", "both"],
)
def test_what_changes_the_scores(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], kind: Attention, how: dict[str, Any]
) -> None:
    served = serve([group_of("g", kind)], requests=3, most=40)
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step, **how)


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 192, "head_dim_v": 128},
        {"num_kv_heads": 1},
        {"num_kv_heads": 4},
        {"head_dim": 128, "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_shapes(backend: Backend, gpu: Gpu, serve: Callable[..., Served], shape: dict[str, Any]) -> None:
    served = serve([group_of("win", WINDOW, **shape)], requests=2, most=30)
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step)


def test_layers_that_attend_differently_are_planned_apart(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served]
) -> None:
    """One group, one table: but soft cap, scale and sinks belong to a layer's plan."""
    group = group_of("g", WINDOW)
    served, flash = serve([group], requests=3), backend()
    hows = [{}, {"softcap": 3.0}, {"scale": 1.0}, {"sinks": torch.ones(HEADS)}]
    for step in served.steps():
        batch = flash.PagedBatch.from_step(step, group, "cpu")
        outs = [
            (attend(flash, served, step, group, batch, layer, **how), layer, how) for how in hows for layer in (0, 1)
        ]
        gpu.drain()
        for out, layer, how in outs:
            assert_close(out, expected(served, step, group, layer, **({"scale": SCALE} | how)))
        assert len(batch.lanes) == len(hows)
    assert len({c.uri for c in gpu.modules}) == 3  # plain, soft cap, sinks


def test_groups_of_one_shape_do_not_take_each_others_wrappers(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served]
) -> None:
    """More of them than the ring has wrappers, their layers in turn."""
    served = serve([group_of(name, FULL) for name in "abc"], requests=2, most=30)
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step)


def test_sinks_of_two_head_sizes_are_two_kernels(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    """FlashInfer's own sink wrapper would load the first one's library for both."""
    served = serve([group_of("a", WINDOW), group_of("b", WINDOW, head_dim=128)], requests=2, most=30)
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step, sinks=torch.zeros(HEADS))


def test_paged_arrays_from_block_tables_are_the_exported_ones(serve: Callable[..., Served]) -> None:
    """Two ways to the same arrays, written apart: the compiled export, and the one that the load-time trial uses."""
    served = serve([group_of(f"{i}", kind) for i, kind in enumerate(KINDS)])
    for step in served.steps():
        for group in served.cache.spec.groups:
            view = step.group(group.name)
            made = paged_from_table(
                group.attention, group.block_tokens, step.query_start.tolist(), step.seq_lens.tolist(), view.block_table
            )
            for ours, theirs in zip(made, view.paged(), strict=True):
                assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()


# --- captured decode steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_captured_batch_is_refilled(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], kind: Attention
) -> None:
    """Decode steps of changing size in one batch of 6 rows: the null rows change nothing, and nothing of theirs."""
    group = group_of("g", kind)
    served, flash = serve([group], most=9, answer=20), backend()
    batch = flash.GraphBatch(group, 6, torch.zeros(64, dtype=torch.int32))
    k, v = served.cache.kv("g", 0)
    query = torch.zeros(6, HEADS, 64, dtype=torch.float16)
    flash.attend(query, k, v, batch, scale=SCALE)  # what a capture does, on null rows
    gpu.drain()
    (lane,) = batch.lanes.values()
    checked, sizes = 0, set()
    for step in served.steps():
        n = len(step.request_ids)
        if step.num_tokens != n:
            continue
        new = [torch.cat([x, torch.full((6 - n, 2, 64), 7.0, dtype=x.dtype)]) for x in served.new_kv(step, group, 0)]
        query[:n] = served.query(step, group, 0)
        flash.refill(batch, step.group("g"))
        flash.write_kv(k, v, *new, batch)
        out = flash.attend(query, k, v, batch, scale=SCALE)
        gpu.drain()
        assert_close(out[:n], expected(served, step, group, 0, scale=SCALE))
        assert k[0].isnan().all() and v[0].isnan().all()
        assert list(batch.lanes.values()) == [lane]
        checked, sizes = checked + 1, sizes | {n}
    assert checked > 5 and len(sizes) > 1
    assert gpu.plans[-1].cuda_graph and gpu.plans[-1].total_rows == gpu.plans[-1].batch_size == 6


def test_a_captured_batch_reads_the_same_buffers_every_step(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph replays addresses: index arrays, slots and workspaces must stay where they were when it was captured."""
    group = group_of("g", WINDOW)
    served, flash = serve([group], most=9, answer=20), backend()
    pages = torch.zeros(64, dtype=torch.int32)
    batch = flash.GraphBatch(group, 6, pages)
    addresses = set()
    monkeypatch.setattr(
        "attention.flashinfer_standin.attention",
        lambda q, k, v, p, out, launch: addresses.add(
            (*(x.data_ptr() for x in vars(p).values()), launch.plan.int_workspace.data_ptr())
        ),
    )
    k, v = served.cache.kv("g", 0)
    for step in served.steps():
        if step.num_tokens == len(step.request_ids):
            slots = batch.slot_mapping.data_ptr()
            flash.refill(batch, step.group("g"))
            flash.attend(torch.zeros(6, HEADS, 64, dtype=torch.float16), k, v, batch, scale=SCALE)
            gpu.drain()
            assert batch.slot_mapping.data_ptr() == slots
            assert batch.slot_mapping.tolist()[len(step.request_ids) :] == [-1] * (6 - len(step.request_ids))
    assert len(addresses) == 1 and pages.data_ptr() in addresses.pop()


def test_a_captured_batch_has_room_or_says_not(backend: Backend, serve: Callable[..., Served]) -> None:
    group = group_of("g", FULL)
    step = next(serve([group], requests=2, most=6).steps())
    paged = step.group("g").paged()
    needed = len(paged[2]) + 6 - len(paged[3])
    batches = [backend().GraphBatch(group, 6, torch.zeros(n, dtype=torch.int32)) for n in (needed, needed - 1)]
    assert [batch.has_room(paged) for batch in batches] == [True, False]
