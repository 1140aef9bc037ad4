"""Capturing CUDA graphs, on torch's own code over played streams and graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier.attention._flashinfer_plan import Lane
from kvtier.attention._moment import new_moment
from runner.model import graphs as module
from runner.model.graphs import CudaCapture, DecodeGraphs

from .conftest import MAX_RUNNING, Serving
from .fake_streams import DEVICE, Cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    played = Cuda()
    played(monkeypatch)
    monkeypatch.setattr(module, "capture_stream", cache(module.capture_stream.__wrapped__))
    return played


def forward(cuda: Cuda, fails: Callable[[], None] = lambda: None) -> Callable[[], Tensor]:
    """A forward that is captured the second time that it runs, and then does ``fails``."""

    def run() -> Tensor:
        assert cuda.current is not cuda.default
        if cuda.capturing is not None:
            fails()
        return torch.zeros(2, 3)

    return run


def missing() -> None:
    raise KeyError("layer")


@pytest.mark.parametrize("fails", ["forbidden", "python", "warm up"])
def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_tells_the_cause(fails: str, cuda: Cuda) -> None:
    capture = CudaCapture(DEVICE)
    capture(forward(cuda))
    if fails == "warm up":
        with pytest.raises(ZeroDivisionError):
            capture(lambda: torch.zeros(1 // 0))
    elif fails == "forbidden":
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            capture(forward(cuda, cuda.forbidden))
    else:
        with pytest.raises(KeyError, match="layer"):
            capture(forward(cuda, missing))
    assert cuda.current is cuda.default


def test_captures_go_on_after_one_that_failed(cuda: Cuda) -> None:
    """The failed one's memory pool stays open: torch takes no further captures into it."""
    capture = CudaCapture(DEVICE)
    replays = []
    for fails in (lambda: None, cuda.forbidden, lambda: None, lambda: None):
        try:
            replays.append(capture(forward(cuda, fails))[0])
        except RuntimeError as problem:
            assert "not permitted" in str(problem)
    assert len(replays) == 3
    for replay in replays:
        replay()
    assert [graph.replayed for graph in cuda.graphs] == [1, 0, 1, 1]
    pools = [graph.asked["pool"] for graph in cuda.graphs]
    assert pools[1] == cuda.graphs[0].pool() and pools[2] is None and pools[3] == cuda.graphs[2].pool()
    assert cuda.current is cuda.default


def test_captures_share_one_stream_and_one_pool(cuda: Cuda) -> None:
    """Blocks of a pool are a stream's, and each stream has cuBLAS workspaces of its own."""
    first, second = CudaCapture(DEVICE), CudaCapture(DEVICE)
    for _ in range(3):
        first(forward(cuda))
    assert len(cuda.streams) == 1 and {graph.stream for graph in cuda.graphs} == set(cuda.streams)
    assert [graph.asked["pool"] for graph in cuda.graphs] == [None, 1, 1]
    second(forward(cuda))
    assert len(cuda.streams) == 1 and cuda.graphs[-1].asked["pool"] is None


def test_a_rehearsal_tells_what_a_forward_takes_of_the_device(cuda: Cuda) -> None:
    """Beside what was there: new segments for the stream that it will be captured on, with nothing cached."""
    capture = CudaCapture(DEVICE)

    def run() -> Tensor:
        assert cuda.current in cuda.streams and cuda.capturing is None
        cuda.reserve(700)
        cuda.reserve(-300)
        cuda.reserve(100)
        return torch.zeros(1)

    cuda.reserve(5000)
    cuda.reserve(-4000)
    cuda.cached = 64
    assert capture.rehearse(run) == 700
    assert cuda.current is cuda.default and cuda.cached == 0
    capture(forward(cuda))
    assert len(cuda.streams) == 1

    def fails() -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        capture.rehearse(fails)
    assert cuda.current is cuda.default


@pytest.mark.parametrize("run", [CudaCapture.__call__, CudaCapture.rehearse])
def test_what_a_forward_has_queued_has_run_when_it_fails(run: Callable[..., Any], cuda: Cuda) -> None:
    """Its buffers are the current stream's, which may fill them anew."""
    waits: list[int] = []

    def fails() -> Tensor:
        waits.append(cuda.synchronized)
        raise KeyError("layer")

    with pytest.raises(KeyError, match="layer"):
        run(CudaCapture(DEVICE), fails)
    assert waits and cuda.synchronized > waits[0]


def test_a_wrapper_that_dies_while_a_graph_is_captured_does_not_break_it(cuda: Cuda) -> None:
    """As garbage of an earlier model. Nobody may wait then; the copy of its plan has run, as all that came before."""
    key: Any = None
    lanes = [Lane(key, None, new_moment(DEVICE), set()) for _ in range(2)]
    CudaCapture(DEVICE)(forward(cuda, lanes.pop))
    assert len(lanes) == 1 and cuda.graphs[0].ended and cuda.event_waits == 0
    lanes.clear()
    assert cuda.event_waits == 1


def test_other_threads_may_call_cuda_while_a_graph_is_captured(cuda: Cuda) -> None:
    """The mode is the calling thread's; what the graph is given else, torch's own signatures bind."""
    CudaCapture(DEVICE)(forward(cuda))
    (graph,) = cuda.graphs
    assert graph.asked["capture_error_mode"] == "thread_local"


def test_what_was_queued_before_comes_before_and_what_is_queued_after_comes_after(cuda: Cuda) -> None:
    order: list[str] = []

    def run() -> Tensor:
        assert cuda.current.waited == [cuda.default], "tensors that the current stream still fills"
        order.append("captured" if cuda.capturing is not None else "ran")
        if order == ["ran", "captured"]:
            assert cuda.synchronized > 0, "the first run may have begun to compile, or to copy a plan"
        return torch.zeros(1)

    replay, logits = CudaCapture(DEVICE)(run)
    assert order == ["ran", "captured"] and cuda.default.waited == cuda.streams
    assert logits.shape == (1,) and cuda.current is cuda.default
    replay()
    assert cuda.graphs[0].replayed == 1


def test_sizes_that_fail_on_a_device_leave_the_others(
    cuda: Cuda, serve: Callable[..., Serving], caplog: pytest.LogCaptureFixture
) -> None:
    """Of 5, 4, 2 and 1 rows, the 2 ask for what is forbidden while capturing."""
    model, pools, _ = serve("gemma3")
    run = model.run

    def forbidden_for_two(token_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(token_ids) == 2:
            cuda.forbidden()
        return run(token_ids, *args, **kwargs)

    model.run = forbidden_for_two  # type: ignore[method-assign]
    graphs = DecodeGraphs(model, pools, MAX_RUNNING, capture=CudaCapture(DEVICE))
    graphs.capture()
    assert graphs.stats()["captured"] == [1, 4, 5]
    assert graphs.stats()["reasons"] == [
        "capturing failed (RuntimeError: operation not permitted when stream is capturing)"
    ]
    assert cuda.current is cuda.default and len(cuda.streams) == 1
