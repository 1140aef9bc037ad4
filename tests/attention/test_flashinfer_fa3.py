"""FA3 for prompts of full groups: on which steps it runs, and what keeps it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from breadth import sample

from attention.conftest import Backend, need_flashinfer
from attention.flashinfer_standin import Gpu, Launch
from attention.flashinfer_steps import CHUNK, FULL, SCALE, WINDOW, attend, group_of
from attention.served_steps import HEADS, Served, assert_close, expected
from kvtier import Step
from kvtier.attention import _flashinfer_fa3, choice
from kvtier.attention._flashinfer_batch import PagedBatch
from kvtier.attention._flashinfer_plan import Wrappers
from kvtier.attention.choice import Choice, Machine
from kvtier.attention.flashinfer import FlashInfer
from kvtier.machine.errors import MemoryUnavailable

need_flashinfer()
pytestmark = pytest.mark.usefixtures("one_thread")

TILE = 8


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> Gpu:
    """Kernels of small tiles, on a stream that is never late: a trial waits for it."""
    monkeypatch.setattr(_flashinfer_fa3, "_tile", lambda head_dim_v: TILE)
    gpu.late = False
    return gpu


def launches_of(gpu: Gpu, flash: FlashInfer, served: Served, step: Step, **how: Any) -> list[Launch]:
    """Two layers of the first group, which must be right, and what was launched for them."""
    group, before = served.cache.spec.groups[0], len(gpu.launches)
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    for layer in range(2):
        out = attend(flash, served, step, group, batch, layer, **how)
        assert_close(out, expected(served, step, group, layer, **({"scale": SCALE} | how)))
    return gpu.launches[before:]


def of_prompts(step: Step) -> bool:
    """Whether most of the work on tiles is for queries that are there: each against all keys that it may see."""
    queries, pages = np.diff(step.query_start), -(-np.asarray(step.seq_lens) // 4)
    return bool((-(-queries // TILE) * TILE * pages).sum() <= 1.5 * (queries * pages).sum())


HOWS: list[dict[str, Any]] = [{}, {"softcap": 3.0}, {"sinks": torch.linspace(-2, 3, HEADS)}]


@pytest.mark.parametrize("how", HOWS, ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("head_dim", sample([64, 128], [64]))
def test_steps_of_prompts_run_fa3_and_others_fa2(
    backend: Backend, small: Gpu, serve: Callable[..., Served], how: dict[str, Any], head_dim: int
) -> None:
    served = serve([group_of("g", FULL, head_dim=head_dim)])
    flash, tried, seen = backend(fa3=True), set[bool](), set[tuple[bool, str]]()
    for step in served.steps():
        prompts = of_prompts(step)
        found = [launch.compiled.kernels for launch in launches_of(small, flash, served, step, **how)]
        kernels = "fa3" if prompts else "fa2"
        assert found == ([] if prompts in tried else ["fa2", "fa3"]) + [kernels, kernels]
        tried.add(prompts)
        seen.add((prompts, kernels))
    assert seen == {(True, "fa3"), (False, "fa2")}
    assert len({compiled.uri for compiled in small.modules}) == 2, "each has a library of its own"


@pytest.mark.parametrize("kind", [WINDOW, CHUNK], ids=str)
def test_windows_and_chunks_stay_with_fa2(
    backend: Backend, small: Gpu, serve: Callable[..., Served], kind: Any
) -> None:
    served = serve([group_of("g", kind)], requests=3)
    flash = backend(fa3=True)
    for step in served.steps():
        launches_of(small, flash, served, step)
    assert {launch.compiled.kernels for launch in small.launches} == {"fa2"}


@pytest.mark.parametrize(
    ("options", "shape"),
    [({"batch_invariant": True}, {}), ({"fa3": False}, {}), ({}, {"head_dim": 192, "head_dim_v": 128})],
    ids=["batch_invariant", "not asked for", "unequal heads"],
)
def test_where_fa3_cannot_keep_a_promise_or_has_no_kernel_it_is_not_tried(
    backend: Backend, small: Gpu, serve: Callable[..., Served], options: dict[str, Any], shape: dict[str, Any]
) -> None:
    served = serve([group_of("g", FULL, **shape)], requests=2)
    flash = backend(**({"fa3": True} | options))
    for step in served.steps():
        launches_of(small, flash, served, step)
    assert {compiled.kernels for compiled in small.modules} == {"fa2"}


@pytest.mark.parametrize("prompts", [True, False])
def test_kernels_that_give_other_numbers_are_tried_once_and_never_used(
    backend: Backend, small: Gpu, serve: Callable[..., Served], caplog: pytest.LogCaptureFixture, prompts: bool
) -> None:
    """Whichever of the two trials shows it."""
    served = serve([group_of("g", FULL)])
    steps = served.steps()
    flash, shown = backend(fa3=True), 0
    for step in steps:
        wrong = of_prompts(step) is prompts
        small.wrong = lambda launch, wrong=wrong: wrong and launch.compiled.kernels == "fa3"
        found = [launch.compiled.kernels for launch in launches_of(small, flash, served, step)]
        assert not shown or found == ["fa2", "fa2"]
        shown += wrong
    assert shown > 1
    assert caplog.text.count("prompts stay with FlashInfer's FA2 kernels: FA3 differs by 0.02") == 1
    assert flash.kinds == 1, "its wrappers are given up"


def test_kernels_that_cannot_be_built_leave_prompts_to_fa2(
    backend: Backend, small: Gpu, serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    small.cannot_build = lambda compiled: compiled.kernels == "fa3"
    served, flash = serve([group_of("g", FULL)], requests=3), backend(fa3=True)
    for step in served.steps():
        assert {launch.compiled.kernels for launch in launches_of(small, flash, served, step)} == {"fa2"}
    assert caplog.text.count("FA3 does not run: FlashInfer cannot run group 'g'") == 1


@pytest.mark.parametrize("short", ["a wrapper", "its output"])
def test_a_trial_without_memory_leaves_prompts_to_fa2(
    backend: Backend,
    small: Gpu,
    serve: Callable[..., Served],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    short: str,
) -> None:
    """It comes with the first prompt that is served, when pools have taken what was free."""
    served, flash = serve([group_of("g", FULL)], requests=3), backend(fa3=True)

    def make(self: Any, key: Any, buffers: Any = None) -> Any:
        if key.kernels == "fa3":
            raise MemoryUnavailable("no room")
        return of(self, key, buffers)

    def empty_like(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    of = Wrappers._make
    if short == "a wrapper":
        monkeypatch.setattr(Wrappers, "_make", make)
    else:
        monkeypatch.setattr(torch, "empty_like", empty_like)
    for step in served.steps():
        assert {launch.compiled.kernels for launch in launches_of(small, flash, served, step)} == {"fa2"}
    assert caplog.text.count("FA3 has no memory for its trial: no room") == 1
    assert flash.kinds == 1


def test_all_groups_give_up_the_wrappers_of_a_kernel_that_fails(
    backend: Backend, small: Gpu, serve: Callable[..., Served]
) -> None:
    served, flash = serve([group_of("g", FULL), group_of("h", FULL)]), backend(fa3=True)
    groups = served.cache.spec.groups
    for step in served.steps():
        small.wrong = lambda launch, step=step: launch.compiled.kernels == "fa3" and not of_prompts(step)
        for group in groups:
            batch = flash.PagedBatch.from_step(step, group, "cpu")
            attend(flash, served, step, group, batch, 0)
    assert {key.kernels for key in flash._wrappers._rings} == {"fa2"} and flash.kinds == 2


def test_memory_for_fa3_is_counted_before_a_prompt_comes(
    backend: Backend, small: Gpu, serve: Callable[..., Served]
) -> None:
    """The trial before pools are sized has no step of prompts, and its kernels may have been tried before."""
    served, flash = serve([group_of("g", FULL)]), backend(fa3=True)
    for step in served.steps():
        flash.forget()
        launches_of(small, flash, served, step)
        assert flash.kinds == 2


def test_decodes_beside_a_long_prompt_need_not_fill_their_tiles(backend: Backend, serve: Callable[..., Served]) -> None:
    """They cost a tile each: of their own keys, not of the prompt's."""
    batch = PagedBatch(group_of("g", FULL), "cpu")
    for decodes, pages, fills in ((0, 0, True), (100, 4, True), (100, 400, False)):
        queries, keys = [4096, *[1] * decodes], [1024, *[pages] * decodes]
        starts = (np.concatenate([[0], np.cumsum(counts)]).astype(np.int32) for counts in (queries, keys))
        last = np.full(len(queries), 4, np.int32)
        qo, kv = starts
        batch.take((qo, kv, np.zeros(sum(keys), np.int32), last), np.zeros(sum(queries), np.int64))
        assert batch.fills(128) is fills, (decodes, pages)


@pytest.mark.parametrize(
    ("capability", "cuda", "runs"),
    [
        ((9, 0), "12.4", True),
        ((9, 0), "13.0", True),
        ((9, 0), "12.2", False),
        ((8, 0), "13.0", False),
        ((10, 0), "13.0", False),
        ((9, 0), None, False),
        (None, "13.0", False),
    ],
)
def test_hopper_has_fa3(monkeypatch: pytest.MonkeyPatch, capability: Any, cuda: str | None, runs: bool) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    machine = Machine("0.7.2.post1", capability)
    assert choice.runs_fa3(machine) is runs
    monkeypatch.setattr(choice.Machine, "here", lambda device: machine)
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(choice, "FlashInfer", lambda device, **options: made.append(options))
    choice.make(Choice("flashinfer", ""), "cuda:0", batch_invariant=True)
    assert made == [{"fa3": runs, "batch_invariant": True}]
