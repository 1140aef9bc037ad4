"""The FlashInfer backend: FlashInfer's own Python runs on real steps, over kernels that compute what it documents."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from breadth import sample

from attention.conftest import Backend, need_flashinfer
from attention.flashinfer_standin import Gpu, Module, Moment
from attention.served_steps import HEADS, Served, assert_close, expected
from kvtier import ChunkedLocal, FullAttention, GroupSpec, SlidingWindow, Step
from kvtier.attention._flashinfer_batch import Batch
from kvtier.attention.flashinfer import FlashInfer, check_views, workspace_bytes_for
from kvtier.attention.paged import paged_from_table
from kvtier.geometry.spec import Attention
from kvtier.machine.errors import AttentionUnavailable, ConfigError, InvariantBroken, MemoryUnavailable, StepError

need_flashinfer()
pytestmark = pytest.mark.usefixtures("one_thread")

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


# --- plans and the stream --------------------------------------------------------------------------------------------


def steps_in_a_row(flash: FlashInfer, served: Served, count: int) -> list[tuple[Any, Any]]:
    """(output, expected) of ``count`` steps queued before any of them has run; each has other entries than the last."""
    group = served.cache.spec.groups[0]
    step = next(served.steps())
    whole = flash.PagedBatch.from_step(step, group, "cpu")
    attend(flash, served, step, group, whole, 0)
    want = expected(served, step, group, 0, scale=SCALE)
    k, v = served.cache.kv(group.name, 0)
    pairs = []
    for i in range(count):
        r = i % len(step.request_ids)
        rows = slice(int(step.query_start[r]), int(step.query_start[r + 1]))
        batch = flash.PagedBatch.from_step(OneEntry(step, r), group, "cpu")
        out = flash.attend(served.query(step, group, 0)[rows], k, v, batch, scale=SCALE)
        pairs.append((out, want[rows]))
    return pairs


class OneEntry:
    """One entry of a step, as a step."""

    def __init__(self, step: Step, r: int) -> None:
        self._step, self._r = step, r

    def group(self, name: str) -> OneEntry:
        self._view = self._step.group(name)
        return self

    @property
    def _rows(self) -> slice:
        return slice(int(self._step.query_start[self._r]), int(self._step.query_start[self._r + 1]))

    @property
    def slot_mapping(self) -> Any:
        return self._view.slot_mapping[self._rows]

    def paged(self) -> Any:
        qo, kv, pages, last = self._view.paged()
        r = self._r
        return qo[r : r + 2] - qo[r], kv[r : r + 2] - kv[r], pages[kv[r] : kv[r + 1]], last[r : r + 1]


def test_a_plan_is_not_overwritten_while_its_copy_waits(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served]
) -> None:
    served = serve([group_of("g", FULL)], most=6)
    pairs = steps_in_a_row(backend(), served, 7)
    gpu.drain()
    for out, want in pairs:
        assert_close(out, want)


def test_planning_a_step_does_not_wait_for_the_one_before(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served]
) -> None:
    served, flash = serve([group_of("g", FULL)], most=6), backend()
    steps_in_a_row(flash, served, 1)
    assert len(gpu.plans) == 2 and gpu.waits == 0
    with pytest.raises(ConfigError, match="2 or more"):
        backend(ring=1)


def test_an_older_step_cannot_run_a_newer_plan(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    batches = [flash.PagedBatch.from_step(step, group, "cpu") for _ in range(3)]
    for batch in batches:
        attend(flash, served, step, group, batch, 0)
    with pytest.raises(StepError, match="later step"):
        attend(flash, served, step, group, batches[0], 1)
    attend(flash, served, step, group, batches[1], 1)


def test_a_plan_that_fails_leaves_nothing_to_run(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its own step, nor for the one whose wrapper it took."""
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    older, old, batch = (flash.PagedBatch.from_step(step, group, "cpu") for _ in range(3))
    plan, failures = Module.plan, ["an illegal memory access was encountered"]

    def fails_third(module: Module, *args: Any) -> Any:
        if len(gpu.plans) == 2 and failures:
            raise RuntimeError(failures.pop())
        return plan(module, *args)

    monkeypatch.setattr(Module, "plan", fails_third)
    attend(flash, served, step, group, older, 0)
    attend(flash, served, step, group, old, 0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attend(flash, served, step, group, batch, 0)
    assert not batch.lanes
    with pytest.raises(StepError, match="later step"):
        attend(flash, served, step, group, older, 1)
    out = attend(flash, served, step, group, batch, 0)
    gpu.drain()
    assert_close(out, expected(served, step, group, 0, scale=SCALE))


def test_a_wrapper_that_could_not_be_made_is_made_for_the_next_step(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a ring, and the second."""
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    prefill = importlib.import_module("flashinfer.prefill")
    make, made = prefill.BatchPrefillWithPagedKVCacheWrapper.__init__, []

    def every_other(*args: Any, **options: Any) -> None:
        made.append(len(made) % 2 == 1)
        if not made[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")
        make(*args, **options)

    monkeypatch.setattr(prefill.BatchPrefillWithPagedKVCacheWrapper, "__init__", every_other)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)
        out = attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)
        gpu.drain()
        assert_close(out, expected(served, step, group, 0, scale=SCALE))
    assert made == [False, True] * 2


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what nobody refers to dies."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("captured", [False, True])
def test_wrappers_die_when_they_are_let_go(
    captured: bool, backend: Backend, gpu: Gpu, serve: Callable[..., Served], no_collector: None
) -> None:
    """With their workspaces: what follows would otherwise allocate beside them."""
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    k, v = served.cache.kv("g", 0)
    if captured:
        batch: Any = flash.GraphBatch(group, 6, torch.zeros(64, dtype=torch.int32))
        query = torch.zeros(6, HEADS, 64, dtype=torch.float16)
    else:
        batch, query = flash.PagedBatch.from_step(step, group, "cpu"), served.query(step, group, 0)
    flash.attend(query, k, v, batch, scale=SCALE)
    gpu.drain()
    (wrapper,) = [weakref.ref(lane.wrapper) for lane in batch.lanes.values()]
    assert flash.pinned_bytes() > 0
    if not captured:
        flash.forget()
    batch = weakref.ref(batch)
    assert batch() is None and wrapper() is None and flash.pinned_bytes() == 0


@pytest.mark.parametrize("how", ["forgotten", "with its backend", "with its batch", "as garbage"])
def test_a_wrapper_that_is_let_go_outlives_the_copy_of_its_plan(
    how: str, backend: Backend, gpu: Gpu, serve: Callable[..., Served], no_collector: None
) -> None:
    """FlashInfer queues it: torch would give the pinned memory under it to the next who asks for some."""
    group, waits = group_of("g", FULL), list[int]()
    served, flash = serve([group]), backend()
    step = next(served.steps())
    k, v = served.cache.kv("g", 0)
    batch: Any = flash.PagedBatch.from_step(step, group, "cpu")
    query = served.query(step, group, 0)
    if how == "with its batch":
        batch = flash.GraphBatch(group, 6, torch.zeros(64, dtype=torch.int32))
        query = torch.zeros(6, HEADS, 64, dtype=torch.float16)
    flash.attend(query, k, v, batch, scale=SCALE)
    (lane,) = batch.lanes.values()
    lane.wrapper.buffer = np.empty(1)  # no garbage by itself, as pinned memory is none
    weakref.finalize(lane.wrapper.buffer, lambda: waits.append(gpu.waits))
    del lane
    if how == "as garbage":
        batch.itself = batch
    if how == "with its backend":
        del flash
    elif how != "with its batch":
        flash.forget()
    assert gpu.waits == 0
    del batch
    gc.collect()
    assert waits == [1]


def test_a_wrapper_of_a_lost_device_dies_in_silence(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)

    def lost(_: Any) -> None:
        raise LOST

    monkeypatch.setattr(Moment, "synchronize", lost)
    flash.forget()
    assert flash.pinned_bytes() == 0


LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
NO_PINNED = torch.AcceleratorError("CUDA error: out of memory")
NO_FLASHINFER_MEMORY = RuntimeError("Failed to plan prefill with error: out of memory")
NO_IMAGE = RuntimeError("BatchPrefillWithPagedKVCache failed with error no kernel image is available for execution")
BROKEN = RuntimeError("BatchPrefillWithPagedKVCache failed with error an illegal memory access was encountered")
NOT_OURS = ValueError("The total number of rows in qo_indptr 9 in cuda graph mode cannot exceed 8")


@pytest.mark.parametrize("sinks", [False, True])
def test_kernels_that_cannot_be_built_are_told_as_that(
    sinks: bool, backend: Backend, gpu: Gpu, serve: Callable[..., Served]
) -> None:
    """With sinks they are built when a wrapper is made, else when it is planned."""
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    gpu.cannot_build = lambda compiled: compiled.sinks == sinks
    with pytest.raises(AttentionUnavailable, match=r"(?s)group 'g'.*nvcc not found.*reference"):
        attend(flash, served, step, group, batch, 0, sinks=torch.zeros(HEADS) if sinks else None)


@pytest.mark.parametrize("moment", ["plan", "__init__", "run"])
@pytest.mark.parametrize(
    ("raised", "at_first", "later"),
    [
        (LOST, torch.AcceleratorError, torch.AcceleratorError),
        (BROKEN, AttentionUnavailable, RuntimeError),
        (NO_IMAGE, AttentionUnavailable, RuntimeError),
        (NOT_OURS, AttentionUnavailable, ValueError),
        (NO_PINNED, MemoryUnavailable, MemoryUnavailable),
        (NO_FLASHINFER_MEMORY, MemoryUnavailable, MemoryUnavailable),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError, torch.OutOfMemoryError),
        (NotImplementedError("no such mask"), AttentionUnavailable, NotImplementedError),
        (ImportError("libcudart.so.13"), AttentionUnavailable, ImportError),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else x.__name__,
)
def test_what_fails_at_the_first_try_is_not_to_be_had_and_what_fails_later_is_the_devices(
    moment: str,
    raised: Exception,
    at_first: type[Exception],
    later: type[Exception],
    backend: Backend,
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that is lost later must not look like a kernel that another backend can do without."""

    def fails(*_: Any, **__: Any) -> Any:
        raise raised

    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    wrapper = importlib.import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper

    def refused(kind: type[Exception]) -> None:
        with monkeypatch.context() as broken, pytest.raises(kind) as caught:
            broken.setattr(wrapper, moment, fails)
            attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)
        assert type(caught.value) is kind
        assert str(raised) in str(caught.value)
        assert ("nvcc" in str(caught.value)) == (kind is AttentionUnavailable)
        assert ("pinned" in str(caught.value)) == (kind is MemoryUnavailable)

    refused(at_first)
    attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)
    flash.forget()
    refused(later)


