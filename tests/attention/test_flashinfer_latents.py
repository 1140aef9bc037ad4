"""Latents (MLA) over FlashInfer: its own Python runs on real steps, over kernels that compute what it documents."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from breadth import sample
from torch import Tensor

from attention.conftest import Backend, need_flashinfer
from attention.flashinfer_standin import Gpu
from attention.served_steps import Served, assert_close
from kvtier import ChunkedLocal, FullAttention, GroupSpec, SlidingWindow, Step
from kvtier.attention import reference
from kvtier.attention._flashinfer_latents import MOST_WORK, cannot_run_latents, most_work
from kvtier.attention.flashinfer import FlashInfer, check_latent_views
from kvtier.geometry.kinds import Attention
from kvtier.machine.errors import AttentionUnavailable, ConfigError, InvariantBroken, StepError

need_flashinfer()
pytestmark = pytest.mark.usefixtures("one_thread")

RANK, TURNED, SCALE = 512, 64, 0.07  # not 576 ** -0.5


def group_of(name: str = "g", attention: Attention | None = None, block_tokens: int = 4, **shape: Any) -> GroupSpec:
    shape = {"num_layers": 2, "dtype": "bfloat16"} | shape
    return GroupSpec(
        name, attention or FullAttention(), num_kv_heads=1, head_dim=RANK, head_dim_v=TURNED, block_tokens=block_tokens,
        **shape,
    )  # fmt: skip


def query_of(step: Step, layer: int, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    rng = np.random.default_rng([step.num_tokens, layer, int(step.seq_lens.sum())])
    return torch.from_numpy(rng.standard_normal((step.num_tokens, heads, RANK + TURNED))).to(dtype)


def attend(flash: FlashInfer, served: Served, step: Step, group: GroupSpec, batch: Any, layer: int, **how: Any) -> Any:
    """Writes and attends, as a model's layer does."""
    k, v = served.cache.kv(group.name, layer)
    new_k, new_v = served.new_kv(step, group, layer)
    flash.write_kv(k, v, new_k, new_v, batch)
    return flash.attend_latent(query_of(step, layer, **how), k, v, batch, scale=SCALE)


def expected(served: Served, step: Step, group: GroupSpec, layer: int, **how: Any) -> Tensor:
    k, v = served.cache.kv(group.name, layer)
    batch = reference.PagedBatch.from_step(step, group, "cpu")
    return reference.attend_latent(query_of(step, layer, **how), k, v, batch, scale=SCALE)


def check_step(flash: FlashInfer, gpu: Gpu, served: Served, step: Step, **how: Any) -> None:
    """All layers of all groups against the reference; layers of one group share one plan."""
    groups = served.cache.spec.groups
    batches = {g.name: flash.PagedBatch.from_step(step, g, "cpu") for g in groups}
    planned, outs = len(gpu.latents.plans), []
    for layer in range(2):
        for group in groups:
            out = attend(flash, served, step, group, batches[group.name], layer, **how)
            outs.append((out, group, layer))
    assert len(gpu.latents.plans) == planned + len(groups)
    gpu.drain()
    for out, group, layer in outs:
        assert_close(out, expected(served, step, group, layer, **how))


# --- what the arrays mean --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", sample(range(4), [1]))
def test_served_steps(backend: Backend, gpu: Gpu, serve: Callable[..., Served], seed: int) -> None:
    """Prompts in chunks mixed with decodes, two groups in turn; what no query may see is NaN."""
    chunks = group_of("chunks", ChunkedLocal(16), 4)
    served = serve([group_of("full", block_tokens=4 << seed % 3), chunks], seed, requests=4, most=40)
    flash, sizes = backend(), set()
    for step in served.steps():
        check_step(flash, gpu, served, step)
        sizes |= set(np.diff(step.query_start).tolist())
    assert 1 in sizes and max(sizes) > 8
    assert gpu.plans == [] and {c.kernels for c in gpu.latents.modules} == {"fa3"}


