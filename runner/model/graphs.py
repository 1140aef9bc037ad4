"""Decode steps as captured CUDA graphs: one launch instead of hundreds.

Owns       the buckets (captured numbers of rows), their input buffers and graphs, and the one buffer of their logits.
Promises   a step runs in a graph only if each of its entries computes one token and its pages fit. Other steps run
           eagerly, and so do steps whose size could not be captured. The reason is logged once. Rows beyond the step's
           are null rows: token 0 on the null block, written nowhere, never looked at. A capture that fails leaves the
           current stream as it was.
Does not   change the computation, or plan attention (the backend does, before each replay).

Capture happens before the first request, once no copy is under way. It is in the thread-local mode, so other threads
may go on calling CUDA. A graph reads from the places of its capture: ids, positions, slots and index arrays are copied
there for each step. Pools do not move.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtier import CacheSpec, GroupSpec, KVCache, Step
from kvtier.attention.kernels import words
from kvtier.geometry.kinds import Kind
from runner.model.hybrid import HybridModel
from runner.model.selfcheck import scratch_cache
from runner.model.state_steps import StatesOfDecode, unsound

_log = logging.getLogger(__name__)

QUIESCE_S = 30.0
"""How long copies under way are waited for before graphs are captured."""

Captured = tuple[Callable[[], None], Tensor]
"""The replay of a graph, and the place of its logits."""
Capture = Callable[[Callable[[], Tensor]], Captured]
Rehearse = Callable[[Callable[[], Tensor]], int]
"""Runs a forward, and returns the device bytes that it took at its peak."""


def why_eager(model: HybridModel) -> str | None:
    """Why an engine does not capture this model's decode steps; None if it does."""
    if model.device.type != "cuda":
        return f"CUDA graphs are for CUDA devices, and the model is on {model.device}"
    if model.compressed.layers:
        return "steps of layers with compressed entries cannot be captured"
    if not hasattr(model.backend, "GraphBatch"):
        return f"the {model.attention.name} attention cannot be captured"
    return None


def captured(model: HybridModel, cache: KVCache, max_running: int) -> DecodeGraphs | None:
    """An engine's decode steps, captured if they can be (``why_eager``)."""
    if why_eager(model) is not None:
        return None
    graphs = DecodeGraphs(model, cache, max_running)
    graphs.capture()
    return graphs


def bucket_sizes(max_running: int) -> list[int]:
    """Rows to capture for: 1, 2, 4, then every 8 up to ``max_running``, which is the last."""
    return sorted({n for n in (1, 2, 4, *range(8, max_running, 8)) if n < max_running} | {max_running})


FILLED_BYTES = 16
"""Bytes of pinned memory for each row of a step: its id and its position."""


def bucket_bytes(max_running: int, num_groups: int) -> int:
    """Bytes of the own inputs of captured sizes: slots and index arrays by group; ids and positions."""
    return sum((20 * rows + 8) * num_groups + 24 * rows + 16 * (rows % 2) for rows in bucket_sizes(max_running))