@pytest.mark.parametrize("invariant", [False, True])
def test_keys_are_never_split_for_batch_invariant_output(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], invariant: bool
) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend(batch_invariant=invariant)
    step = next(served.steps())
    attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)
    assert [plan.disable_split_kv for plan in gpu.plans] == [invariant]


def test_workspaces_are_counted(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    assert (flash.workspace_bytes(), flash.pinned_bytes()) == (1 << 10, 0)
    for _, step in zip(range(5), served.steps(), strict=False):
        attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)
    wrappers = {id(plan.int_workspace): plan for plan in gpu.plans}.values()
    assert flash.workspace_bytes() == (1 << 10) + sum(p.int_workspace.nbytes + 4 * 32768 for p in wrappers)
    assert flash.pinned_bytes() == sum(p.pinned.nbytes for p in wrappers)
    assert len(wrappers) == 2 and all(p.float_workspace is gpu.plans[0].float_workspace for p in wrappers)


def test_workspace_for_a_geometry() -> None:
    """On 132 multiprocessors: 33 tiles a KV head, of 128 rows, or of 64 where heads are large; more for many rows."""
    assert workspace_bytes_for(64, 8, 64, 1, 132) == 64 * 33 * 128 * 65 * 4
    assert workspace_bytes_for(16, 8, 256, 1, 132) == 16 * 33 * 64 * 257 * 4
    assert workspace_bytes_for(64, 8, 64, 256, 132) == 64 * (128 + 256) * 16 * 65 * 4
    assert workspace_bytes_for(64, 2, 64, 256, 132) == 64 * (128 + 256) * 64 * 65 * 4


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