@pytest.mark.parametrize(
    ("heads", "computed"), sample([(1, 1), (3, 4), (16, 16), (20, 32), (40, 64), (128, 128)], [(20, 32), (128, 128)])
)
def test_heads_that_do_not_divide_a_tile_are_padded(
    heads: int, computed: int, backend: Backend, gpu: Gpu, serve: Callable[..., Served]
) -> None:
    """A kernel with 20 heads would leave a visible key out, and FlashInfer's wrapper refuses such steps."""
    served = serve([group_of()], requests=2, most=70)
    flash = backend()
    for step in served.steps():
        check_step(flash, gpu, served, step, heads=heads)
    assert {plan.num_heads for plan in gpu.latents.plans} == {computed}


def test_older_gpus_have_kernels_of_their_own(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    served, flash = serve([group_of(dtype="float16")], requests=1, most=30), backend()
    flash._capability = (8, 0)
    for step in served.steps():
        check_step(flash, gpu, served, step, dtype=torch.float16)
    assert {c.kernels for c in gpu.latents.modules} == {"fa2"}


def test_latents_in_8_bits_have_their_own_scales(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    """Scales go into the queries and into the output, so no kernel knows of them."""
    group = group_of(dtype="fp8")
    served, flash = serve([group], requests=2, most=30), backend()
    served.half, gpu.late = torch.bfloat16, False  # the output is scaled on the CPU
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([4.0])}
    for step in served.steps():
        k, v = served.cache.kv("g", 0)
        batch = flash.PagedBatch.from_step(step, group, "cpu")
        flash.write_kv(k, v, *served.new_kv(step, group, 0), batch, **scales)
        out = flash.attend_latent(query_of(step, 0), k, v, batch, scale=SCALE, **scales)
        gpu.drain()
        other = reference.PagedBatch.from_step(step, group, "cpu")
        assert_close(out, reference.attend_latent(query_of(step, 0), k, v, other, scale=SCALE, **scales))


def test_the_pools_are_read_where_they_lie(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    group = group_of()
    served, flash = serve([group], requests=2, most=20), backend()
    step = next(served.steps())
    attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 1)
    k, v = served.cache.kv("g", 1)
    assert gpu.latents.launches[-1].addresses[:2] == (k.data_ptr(), v.data_ptr())
    assert v.data_ptr() - k.data_ptr() == RANK * 2, "side by side"


# --- queries that pick their keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [5, 64])
def test_queries_attend_to_what_they_have_picked(
    most: int, backend: Backend, gpu: Gpu, serve: Callable[..., Served]
) -> None:
    """Some of what each may see, in any order; layers and requests that pick as many share a plan."""
    group = group_of()
    served, flash = serve([group], requests=3, most=40), backend()
    rng, runs = np.random.default_rng(0), 0
    for step in served.steps():
        batch = flash.PagedBatch.from_step(step, group, "cpu")
        for layer in range(2):
            k, v = served.cache.kv("g", layer)
            flash.write_kv(k, v, *served.new_kv(step, group, layer), batch)
            rows = torch.cat([k, v], -1).flatten(0, 2)
            query = query_of(step, layer, heads=3)
            for r in range(len(step.request_ids)):
                at = slice(int(step.query_start[r]), int(step.query_start[r + 1]))
                ends = np.arange(step.starts[r], step.seq_lens[r]) + 1
                lengths = np.minimum(ends, most)
                picked = np.zeros((len(ends), int(lengths.max()) + 2), np.int64)  # what is not picked is block 0
                for i, (end, n) in enumerate(zip(ends, lengths, strict=True)):
                    tokens = rng.permutation(end)[:n]
                    picked[i, :n] = step.group("g").block_table[r, tokens // 4] * 4 + tokens % 4
                slots = torch.from_numpy(picked)
                out = flash.attend_picked(query[at], k, v, slots, lengths.tolist(), group, scale=SCALE)
                gpu.drain()
                runs += 1
                for i, n in enumerate(lengths):
                    seen = rows[slots[i, :n]].double()
                    want = (query[at][i].double() @ seen.T * SCALE).softmax(-1) @ seen[:, :RANK]
                    assert_close(out[i], want.to(out.dtype))
    assert len(gpu.latents.plans) <= runs // 2
    assert flash.kinds == 2 and flash.pinned_bytes() <= flash.most_bytes(2, 0).pinned_bytes


def test_pools_whose_rows_cannot_be_told_apart_are_refused(backend: Backend, serve: Callable[..., Served]) -> None:
    group = group_of()
    served, flash = serve([group], requests=1, most=20), backend()
    k, v = served.cache.kv("g", 0)
    step = next(served.steps())
    slots = torch.full((step.num_tokens, 1), 4)
    with pytest.raises(ConfigError, match="rows need equal ones"):
        flash.attend_picked(query_of(step, 0), k, v.contiguous(), slots, [1] * step.num_tokens, group, scale=1.0)


# --- captured decode steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", sample([FullAttention(), ChunkedLocal(16)], [FullAttention()]), ids=str)
def test_a_captured_batch_is_refilled(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], attention: Attention
) -> None:
    """Decode steps of changing size in one batch of 6 rows: the null rows change nothing, and nothing of theirs."""
    group = group_of(attention=attention)
    served, flash = serve([group], most=9, answer=12), backend()
    pages = torch.zeros(64, dtype=torch.int32)
    batch = flash.GraphBatch(group, 6, pages)
    k, v = served.cache.kv("g", 0)
    query = torch.zeros(6, 4, RANK + TURNED, dtype=torch.bfloat16)
    flash.attend_latent(query, k, v, batch, scale=SCALE)  # what a capture does, on null rows
    gpu.drain()
    (lane,) = batch.lanes.values()
    checked, sizes, first = 0, set(), gpu.latents.launches[-1]
    for step in served.steps():
        n = len(step.request_ids)
        if step.num_tokens != n:
            continue
        new = [
            torch.cat([x, torch.full((6 - n, *x.shape[1:]), 7.0, dtype=x.dtype)]) for x in served.new_kv(step, group, 0)
        ]
        query[:n] = query_of(step, 0)
        flash.refill(batch, step.group("g"))
        flash.write_kv(k, v, *new, batch)
        out = flash.attend_latent(query, k, v, batch, scale=SCALE)
        gpu.drain()
        assert_close(out[:n], expected(served, step, group, 0))
        assert k[0].isnan().all() and v[0].isnan().all()
        launch = gpu.latents.launches[-1]
        assert list(batch.lanes.values()) == [lane] and launch.int_workspace is first.int_workspace
        assert launch.addresses == first.addresses and launch.addresses[2] == pages.data_ptr()
        checked, sizes = checked + 1, sizes | {n}
    assert checked > 5 and len(sizes) > 1


# --- plans beside the stream -----------------------------------------------------------------------------------------


def test_steps_that_are_queued_before_any_has_run(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    group = group_of()
    served, flash = serve([group], requests=3, most=20), backend()
    step = next(served.steps())
    batches = [flash.PagedBatch.from_step(step, group, "cpu") for _ in range(5)]
    outs = [attend(flash, served, step, group, batch, 0) for batch in batches]
    with pytest.raises(StepError, match="later step"):
        attend(flash, served, step, group, batches[0], 1)
    gpu.drain()
    want = expected(served, step, group, 0)
    for out in outs:
        assert_close(out, want)


def test_memory_of_their_wrappers_is_known(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    group = group_of()
    served, flash = serve([group], requests=3, most=20), backend()
    for step in served.steps():
        attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)
    mib = 1 << 20
    assert flash.most_bytes(flash.kinds, 0).pinned_bytes == flash.pinned_bytes() == 2 * (8 + 4 + 2) * mib
    captured = flash.most_bytes(1, 3).pinned_bytes - flash.most_bytes(1, 0).pinned_bytes
    assert captured == 3 * (8 + 1) * mib


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtypes", "how", "message"),
    [
        ({"head_dim": 256}, "bfloat16 bfloat16", {}, "latents of 512 with rotated keys of 64, not 256 with 64"),
        ({"head_dim_v": 32}, "bfloat16 bfloat16", {}, "not 512 with 32"),
        ({"attention": SlidingWindow(9)}, "bfloat16 bfloat16", {}, "no kernel for latents in a sliding window"),
        ({}, "float32 float32", {}, "not float32; load the model with dtype='bfloat16'"),
        ({}, "float16 bfloat16", {}, "over latents in bfloat16 it computes in the same dtype, not in float16"),
        ({}, "bfloat16 bfloat16", {"heads": 129}, "up to 128 query heads over latents, not 129"),
        ({}, "bfloat16 bfloat16", {"batch_invariant": True}, "leave batch_invariant out"),
        ({}, "float16 float8_e4m3fn", {}, r"e4m3, for models in bfloat16, on Hopper .* not float8_e4m3fn for float16"),
        ({}, "bfloat16 float8_e5m2", {}, "not float8_e5m2 for bfloat16"),
        ({}, "bfloat16 float8_e4m3fn", {"capability": (10, 0)}, "compute capability 9.0"),
    ],
)  # fmt: skip
def test_what_has_no_kernel_is_refused_by_name(shape: Any, dtypes: str, how: Any, message: str) -> None:
    given = {"head_dim": RANK, "head_dim_v": TURNED, "attention": FullAttention()} | shape
    group = GroupSpec("g", num_layers=1, num_kv_heads=1, **given)
    dtype, kv_dtype = (getattr(torch, name) for name in dtypes.split())
    how = {"capability": (9, 0)} | how
    problem = cannot_run_latents(group, dtype, kv_dtype, **how)
    assert problem is not None and re.search(message, problem)
    assert cannot_run_latents(group_of(), torch.bfloat16, torch.bfloat16, (8, 0)) is None
    assert cannot_run_latents(group_of(), torch.bfloat16, torch.float8_e4m3fn, (9, 0), heads=128) is None


def test_nothing_is_planned_for_what_is_refused(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    group = group_of()
    served, flash = serve([group], requests=1, most=20), backend(batch_invariant=True)
    step = next(served.steps())
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    with pytest.raises(
        AttentionUnavailable, match=r"group 'g': .*leave batch_invariant out; use attention='reference'"
    ):
        attend(flash, served, step, group, batch, 0)
    k, v = served.cache.kv("g", 0)
    with pytest.raises(StepError, match="tokens for a step"):
        backend().attend_latent(torch.zeros(99, 4, 576, dtype=torch.bfloat16), k, v, batch, scale=1.0)
    batch.blocks, batch.indices.kv_indices[0] = k.shape[0], 0
    with pytest.raises(InvariantBroken, match="reads the null block"):
        batch.check()
    assert gpu.latents.plans == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, v: (k[..., 4:], v), "the pool of latents begins at an address"),
        (lambda k, v: (k, v[..., ::2]), "the pool of rotated keys has strides"),
        (lambda k, v: (k, v[:, :2]), "each token has one of each"),
        (lambda k, v: (k, v.half()), "in one dtype"),
        (lambda k, v: (k.expand(-1, -1, 2, -1), v), "each token has one of each"),
    ],
)
def test_views_that_cannot_be_read_in_place_are_refused(change: Any, message: str) -> None:
    rows = torch.zeros(5, 4, 1, RANK + TURNED, dtype=torch.bfloat16)
    k, v = rows.split([RANK, TURNED], -1)
    check_latent_views(k, v)
    check_latent_views(k.contiguous(), v.contiguous())  # other pools
    with pytest.raises(ConfigError, match=message):
        check_latent_views(*change(k, v))


def test_the_work_of_a_step_is_bounded() -> None:
    """FlashInfer plans 16,384 pieces at most; the default of 8,192 tokens is within them for every model."""
    assert most_work(128, 8192, 256, 132) < MOST_WORK < most_work(128, 17000, 256, 132)
    assert most_work(20, 1, 1, 132) == most_work(32, 1, 1, 132)
