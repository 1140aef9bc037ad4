"""Rows of the benchmark: a workload, a shape, a memory and a number of requests at a time, served by each engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from typing import Any, NamedTuple

from benchmarks.hits.child import Child, Task, digest_of
from benchmarks.hits.shapes import SHAPES
from benchmarks.hits.sources import asks_of
from runner.bench.replay.bound import Whole, measure

KVTIER, VLLM = "kvtier", "vllm"
MODULES = {KVTIER: "benchmarks.hits.serve", VLLM: "benchmarks.hits.vllm"}
MARGIN = 0.005
"""A row whose rate is lower than vLLM's by more than this is below."""
Row = dict[str, Any]


def below(row: Row) -> bool:
    """Whether vLLM finds more than kvtier, and by more than the margin."""
    return VLLM in row and bool(row[KVTIER]["rate"] < row[VLLM]["rate"] - MARGIN)


class Memory(NamedTuple):
    """Shares of the working set."""

    device: float
    host: float = 0.0

    def __str__(self) -> str:
        return f"{self.device:g}+{self.host:g}" if self.host else f"{self.device:g}"

    @classmethod
    def parse(cls, text: str) -> Memory:
        """From ``DEVICE`` or ``DEVICE+HOST``."""
        return cls(*map(float, text.split("+")))


class Cell(NamedTuple):
    """What a row is of. ``requests``: of the workload, from its beginning; None: all. ``queued``: requests that wait in
    the engine beside the ``at_once`` that run.
    """

    workload: str
    shape: str
    memory: Memory
    at_once: int
    requests: int | None = None
    queued: int = 0


Known = Callable[[Cell, str], Row | None]
"""vLLM's side of the row of a cell and of texts with a digest, if it has been measured before."""


class Engines:
    """Processes that serve, one of each engine for each thread that asks. ``pythons``: by engine."""

    def __init__(self, pythons: dict[str, str], traces: str | None) -> None:
        self._pythons, self._traces = pythons, traces
        self._of = threading.local()
        self._all: list[Child] = []
        self._lock = threading.Lock()
        self._measured = lru_cache(maxsize=None)(self._measure)
        self.versions: dict[str, dict[str, Any]] = {}

    def _measure(self, workload: str, requests: int | None) -> tuple[Whole, str]:
        asked, block_tokens = asks_of(workload, requests, self._traces)
        return measure(asked, block_tokens), digest_of(asked)

    def _child(self, engine: str) -> Child:
        if not hasattr(self._of, engine):
            child = Child(self._pythons[engine], MODULES[engine])
            setattr(self._of, engine, child)
            self._all.append(child)
            self.versions[engine] = child.versions
        made: Child = getattr(self._of, engine)
        return made

    def serve(self, cell: Cell, known: Known) -> Row:
        """The row; with vLLM's side if it is known or there is a Python for it."""
        with self._lock:
            whole, digest = self._measured(cell.workload, cell.requests)
        size = SHAPES[cell.shape].working_set_bytes(whole.distinct_tokens, whole.sessions)
        task = Task(
            cell.workload,
            cell.shape,
            int(cell.memory.device * size),
            int(cell.memory.host * size),
            cell.at_once,
            cell.queued,
            cell.requests,
            self._traces,
        )
        row: Row = {**cell._asdict(), "memory": str(cell.memory), "digest": digest, "bound": whole.rate}
        row |= {"device_bytes": task.device_bytes, "host_bytes": task.host_bytes}
        row[KVTIER] = self._ask(KVTIER, task, digest)
        theirs = known(cell, digest)
        if theirs is None and VLLM in self._pythons:
            theirs = self._ask(VLLM, task, digest)
        return row if theirs is None else row | {VLLM: theirs}

    def _ask(self, engine: str, task: Task, digest: str) -> Row:
        side = self._child(engine).serve(task)
        if side.pop("digest") != digest:
            raise RuntimeError(f"{engine} was asked for other texts: NumPy's generators differ")
        return side

    def serve_all(self, cells: Sequence[Cell], known: Known, jobs: int) -> Iterator[Row]:
        """Rows as they come, ``jobs`` at a time."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for done in as_completed([pool.submit(self.serve, cell, known) for cell in cells]):
                    yield done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in self._all:
                    child.close()