# --- what is refused -------------------------------------------------------------------------------------------------


def damaged(array: int, index: int, value: Callable[[int], int]) -> Callable[[Any], None]:
    def damage(arrays: Any) -> None:
        arrays[array][index] = value(int(arrays[array][index]))

    return damage


DAMAGES = {
    "foreign page count": (FULL, damaged(1, 1, lambda n: n + 1), "kv_indptr|tokens|slot|null"),
    "falling kv_indptr": (FULL, damaged(1, 1, lambda n: 0), "kv_indptr does not rise"),
    "queries of another batch": (FULL, damaged(0, -1, lambda n: n + 1), "qo_indptr does not rise"),
    "empty last page": (FULL, damaged(3, 0, lambda n: 0), "no possible length"),
    "overfull last page": (FULL, damaged(3, 0, lambda n: 5), "no possible length"),
    "last page one short": (FULL, damaged(3, 0, lambda n: n - 1 if n > 1 else n + 1), "is written to slot"),
    "a page of nobody": (FULL, damaged(2, 0, lambda n: 10**6), "outside its pool"),
    "the null block": (WINDOW, damaged(2, 0, lambda n: 0), "reads the null block"),
    "another page for a new token": (CHUNK, damaged(2, -1, lambda n: n % 20 + 1), "is written to slot"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_index_arrays_are_refused_before_a_plan(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, damage, message = DAMAGES[name]
    group = group_of("g", attention)
    served, flash = serve([group], requests=2), backend()
    step = next(served.steps())
    take = Batch.take

    def taken(batch: Batch, paged: Any, slots: Any) -> Any:
        paged = tuple(array.copy() for array in paged)
        damage(paged)
        return take(batch, paged, slots)

    monkeypatch.setattr(Batch, "take", taken)
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    with pytest.raises(InvariantBroken, match=message) as caught:
        attend(flash, served, step, group, batch, 0)
    assert gpu.plans == [] and all(str(v).startswith("I15: ") for v in caught.value.violations)


@pytest.mark.parametrize("kind", [WINDOW, CHUNK], ids=str)
def test_pages_that_no_mask_reaches_are_refused(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], kind: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrimmed table: right for FlashInfer's masks, but its first pages are null or someone else's by now."""
    group = group_of("g", kind)
    served, flash = serve([group], requests=1, most=60), backend()
    late = next(step for step in served.steps() if step.starts[0] >= 16)
    view = late.group("g")
    end = int(late.seq_lens[0])
    pages = np.maximum(view.block_table[0, : -(-end // 4)], 1).astype(np.int32)
    whole = np.array([0, late.num_tokens], np.int32), np.array([0, len(pages)], np.int32), pages, view.paged()[3][-1:]
    take = Batch.take
    monkeypatch.setattr(Batch, "take", lambda batch, paged, slots: take(batch, whole, slots))
    batch = flash.PagedBatch.from_step(late, group, "cpu")
    with pytest.raises(InvariantBroken, match="its mask cannot reach"):
        attend(flash, served, late, group, batch, 0)
    assert gpu.plans == []


def test_null_rows_must_be_null(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    batch = flash.GraphBatch(group, 6, torch.zeros(64, dtype=torch.int32))
    k, v = served.cache.kv("g", 0)
    flash.attend(torch.zeros(6, HEADS, 64, dtype=torch.float16), k, v, batch, scale=SCALE)
    step = next(s for s in served.steps() if s.num_tokens == len(s.request_ids) < 6)
    planned = len(gpu.plans)

    class Wrong:
        slot_mapping = step.group("g").slot_mapping

        def padded(self, rows: int) -> Any:
            qo, kv, pages, last = step.group("g").padded(rows)
            return qo, kv, np.where(pages == 0, 1, pages).astype(np.int32), last

    with pytest.raises(InvariantBroken, match="pads the batch"):
        flash.refill(batch, Wrong())
    assert len(gpu.plans) == planned


def test_arrays_are_not_looked_at_unless_asked(
    backend: Backend, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend(check_indices=False)
    monkeypatch.setattr(Batch, "check", lambda batch: pytest.fail("looked at"))
    step = next(served.steps())
    attend(flash, served, step, group, flash.PagedBatch.from_step(step, group, "cpu"), 0)


POOL = torch.zeros(9 * 2 * 4 * 2 * 64 + 64, dtype=torch.float16)


def views(offset: int = 0, extra: int = 0) -> tuple[Any, Any]:
    strides = (2 * 4 * 2 * 64 + extra, 2 * 64, 64, 1)
    k, v = (POOL.as_strided((8, 4, 2, 64), strides, offset + at) for at in (0, 4 * 2 * 64))
    return k, v


@pytest.mark.parametrize(
    "pair, message",
    [
        (views(offset=4), "begins at an address"),
        (views(extra=4), "strides"),
        ((views()[0], views(extra=8)[1]), "must be equal"),
        ((views()[0].transpose(2, 3), views()[1].transpose(2, 3)), "strides"),
        ((views()[0], views()[1].bfloat16()), "must be equal"),
        ((torch.zeros(1, dtype=torch.float16).expand(2**20, 1, 1, 64),) * 2, "strides"),
    ],
)
def test_views_that_cannot_be_read_in_place_are_refused(pair: Any, message: str) -> None:
    check_views(*views())
    check_views(*views(offset=8, extra=8))
    with pytest.raises(ConfigError, match=message):
        check_views(*pair)


def test_views_of_a_page_beyond_32_bits_are_refused() -> None:
    flat = torch.empty(1, dtype=torch.float16, device="meta")
    wide = flat.as_strided((1, 4, 2, 64), (2**32, 128, 64, 1))
    with pytest.raises(ConfigError, match="strides"):
        check_views(wide, wide)


@pytest.mark.parametrize(
    "query, how, message",
    [
        (torch.zeros(0, 3, 64), {}, "multiple of the KV heads"),
        (torch.zeros(0, HEADS, 64), {"softcap": 1.0, "sinks": torch.zeros(HEADS)}, "both sinks and a soft cap"),
        (torch.zeros(0, HEADS, 80), {}, "not 80 with 64"),
        (torch.zeros(0, HEADS, 64, dtype=torch.float32), {}, "dtype='bfloat16'"),
    ],
    ids=["heads", "sinks and soft cap", "head size", "float32"],
)
def test_what_flashinfer_has_no_kernel_for(
    backend: Backend, gpu: Gpu, serve: Callable[..., Served], query: Any, how: Any, message: str
) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    query = torch.zeros(
        step.num_tokens,
        *query.shape[1:],
        dtype=torch.float16 if query.shape[2] != 64 or query.shape[1] != HEADS or how else query.dtype,
    )
    with pytest.raises(AttentionUnavailable, match=message):
        flash.attend(query, *served.cache.kv("g", 0), batch, scale=1.0, **how)
    assert gpu.plans == []


def test_wrong_numbers_of_tokens_and_sinks(backend: Backend, serve: Callable[..., Served]) -> None:
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    k, v = served.cache.kv("g", 0)
    query = torch.zeros(step.num_tokens + 1, HEADS, 64, dtype=torch.float16)
    with pytest.raises(StepError, match="tokens for a step"):
        flash.attend(query, k, v, batch, scale=1.0)
    with pytest.raises(StepError, match="tokens for a step"):
        flash.write_kv(k, v, query[:, :2], query[:, :2], batch)
    with pytest.raises(StepError, match=r"\[3\] sinks for 4"):
        flash.attend(query[1:], k, v, batch, scale=1.0, sinks=torch.zeros(3))


def test_queries_of_any_strides(backend: Backend, gpu: Gpu, serve: Callable[..., Served]) -> None:
    """Models give queries as [1, H, T, D] transposed, or cut out of a fused projection."""
    group = group_of("g", FULL)
    served, flash = serve([group]), backend()
    step = next(served.steps())
    k, v = served.cache.kv("g", 0)
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    want = attend(flash, served, step, group, batch, 0)
    query = served.query(step, group, 0)
    shifted = torch.zeros(query.numel() + 1, dtype=query.dtype)[1:].view_as(query).copy_(query)
    fused = torch.cat([query, query[:, :2]], 1)[:, :HEADS]
    for other in (query.transpose(0, 1).contiguous().transpose(0, 1), shifted, fused, query.mT.contiguous().mT):
        out = flash.attend(other, k, v, batch, scale=SCALE)
        gpu.drain()
        assert torch.equal(out, want)
