"""The backend's writes, by the Triton kernel in its interpreter and by its twin in torch: the same bytes, everywhere.

Which of the two runs is decided where it is on a GPU (``kernels.choice``); here that decision alone is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from breadth import sample, sized
from torch import Tensor

from attention.conftest import Serve
from attention.flashinfer_steps import FULL, WINDOW, group_of
from attention.served_steps import Served
from attention.test_flashinfer_fp8 import ROUNDING, scaled, scales_of
from kvtier import GroupSpec, Step
from kvtier.attention.flashinfer import FlashInfer

pytest.importorskip("triton", reason="triton is not installed; `make test` installs it")
pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS = {
    "float16": group_of("g", WINDOW),
    "bfloat16": group_of("g", FULL, dtype="bfloat16", num_kv_heads=3),
    "float32": group_of("g", FULL, dtype="float32", head_dim=16),
    "K and V of two sizes": group_of("g", FULL, head_dim=192, head_dim_v=128),
    "fp8": scaled("g", WINDOW, ROUNDING),
    "fp8, unscaled": group_of("g", FULL, dtype="fp8"),
    "fp8, K and V of two sizes": scaled("g", FULL, ROUNDING, head_dim=24, head_dim_v=16, num_kv_heads=1),
}
Write = Callable[[Any, Tensor, Tensor], None]


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """``by("kernel")``, ``by("twin")``: what writes from now on. Returns a list that grows with each launch."""
    from kvtier.attention.kernels import triton_write_kv

    module, launch, launches = sys.modules["kvtier.attention.kernels.write_kv"], triton_write_kv.launch, []

    def counted(*args: Any) -> None:
        launches.append(len(args[4]))
        with np.errstate(over="ignore"):  # the interpreter divides in NumPy
            launch(*args)

    monkeypatch.setattr(triton_write_kv, "launch", counted)

    def choose(which: str) -> list[int]:
        monkeypatch.setattr(module, "runs_kernel", lambda device: which == "kernel")
        return launches

    return choose


def bytes_after(served: Served, group: GroupSpec, write: Write, new: list[Tensor]) -> list[Tensor]:
    """The whole pools of layer 1, and of its neighbour, after a write that began with the pools as they are now."""
    views = [view for layer in (1, 0) for view in served.cache.kv(group.name, layer)]
    before = [view.clone() for view in views]
    write((views[0], views[1]), *new)
    after = [view.contiguous().view(torch.uint8).clone() for view in views]
    for view, kept in zip(views, before, strict=True):
        view.copy_(kept)
    return after


def compare(served: Served, step: Step, group: GroupSpec, by: Any, write: Write, new: list[Tensor]) -> None:
    """Both ways of writing give the same bytes, and wrote something."""
    launches = by("twin")
    launches.clear()
    twin = bytes_after(served, group, write, new)
    assert launches == []
    by("kernel")
    kernel = bytes_after(served, group, write, new)
    assert launches == [len(new[0])]
    assert all(torch.equal(a, b) for a, b in zip(twin, kernel, strict=True))
    unwritten = [view.contiguous().view(torch.uint8) for view in served.cache.kv(group.name, 1)]
    assert not any(torch.equal(a, b) for a, b in zip(twin, unwritten, strict=False))


@pytest.mark.parametrize("name", sample(GROUPS, ["bfloat16", "K and V of two sizes", "fp8"]))
def test_a_step_s_tokens(name: str, serve: Serve, by: Any) -> None:
    """Ragged steps over real pools: block-major views of all layers, V beside K where its heads are of another size."""
    group = GROUPS[name]
    served, flash, checked = serve([group], requests=3, most=30), FlashInfer("cpu", workspace_bytes=16), 0
    scales = scales_of(group, 1)
    for step in served.steps():
        batch = flash.PagedBatch.from_step(step, group, "cpu")
        write: Write = lambda kv, k, v, batch=batch: flash.write_kv(*kv, k, v, batch, **scales)  # noqa: E731
        if checked < sized(2, 4):
            compare(served, step, group, by, write, list(served.new_kv(step, group, 1)))
            checked += 1
        by("kernel")
        flash.write_kv(*served.cache.kv("g", 1), *served.new_kv(step, group, 1), batch, **scales)
        served.assert_written(step, group, 1)
    assert checked == sized(2, 4)


@pytest.mark.parametrize("name", ["bfloat16", "K and V of two sizes", "fp8"])
def test_rows_of_no_token_write_nothing(name: str, serve: Serve, by: Any) -> None:
    """A captured batch of 6 rows, of which a decode step fills fewer: the others have slot -1."""
    group = GROUPS[name]
    served, flash = serve([group], most=6, answer=12), FlashInfer("cpu", workspace_bytes=16)
    batch = flash.GraphBatch(group, 6, torch.zeros(64, dtype=torch.int32))
    scales, checked = scales_of(group, 1), 0
    write: Write = lambda kv, k, v: flash.write_kv(*kv, k, v, batch, **scales)  # noqa: E731
    for step in served.steps():
        n = len(step.request_ids)
        if step.num_tokens != n or checked == 3:
            continue
        flash.refill(batch, step.group("g"))
        assert batch.slot_mapping.tolist()[n:] == [-1] * (6 - n)
        pairs = served.new_kv(step, group, 1)
        new = [torch.cat([x, torch.full((6 - n, *x.shape[1:]), 7.0, dtype=x.dtype)]) for x in pairs]
        compare(served, step, group, by, write, new)
        by("kernel")
        null = [view[0].contiguous().view(torch.uint8).clone() for view in served.cache.kv("g", 1)]
        write(served.cache.kv("g", 1), *new)
        served.assert_written(step, group, 1)
        for view, kept in zip(served.cache.kv("g", 1), null, strict=True):
            assert torch.equal(view[0].contiguous().view(torch.uint8), kept)
        checked += 1
    assert checked == 3


def test_queries_and_keys_cut_out_of_one_projection(serve: Serve, by: Any) -> None:
    """Models give K and V as [1, H, T, D] transposed, or as a slice of a wider row."""
    group = GROUPS["fp8"]
    served, flash = serve([group], requests=1, most=30), FlashInfer("cpu", workspace_bytes=16)
    step = next(served.steps())
    batch = flash.PagedBatch.from_step(step, group, "cpu")
    write: Write = lambda kv, k, v: flash.write_kv(*kv, k, v, batch, **scales_of(group, 1))  # noqa: E731
    k, v = served.new_kv(step, group, 1)
    fused = torch.cat([k, v, k], 1)
    strided = [fused[:, :2], v.transpose(0, 1).contiguous().transpose(0, 1)]
    by("twin")
    want = bytes_after(served, group, write, [k, v])
    compare(served, step, group, by, write, strided)
    by("kernel")
    assert all(torch.equal(a, b) for a, b in zip(want, bytes_after(served, group, write, strided), strict=True))
