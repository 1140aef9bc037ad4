"""What submitting a load costs the CPU: addresses, coalescing, streams and events, and driver calls that do nothing.

A long prompt's full-attention blocks, in as many runs as a pool that has been in use hands out. The driver's own share
comes on top; ``benchmarks.gpu`` measures the whole.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import numba
import numpy as np

from kvtier import FullAttention, GroupSpec
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.engines.submission import SubmissionThreads
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.geometry.layout import Layout

BLOCKS = 90_112 // 16
MODELS = {
    "gpt-oss-20b": GroupSpec("full", FullAttention(), 12, 8, 64),
    "Gemma-3-12B": GroupSpec("full", FullAttention(), 8, 8, 256),
}
RUNS = 1_500

N = numba.types.uint64


@numba.cfunc(numba.int32(N, N, N, N))
def _nothing(dst, src, num_bytes, stream):  # type: ignore[no-untyped-def]
    return 0


class NoDriver:
    """``CudaApi`` whose calls return at once."""

    def __init__(self) -> None:
        self._handles = itertools.count(1)

    def copy_function(self) -> int:
        return int(_nothing.address or 0)

    def new_stream(self, urgent: bool) -> int:
        return next(self._handles)

    def new_event(self) -> int:
        return next(self._handles)

    def compute_stream(self) -> int:
        return 0

    def has_happened(self, event: int) -> bool:
        return True

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


class Nowhere:
    """An arena with addresses and no memory."""

    def __init__(self, group: GroupSpec, address: int) -> None:
        layout = Layout.fixed([group.block_bytes], [2 * BLOCKS])
        self.origins, self.strides, self.block_bytes, self.rows = (
            layout.origins,
            layout.strides,
            layout.block_bytes,
            layout.rows,
        )
        self.address = address


def load(runs: int) -> Transfer:
    """``BLOCKS`` blocks in so many runs that follow each other in both tiers."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, BLOCKS), runs - 1, replace=False))
    lengths = np.diff([0, *cuts, BLOCKS])
    device, host = runs_of(lengths), runs_of(lengths, rng.permutation(runs))
    keys = np.zeros((BLOCKS, 2), np.uint64)
    return Transfer(1, Direction.LOAD, np.zeros(BLOCKS, np.int32), device, host, keys, 0, 0)


def runs_of(lengths: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """Block ids in runs of these lengths that do not touch each other, placed in this order; int32."""
    starts = np.empty(len(lengths), np.int64)
    placed = np.arange(len(lengths)) if order is None else order
    starts[placed] = np.cumsum([1, *lengths[placed][:-1] + 1])
    return np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32)


def engine(model: str, threads: bool) -> StreamsEngine:
    group = MODELS[model]
    memory = TierMemory(Nowhere(group, 1 << 44), Nowhere(group, 1 << 45), False)  # type: ignore[arg-type]
    starts = np.arange(1 << 45, (1 << 45) + (64 << 30), 16 << 30, dtype=np.uint64)
    runtime = CudaRuntime(NoDriver(), starts)  # type: ignore[arg-type]
    return StreamsEngine(memory, runtime, SubmissionThreads() if threads else None)


def whole(model: str, runs: int = RUNS) -> Iterator[float]:
    """All of it, on one thread."""
    made, transfer = engine(model, threads=False), load(runs)
    for _ in range(200):
        begun = time.perf_counter()
        made.submit(transfer)
        yield time.perf_counter() - begun
        made.poll()


def per_descriptor(model: str) -> Iterator[float]:
    """The same where no two blocks are neighbours."""
    for seconds in whole(model, BLOCKS):
        yield seconds / BLOCKS


def handing_over(model: str, runs: int = RUNS) -> Iterator[float]:
    """The scheduling thread's share when a thread of its own submits."""
    made, transfer = engine(model, threads=True), load(runs)
    for _ in range(200):
        begun = time.perf_counter()
        made.submit(transfer)
        yield time.perf_counter() - begun
        while not made.poll():
            threading.Event().wait(0.0002)
    made.close(5.0)
