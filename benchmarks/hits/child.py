"""Rows are served in processes of their own: what is asked of one and what it answers, a line of JSON each."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hits.shapes import SHAPES, Shape
from benchmarks.hits.sources import asks_of
from benchmarks.hits.workloads import Ask


class Sizes(NamedTuple):
    """Of the memories."""

    device_bytes: int
    host_bytes: int = 0


@dataclass
class Found:
    """Prompt tokens, and those of them that were found at a request's first admission, by tier. What ``failed`` has
    found nothing. ``computed_tokens``: that steps had, of prompts and of answers, again after a preemption too.
    ``settings``: of the engine."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    tiers: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})
    failed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Of all tiers."""
        return sum(self.tiers.values()) / self.prompt_tokens


Serve = Callable[[Sequence[Ask], Shape, int, Sizes, int, int], Found]
"""Asks, shape, tokens of a block, memories, requests that run at a time, and those that wait meanwhile."""


class Task(NamedTuple):
    """One row of one engine. ``requests``: of the workload, from its beginning; ``traces``: their folder."""

    workload: str
    shape: str
    device_bytes: int
    host_bytes: int
    at_once: int
    queued: int
    requests: int | None
    traces: str | None


def digest_of(asked: Sequence[Ask]) -> str:
    """Of sessions, prompts and answers, in their order."""
    whole = hashlib.sha256()
    for ask in asked:
        whole.update(np.array([ask.session, len(ask.prompt), len(ask.answer)], np.int64).tobytes())
        whole.update(ask.prompt.astype(np.int32).tobytes() + ask.answer.astype(np.int32).tobytes())
    return whole.hexdigest()[:16]


@lru_cache(maxsize=1)
def _asked(workload: str, requests: int | None, traces: str | None) -> tuple[list[Ask], int, str]:
    asked, block_tokens = asks_of(workload, requests, traces)
    return asked, block_tokens, digest_of(asked)


def answer_all(serve: Serve, versions: dict[str, Any]) -> None:
    """In the child: until there are no more lines. ``versions`` are told first."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what others print goes elsewhere
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        task = Task(*json.loads(line))
        asked, block_tokens, digest = _asked(task.workload, task.requests, task.traces)
        begun_s = time.process_time()
        found = serve(
            asked,
            SHAPES[task.shape],
            block_tokens,
            Sizes(task.device_bytes, task.host_bytes),
            task.at_once,
            task.queued,
        )
        row = {**asdict(found), "rate": found.rate, "cpu_s": time.process_time() - begun_s, "digest": digest}
        print(json.dumps(row), file=answers, flush=True)


class Child:
    """A process that serves with one engine; ``module`` calls ``answer_all``."""

    def __init__(self, python: str, module: str) -> None:
        root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self.versions = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that serves has ended with status {self._process.wait()}")
        read: dict[str, Any] = json.loads(line)
        return read

    def serve(self, task: Task) -> dict[str, Any]:
        """``Found`` as a dict, with ``rate``, ``cpu_s`` and ``digest``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
