"""Decode steps as captured CUDA graphs: one launch instead of hundreds.

Owns       the buckets (numbers of rows that a graph was captured for), their input buffers and their graphs.
Promises   a step runs in a graph only if each of its entries computes one token and its pages fit; every other step,
           and all steps where capturing failed, run eagerly, and the reason is logged once. Rows beyond the step's are
           null rows: token 0 on the null block, written nowhere, looked at by nobody.
Does not   change what is computed, or plan attention (the backend does, before each replay).

Capture happens before the first request, with no copy under way, in the thread-local mode, so that other threads may
go on calling CUDA. What a graph reads lies where it lay when it was captured: ids, positions, slots and index arrays
are copied there for each step; pools do not move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier import KVCache, Step
from runner.model import HybridModel

_log = logging.getLogger(__name__)

Captured = tuple[Callable[[], None], Tensor]
"""What replays a graph, and where it leaves its logits."""
Capture = Callable[[Callable[[], Tensor]], Captured]


def why_eager(model: HybridModel) -> str | None:
    """Why an engine does not capture this model's decode steps; None if it does."""
    if model.device.type != "cuda":
        return f"CUDA graphs are for CUDA devices, and the model is on {model.device}"
    if not hasattr(model.backend, "GraphBatch"):
        return f"the {model.attention.name} attention cannot be captured"
    return None


def captured(model: HybridModel, cache: KVCache, max_running: int) -> DecodeGraphs | None:
    """An engine's decode steps, captured where they can be (``why_eager``). Call it while no copy is under way."""
    if why_eager(model) is not None:
        return None
    graphs = DecodeGraphs(model, cache, max_running)
    graphs.capture()
    return graphs


def bucket_sizes(max_running: int) -> list[int]:
    """Rows to capture for: 1, 2, 4, then every 8 up to ``max_running``, which is the last."""
    return sorted({n for n in (1, 2, 4, *range(8, max_running, 8)) if n < max_running} | {max_running})


def bucket_for(entries: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ``sizes`` (ascending) with room for so many entries; None if there is none."""
    return next((size for size in sizes if size >= entries), None)


def is_decode(step: Step) -> bool:
    """Whether every entry computes exactly one token."""
    return 0 < step.num_tokens == len(step.request_ids)


def page_room(cache: KVCache, group: str, rows: int) -> int:
    """Pages that a captured step may have in a group: requests that share blocks list them each, so twice the pool."""
    return 2 * cache.kv(group, 0)[0].shape[0] + rows


class Bucket:
    """The inputs of a captured step of ``rows`` entries, and one forward over them."""

    def __init__(self, model: HybridModel, cache: KVCache, rows: int, kv_indices: Mapping[str, Tensor]) -> None:
        self.rows = rows
        self._model, self._cache = model, cache
        self._token_ids, self._positions = (
            torch.zeros(rows, dtype=torch.long, device=model.device) for _ in ("ids", "positions")
        )
        self._every = torch.arange(rows, device=model.device)
        self._batches = {
            group.name: model.backend.GraphBatch(group, rows, kv_indices[group.name]) for group in cache.spec.groups
        }

    def has_room(self, step: Step) -> bool:
        """Whether the step's pages fit into every group's buffer."""
        return all(batch.has_room(step.group(name).paged()) for name, batch in self._batches.items())

    def fill(self, step: Step) -> None:
        """Brings in a decode step: what its kernels read, and their plans."""
        for buffer, values in ((self._token_ids, step.token_ids), (self._positions, step.positions)):
            staged = torch.zeros(self.rows, dtype=torch.long, pin_memory=self._model.device.type == "cuda")
            staged[: len(values)] = torch.as_tensor(values)
            buffer.copy_(staged, non_blocking=True)
        for name, batch in self._batches.items():
            self._model.backend.refill(batch, step.group(name))

    def forward(self) -> Tensor:
        """Logits [rows, vocab] of what the buffers hold; launches the same work whatever that is."""
        context = self._model.context(self._cache, self._batches, self._positions)
        return self._model.run(self._token_ids, context, self._every)


class DecodeGraphs:
    """The captured decode steps of one model on one cache. Calls come from the thread that runs the steps."""

    def __init__(self, model: HybridModel, cache: KVCache, max_running: int, capture: Capture | None = None) -> None:
        """Nothing is captured before ``capture``. ``capture``: what makes a graph of a forward; None: CUDA."""
        self._model, self._cache = model, cache
        self.sizes = bucket_sizes(max_running)
        self._capture = capture if capture is not None else CudaCapture(model.device)
        self._buckets: dict[int, tuple[Bucket, Captured]] = {}
        self._said: set[str] = set()
        self.replayed = 0
        self.eager = 0

    @torch.no_grad()
    def capture(self) -> None:
        """Captures all buckets, the largest first (the others reuse its memory). Call it while no copy is under way.

        A family that cannot be captured is served eagerly.
        """
        backend = self._model.backend
        if not hasattr(backend, "GraphBatch"):
            self._fall_back(f"the {self._model.attention.name} attention cannot be captured")
            return
        largest = self.sizes[-1]
        pages = {
            g.name: torch.zeros(page_room(self._cache, g.name, largest), dtype=torch.int32, device=self._model.device)
            for g in self._cache.spec.groups
        }
        try:
            for rows in reversed(self.sizes):
                bucket = Bucket(self._model, self._cache, rows, pages)
                self._buckets[rows] = bucket, self._capture(bucket.forward)
        except Exception as problem:  # modeling code that waits for the device, memory, kernels that are not there
            self._buckets.clear()
            self._fall_back(f"capturing failed ({type(problem).__name__}: {problem})")

    @torch.no_grad()
    def forward(self, step: Step) -> Tensor | None:
        """Logits float32 [len(step.sample_rows), vocab], valid until the next call; None: run this step eagerly."""
        if not self._buckets or not is_decode(step):
            self._run_eagerly()
            return None
        size = bucket_for(len(step.request_ids), self.sizes)
        if size is None:
            self._run_eagerly(f"steps of more than {self.sizes[-1]} entries are not captured")
            return None
        bucket, (replay, logits) = self._buckets[size]
        if not bucket.has_room(step):
            self._run_eagerly("a step has more pages than its graph has room for")
            return None
        bucket.fill(step)
        replay()
        self.replayed += 1
        rows = np.asarray(step.sample_rows)
        if len(rows) == len(step.request_ids):
            return logits[: len(rows)]
        return logits[torch.as_tensor(rows.astype(np.int64)).to(logits.device, non_blocking=True)]

    def stats(self) -> dict[str, Any]:
        """Captured sizes, steps replayed and run eagerly, and why some ran eagerly that might not have."""
        return {
            "captured": sorted(self._buckets),
            "replayed": self.replayed,
            "eager": self.eager,
            "reasons": sorted(self._said),
        }

    def _run_eagerly(self, reason: str | None = None) -> None:
        self.eager += 1
        if reason is not None:
            self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("decode steps run without CUDA graphs: %s", reason)


class CudaCapture:
    """Makes CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, forward: Callable[[], Tensor]) -> Captured:
        """Runs ``forward`` twice on a stream of its own: once to compile, plan and allocate, once to be captured."""
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            logits = forward()
        self._pool = graph.pool()
        current.wait_stream(stream)
        return graph.replay, logits