def bucket_for(entries: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ``sizes`` (ascending) with room for this many entries; None if there is none."""
    return next((size for size in sizes if size >= entries), None)


def is_decode(step: Step) -> bool:
    """Whether every entry computes exactly one token."""
    return 0 < step.num_tokens == len(step.rows)


def most_pages(group: GroupSpec, blocks: int, rows: int, max_tokens: int | None) -> int:
    """Pages that a decode step of ``rows`` entries can list in a pool of ``blocks`` blocks.

    They are the pages that each entry can see: requests that share blocks list them each. ``max_tokens``: of a request;
    None: all that the pool holds.
    """
    longest = blocks * group.block_tokens
    return rows * min(blocks, group.peak_blocks(min(longest, max_tokens or longest)) + 1)


@torch.no_grad()
def memory(model: HybridModel, spec: CacheSpec, max_running: int, rehearse: Rehearse | None = None) -> int:
    """Device bytes to keep free for captured decode steps beside the attention's own; found by a rehearsal.

    They are the logits, and twice the bytes of the largest forward. The graphs' pool holds them once; the forward
    before each capture takes them once more. Index arrays are not among them.
    """
    largest = bucket_sizes(max_running)[-1]
    try:
        cache, logits = scratch_cache(spec, model.device), _logits(model, largest)
        pages = {g.name: torch.zeros(largest, dtype=torch.int32, device=model.device) for g in _paged(spec)}
        bucket = Bucket(model, cache, largest, pages, logits)
        taken = (rehearse or CudaCapture(model.device).rehearse)(bucket.forward)
    except Exception:  # fails again when it is captured, and is told then
        taken = 0
    return largest * model.vocab_size * 4 + 2 * taken


def _paged(spec: CacheSpec) -> list[GroupSpec]:
    """The groups of K and V."""
    return [group for group in spec.groups if group.attention.kind is not Kind.STATE]


def _logits(model: HybridModel, rows: int) -> Tensor:
    return torch.empty(rows, model.vocab_size, dtype=torch.float32, device=model.device)


def _failed(problem: Exception) -> str:
    return f"capturing failed ({type(problem).__name__}: {problem})"


class Bucket:
    """The inputs of a captured step of ``rows`` entries, and one forward over them."""

    def __init__(
        self, model: HybridModel, cache: KVCache, rows: int, kv_indices: Mapping[str, Tensor], logits: Tensor
    ) -> None:
        """``kv_indices`` (``GraphBatch``) and ``logits`` float32 [rows or more, vocab]: shared by buckets.

        One bucket runs at a time.
        """
        self.rows = rows
        self._logits = logits[:rows]
        self._model, self._cache = model, cache
        self._inputs = torch.zeros(2 * (rows + rows % 2), dtype=torch.long, device=model.device)
        """Token ids, then positions from a multiple of 16 bytes on, as a tensor of their own would begin."""
        self._token_ids, self._positions = self._inputs.view(2, -1)[:, :rows]
        self._every = torch.arange(rows, device=model.device)
        self._scales: Mapping[tuple[str, int], Mapping[str, Tensor]] = {}
        """The scales of the last forward: a graph of it knows their addresses only."""
        self._batches = {
            group.name: model.backend.GraphBatch(group, rows, kv_indices[group.name]) for group in _paged(cache.spec)
        }
        self._states = {
            group.name: StatesOfDecode(rows, len(cache.state(group.name, 0)[0]) - 1, model.device)
            for group in cache.spec.groups
            if group.name not in self._batches
        }

    def has_room(self, step: Step) -> bool:
        """Whether the step's pages fit into every group's buffer."""
        return all(batch.has_room(step.group(name).paged()) for name, batch in self._batches.items())

    def fill(self, step: Step) -> None:
        """Brings in a decode step: its kernels' inputs, and their plans."""
        staged = words.staged(len(self._inputs), torch.long, self._model.device).zero_()
        for mine, values in zip(staged.view(2, -1), (step.token_ids, step.positions), strict=True):
            mine[: len(values)] = torch.as_tensor(values)
        words.send(staged, self._inputs)
        for name, batch in self._batches.items():
            self._model.backend.refill(batch, step.group(name))
        for name, states in self._states.items():
            states.fill(step.group(name))
        self.let_go()

    def let_go(self) -> None:
        """Every layer is planned: gives back the arrays of the step."""
        for batch in self._batches.values():
            batch.let_go()

    def forward(self) -> Tensor:
        """Logits [rows, vocab] of the buffers' content; launches the same work for any content."""
        context = self._model.context(self._cache, self._batches, self._positions, self._states)
        self._scales = context.scales
        return self._model.run(self._token_ids, context, self._every, out=self._logits)


class DecodeGraphs:
    """The captured decode steps of one model on one cache. Calls come from the thread that runs the steps."""

    def __init__(self, model: HybridModel, cache: KVCache, max_running: int, capture: Capture | None = None) -> None:
        """Nothing is captured before ``capture``. ``capture``: makes a graph of a forward; None: CUDA."""
        self._model, self._cache = model, cache
        self.sizes = bucket_sizes(max_running)
        self._capture = capture if capture is not None else CudaCapture(model.device)
        self._buckets: dict[int, tuple[Bucket, Captured]] = {}
        self._said: set[str] = set()
        self._of_states = [group for group in cache.spec.groups if group.attention.kind is Kind.STATE]
        self.replayed = 0
        self.eager = 0

    @torch.no_grad()
    def capture(self) -> None:
        """Captures all buckets, the largest first (the others reuse its memory), once copies under way have ended.

        A size that cannot be captured is left out; if the first two fail in the same way, so would the others.
        """
        backend = self._model.backend
        if not hasattr(backend, "GraphBatch"):
            self._fall_back(f"the {self._model.attention.name} attention cannot be captured")
            return
        if not self._cache.quiesce(QUIESCE_S):
            self._fall_back("copies were under way that did not end")
            return
        largest, device = self.sizes[-1], self._model.device
        try:
            blocks = {group: self._cache.kv(group.name, 0)[0].shape[0] for group in _paged(self._cache.spec)}
            rooms = {g.name: most_pages(g, n, largest, self._model.max_tokens) for g, n in blocks.items()}
            pages = {name: torch.zeros(room, dtype=torch.int32, device=device) for name, room in rooms.items()}
            logits = _logits(self._model, largest)
        except torch.OutOfMemoryError as problem:
            self._fall_back(_failed(problem))
            return
        failure = ""
        for rows in reversed(self.sizes):
            try:
                bucket = Bucket(self._model, self._cache, rows, pages, logits)
                self._buckets[rows] = bucket, self._capture(bucket.forward)
                bucket.let_go()
            except Exception as problem:  # modeling code that waits for the device, memory, kernels that are not there
                before, failure = failure, _failed(problem)
                self._fall_back(failure)
                if failure == before and not self._buckets:
                    return

    @torch.no_grad()
    def forward(self, step: Step) -> Tensor | None:
        """Logits float32 [len(step.sample_rows), vocab], valid until the next call; None: run this step eagerly."""
        if not self._buckets or not is_decode(step) or self._begins(step):
            self._run_eagerly()
            return None
        size = bucket_for(len(step.rows), sorted(self._buckets))
        if size is None:
            self._run_eagerly(f"steps of more than {max(self._buckets)} entries are not captured")
            return None
        bucket, (replay, logits) = self._buckets[size]
        if not bucket.has_room(step):
            self._run_eagerly("a step has more pages than its graph has room for")
            return None
        bucket.fill(step)
        replay()
        self.replayed += 1
        self._model.unsound = sorted({k for group in self._of_states for k in unsound(step, self._cache, group)})
        rows = np.asarray(step.sample_rows)
        if len(rows) == len(step.rows):
            return logits[: len(rows)]
        return logits[torch.as_tensor(rows.astype(np.int64)).to(logits.device, non_blocking=True)]

    def _begins(self, step: Step) -> bool:
        """Whether an entry goes on from no state: a graph reads one for each of its rows."""
        return any(not step.group(group.name).states().source.all() for group in self._of_states)

    def stats(self) -> dict[str, Any]:
        """Captured sizes, replayed steps, eager steps, and the reasons of avoidable eager steps."""
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


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which a device's graphs are captured.

    Memory of a pool serves only the stream that it was taken for, and each stream has cuBLAS workspaces of its own.
    """
    return torch.cuda.Stream(device)


class CudaCapture:
    """Makes CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, forward: Callable[[], Tensor]) -> Captured:
        """Runs ``forward`` twice: once to compile, plan and allocate, once to be captured.

        Raises the errors of ``forward``, with the current stream as it was.
        """
        with self._aside() as stream:
            self._warm_up(forward, stream)
            return self._record(forward, stream)

    def rehearse(self, forward: Callable[[], Tensor]) -> int:
        """Runs ``forward`` as before a capture; returns the device memory that torch took for it at its peak."""
        with self._aside() as stream:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._warm_up(forward, stream)
            taken = torch.cuda.max_memory_reserved(self._device) - before
            torch.cuda.empty_cache()
        return taken

    def _warm_up(self, forward: Callable[[], Tensor], stream: torch.cuda.Stream) -> None:
        """Runs ``forward`` to its end on the device, even if it raises: the caller gives up its buffers."""
        try:
            with torch.cuda.stream(stream):
                forward()
        finally:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _aside(self) -> Iterator[torch.cuda.Stream]:
        """The stream to capture on, behind and before the current stream's work."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device):
            stream = capture_stream(self._device)
            stream.wait_stream(current)
            try:
                yield stream
                current.wait_stream(stream)
            finally:
                torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own if a capture cannot be ended

    def _record(self, forward: Callable[[], Tensor], stream: torch.cuda.Stream) -> Captured:
        graph, cause, collects = torch.cuda.CUDAGraph(), None, gc.isenabled()
        gc.disable()  # pinned memory that it frees within a capture is an error, which stays with torch's allocator
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    logits = forward()
                except Exception as problem:
                    cause = problem
                    raise
        except Exception:
            # Without an end, torch's allocator keeps the pool for this capture, and asks the graph which one that was.
            self._pool = None
            self._failed.append(graph)
            if cause is not None:
                raise cause  # noqa: B904 - the end that fails is its consequence
            raise
        finally:
            cause = None  # it refers to this frame, and so to all that the forward holds
            if collects:
                gc.enable()
        self._pool = graph.pool()
        return graph.replay, logits
