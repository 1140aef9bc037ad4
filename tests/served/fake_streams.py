"""torch's streams and graphs without a GPU: its own ``torch.cuda.graph`` and ``torch.cuda.stream`` over played ones.

Arguments are bound by the installed torch's signatures. Graphs are played as CUDAGraph.cpp has them: a capture in which
something forbidden was called cannot be ended, which neither gives its memory pool free for another capture nor makes
the stream current that was so before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda:0")
INVALIDATED = "operation failed due to a previous error during capture"


class PlayedStream:
    """A stream by its name."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, DEVICE
        self.waited: list[PlayedStream] = []

    def wait_stream(self, other: PlayedStream) -> None:
        self.waited.append(other)


class PlayedEvent:
    """An event."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def synchronize(self) -> None:
        self._cuda.forbidden()
        self._cuda.event_waits += 1


@dataclass
class Cuda:
    """What was made and asked for. ``capturing``: the graph under way."""

    default: PlayedStream = field(default_factory=lambda: PlayedStream("default"))
    streams: list[PlayedStream] = field(default_factory=list)
    graphs: list[PlayedGraph] = field(default_factory=list)
    open_pools: set[int] = field(default_factory=set)
    capturing: PlayedGraph | None = None
    current: PlayedStream = field(init=False)
    synchronized: int = 0
    event_waits: int = 0
    cached: int = 0
    """Bytes that the allocator keeps for later."""
    _reserved: int = 0
    _most_reserved: int = 0

    def reserve(self, num_bytes: int) -> None:
        """The allocator takes memory from the device, or gives it back."""
        self._reserved += num_bytes
        self._most_reserved = max(self._most_reserved, self._reserved)

    def __post_init__(self) -> None:
        self.current = self.default

    def forbidden(self) -> None:
        """What ``.item()`` does: the host waits for the stream."""
        if self.capturing is not None:
            self.capturing.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def __call__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts this in the place of CUDA."""
        stream_signature = inspect.signature(torch.cuda.Stream.__new__)

        def new_stream(*args: Any, **kwargs: Any) -> PlayedStream:
            stream_signature.bind(torch.cuda.Stream, *args, **kwargs)
            self.streams.append(PlayedStream(f"side {len(self.streams)}"))
            return self.streams[-1]

        def set_stream(stream: PlayedStream) -> None:
            self.current = stream

        def synchronize(device: Any = None) -> None:
            assert self.capturing is None, "waited for the device while capturing"
            self.synchronized += 1

        def empty_cache() -> None:
            self.cached = 0

        def reset_peak_memory_stats(device: Any = None) -> None:
            self._most_reserved = self._reserved

        played: dict[str, Callable[..., Any]] = {
            "Stream": new_stream,
            "Event": lambda: PlayedEvent(self),
            "is_current_stream_capturing": lambda: self.capturing is not None,
            "current_stream": lambda device=None: self.current,
            "set_stream": set_stream,
            "synchronize": synchronize,
            "empty_cache": empty_cache,
            "reset_peak_memory_stats": reset_peak_memory_stats,
            "memory_reserved": lambda device=None: self._reserved + self.cached,
            "max_memory_reserved": lambda device=None: self._most_reserved + self.cached,
            "CUDAGraph": lambda: PlayedGraph(self),
            "_get_device_index": lambda *_, **__: 0,
            "_exchange_device": lambda index: 0,
            "_maybe_exchange_device": lambda index: 0,
        }
        for name, function in played.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)


CAPTURE_BEGIN = inspect.signature(torch.cuda.CUDAGraph.capture_begin)


class PlayedGraph:
    """A graph: what it was captured with, and how that went."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.number = len(cuda.graphs) + 1
        cuda.graphs.append(self)
        self.stream: PlayedStream | None = None
        self.asked: dict[str, Any] = {}
        self.invalid = False
        self.ended = False
        self.replayed = 0
        self._pool = 0

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        bound = CAPTURE_BEGIN.bind(self, *args, **kwargs)
        bound.apply_defaults()
        self.asked, self.stream = bound.arguments, self._cuda.current
        assert self.stream is not self._cuda.default, "CUDA graphs must be captured on a non-default stream"
        self._pool = self.asked["pool"] or self.number
        if self._pool in self._cuda.open_pools:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._cuda.open_pools.add(self._pool)
        self._cuda.capturing = self

    def capture_end(self) -> None:
        assert self._cuda.current is self.stream, "Capture must end on the same stream it began on."
        self._cuda.capturing = None
        if self.invalid:
            raise RuntimeError(INVALIDATED)
        self._cuda.open_pools.discard(self._pool)
        self.ended = True

    def pool(self) -> int:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self) -> None:
        assert self.ended
        self.replayed += 1
