"""FlashInfer's plans beside the stream: none is overwritten, waited for or outlived, and failures leave none."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attention.conftest import Backend, need_flashinfer
from attention.flashinfer_standin import Gpu, Module, Moment
from attention.flashinfer_steps import FULL, SCALE, attend, group_of
from attention.served_steps import HEADS, Served, assert_close, expected
from kvtier import Step
from kvtier.attention.flashinfer import FlashInfer, workspace_bytes_for
from kvtier.machine.errors import AttentionUnavailable, ConfigError, MemoryUnavailable, StepError

need_flashinfer()
pytestmark = pytest.mark.usefixtures("one_thread")


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
