"""Sends a plan on time.

Promises   a session's first turn is sent when the clock says so, whoever else still waits for an answer. Only
           ``max_concurrency`` holds it back, and that wait is recorded. A later turn is due its think time after the
           former answer.
           A stop leaves a record of each request that was sent; those that were not are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from runner.bench.client import Answer, Client
from runner.bench.forms import Dialogue, DialogueMaker
from runner.bench.plan import Plan, Session
from runner.bench.record import Outcome, Record

LEAD_S = 0.2
"""Time before the first request: its body is made meanwhile."""
PREPARED = 64
"""Sessions whose first body lies ready."""
AT_A_TIME_S = 0.002
"""Bodies are made for so long before streams are read again."""
DEAD_AFTER_S = 5.0
"""No connection for so long, and three tries: the server is dead."""
DEAD_TRIES = 3
_TICK_S = 0.05


class Ending(Enum):
    """Why a run ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    SERVER_DEAD = "the server no longer takes connections"


@dataclass
class Run:
    """The record of a run."""

    records: list[Record] = field(default_factory=list)
    ending: Ending = Ending.COMPLETE
    duration_s: float = 0.0
    """Seconds from when the first request was due until the last answer's end, or the stop."""
    cpu_s: float = 0.0
    """CPU time of this process during the run."""
    loop_late_s: list[float] = field(default_factory=list)
    """How late a task was that wakes 20 times a second: times of tokens may be wrong by that."""
    peak: int = 0
    """Most requests under way at once."""
    concurrency: list[tuple[float, int]] = field(default_factory=list)
    """(When, requests under way), 20 times a second."""


class Driver:
    """Drives one plan through one client. ``now`` of the client becomes seconds since the first request was due."""

    def __init__(
        self,
        plan: Plan,
        client: Client,
        dialogues: DialogueMaker,
        max_concurrency: int | None = None,
        on_news: Callable[[int, int, int], None] = lambda sent, done, failed: None,
    ) -> None:
        self.recorded = Run()
        self._plan, self._client, self._dialogues, self._on_news = plan, client, dialogues, on_news
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        self._start_s = 0.0
        self._under_way = 0
        self._done = self._failed = 0
        self._refused_s: float | None = None
        self._refusals = 0
        self._stopping = asyncio.Event()

    def stop(self, why: Ending) -> None:
        """Ends the run; what is under way is cut off. The first reason counts."""
        if not self._stopping.is_set():
            self.recorded.ending = why
            self._stopping.set()

    async def run(self) -> Run:
        """Sends all. Raises ``ConfigError`` if an answer shows that the plan cannot be sent like this."""
        gc.freeze()  # the plan is large, and a search through it would hold up the clock
        self._start_s = time.perf_counter() + LEAD_S
        self._client.now = self._now
        cpu_s = time.process_time()
        work = asyncio.ensure_future(self._send_all())
        ticks = asyncio.ensure_future(self._tick())
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, ticks, stop):
                task.cancel()
            results = await asyncio.gather(work, ticks, stop, return_exceptions=True)
            gc.unfreeze()
        self.recorded.cpu_s = time.process_time() - cpu_s
        self.recorded.duration_s = self._end_s()
        self._on_news(len(self.recorded.records), self._done, self._failed)
        _raise_first(results[0])
        return self.recorded

    def _now(self) -> float:
        return time.perf_counter() - self._start_s

    def _end_s(self) -> float:
        if self.recorded.ending is Ending.COMPLETE:
            return max((record.end_s for record in self.recorded.records), default=0.0)
        return max(0.0, self._now())

    async def _send_all(self) -> None:
        ready: asyncio.Queue[tuple[int, Session, Dialogue, tuple[bytes, int]]] = asyncio.Queue(PREPARED)

        async def prepare() -> None:
            since_s = time.perf_counter()
            for number, session in enumerate(self._plan.sessions):
                dialogue = self._dialogues(number, session)
                await ready.put((number, session, dialogue, dialogue.body(0)))
                if time.perf_counter() - since_s > AT_A_TIME_S:
                    await asyncio.sleep(0)
                    since_s = time.perf_counter()

        async with asyncio.TaskGroup() as group:
            group.create_task(prepare())
            for _ in self._plan.sessions:
                number, session, dialogue, first = await ready.get()
                await self._until(session.start_s)
                group.create_task(self._converse(number, session, dialogue, first))

    async def _until(self, due_s: float) -> None:
        if (wait_s := due_s - self._now()) > 0:
            await asyncio.sleep(wait_s)

    async def _converse(self, number: int, session: Session, dialogue: Dialogue, first: tuple[bytes, int]) -> None:
        due_s, prepared = session.start_s, first
        for index, turn in enumerate(session.turns):
            if index:
                prepared = dialogue.body(index)
                await self._until(due_s)
            body, tokens = prepared
            record = Record(number, index, tokens, turn.output_tokens, due_s, is_open=index == 0)
            record.ready_s = self._now()
            async with self._slots:
                record.free_s = self._now()
                answer = await self._send(body, record)
            if index + 1 == len(session.turns):
                return
            following = session.turns[index + 1]
            if following.continues:
                if not record.is_ok:
                    return
                dialogue.answered(index, answer)
            due_s = record.end_s + following.think_s

    async def _send(self, body: bytes, record: Record) -> Answer:
        self.recorded.records.append(record)
        self._under_way += 1
        self.recorded.peak = max(self.recorded.peak, self._under_way)
        try:
            answer = await self._client.send(body, record)
        finally:
            self._under_way -= 1
        self._done += record.is_ok
        self._failed += not record.is_ok
        self._look_for_death(record)
        return answer

    def _look_for_death(self, record: Record) -> None:
        if record.outcome is not Outcome.CONNECT:
            self._refused_s, self._refusals = None, 0
            return
        self._refused_s = record.end_s if self._refused_s is None else self._refused_s
        self._refusals += 1
        if self._refusals >= DEAD_TRIES and record.end_s - self._refused_s >= DEAD_AFTER_S:
            self.stop(Ending.SERVER_DEAD)

    async def _tick(self) -> None:
        due_s = time.perf_counter()
        while True:
            due_s += _TICK_S
            await asyncio.sleep(due_s - time.perf_counter())
            late_s = time.perf_counter() - due_s
            self.recorded.loop_late_s.append(late_s)
            self.recorded.concurrency.append((self._now(), self._under_way))
            self._on_news(len(self.recorded.records), self._done, self._failed)
            due_s += max(0.0, late_s)


def _raise_first(problem: BaseException | None) -> None:
    """Raises what went wrong, out of the group that it came in; a cancellation was our own stop."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    if isinstance(problem, Exception):
        raise problem
