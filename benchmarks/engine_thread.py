"""``python -m benchmarks.engine_thread [--json PATH] [--vllm PYTHON]``: the engine's thread beside the forward.

The real thread, engine and scheduler over a model that knows its logits already, and books that are full of cached
content. All requests decode greedily. CPU microseconds a step: of the engine's thread by itself, while the event loop
is held up; of the same thread while the loop's coroutines read each step's tokens, which leaves it cold caches; of that
loop. The cases take turns; the median of the turns counts.

``--vllm``: a Python that has vLLM. Its scheduler's ``schedule`` and ``update_from_output`` and its ``OutputProcessor``
have the same work (``benchmarks/vllm/engine_thread.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import math
import os
import pstats
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.micro.shapes import SHAPES, age, prompt
from benchmarks.output import stdout
from kvtier import KVCache, Request, Scheduler
from kvtier.cache.kv_events.publisher import KVEventPublisher
from runner.engine.answers import Answer, Answers
from runner.engine.loop import Engine
from runner.engine.shares import Shares
from runner.engine.streams import Courier, LoopMail
from runner.engine.thread import EngineThread
from runner.engine.words import Words
from runner.metrics.metrics import Metrics
from runner.metrics.timing import Timing
from runner.sampling.params import SamplingParams
from runner.sampling.state import SamplingState

RUNNING = (16, 256, 1024)
TURNS, STEPS = 20, 12
WARM_UP = 40
VOCABULARY = 8
PROMPT_TOKENS = 600
EVENTS = 1 << 15
STEPS_A_LOOK = 5
"""Steps from one look for KV events to the next, which comes each 50 ms: as if a step took 10 ms."""
ANSWER_TOKENS = 256
"""Of each answer, where requests come and go: at 1,024 running four a step."""


class Gate:
    """A model whose forward lasts until it is let go; it clocks what its thread does between two forwards."""

    device, dtype, vocab_size, unsound = torch.device("cpu"), torch.float32, VOCABULARY, ()

    def __init__(self, running: int) -> None:
        self._logits = torch.zeros(running, VOCABULARY)
        self._begun, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self._left_s: float | None = None
        self._clocked_s: list[float] = []
        self._closed = False
        self._forwards = 0
        self.kv_events: KVEventPublisher | None = None
        self.profile: cProfile.Profile | None = None

    def forward(self, step: Any, cache: KVCache) -> torch.Tensor:
        """Zeros float32 [n, vocab] for the n rows to sample, and every group's tables."""
        for name in cache.spec.names:
            step.group(name).block_table, step.group(name).slot_mapping
        self._forwards += 1
        if self.kv_events is not None and self._forwards % STEPS_A_LOOK == 0:
            self.kv_events.poll()
        if self._left_s is not None:
            self._clocked_s.append(time.thread_time() - self._left_s)
        if self.profile is not None:
            self.profile.disable()
        if not self._closed:
            self._begun.release()
            self._go.acquire()
        if self.profile is not None:
            self.profile.enable()
        self._left_s = time.thread_time()
        return self._logits[: len(step.sample_rows)]

    def wait(self) -> None:
        """Until the next forward has begun."""
        self._begun.acquire()

    def go(self, steps: int = 1) -> None:
        """Lets the forward that has begun end, and further ones."""
        self._go.release(steps)

    def open(self) -> None:
        """No forward waits any more."""
        self._closed = True
        self._go.release()

    def take(self) -> list[float]:
        """Seconds of CPU between two forwards, since the last call."""
        taken, self._clocked_s = self._clocked_s, []
        return taken


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def rest(self) -> None:
        """Until everything that has come is read."""

        async def passes() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self.run(passes())

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Nothing runs in the loop meanwhile."""
        begun, over = threading.Event(), threading.Event()

        def wait() -> None:
            begun.set()
            over.wait()

        self.loop.call_soon_threadsafe(wait)
        begun.wait()
        yield
        over.set()
        self.rest()

    @property
    def cpu_s(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))


def books(shape: str, events: int) -> KVCache:
    """Books alone, full of cached content."""
    spec = SHAPES[shape]
    found = KVCache(
        spec,
        device="meta",
        device_blocks=dict.fromkeys(spec.names, 1 << 17),
        host_blocks=dict.fromkeys(spec.names, 1 << 14),
        key_secret=b"benchmark",
        journal_events=events,
    )
    age(found.core.coordinator.pools)
    return found


Turn = Callable[[], dict[str, float]]
"""Runs some steps; CPU seconds a step, by part."""


class Serving:
    """``running`` requests that decode. ``is_whole``: with journal, KV events and metrics. ``comes_and_goes``: an
    answer has ``ANSWER_TOKENS`` tokens, and the next request comes at its end."""

    def __init__(self, shape: str, running: int, *, is_whole: bool = False, comes_and_goes: bool = False) -> None:
        self.cache = books(shape, EVENTS if is_whole else 0)
        self.scheduler = Scheduler(self.cache, max_batched_tokens=8192 + running, max_running=running)
        self.model = Gate(running)
        kv_events = None
        if is_whole:
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:*"}
            kv_events = KVEventPublisher(self.cache, config, interval_s=math.inf)
        self.model.kv_events = kv_events
        self.engine = Engine(self.model, self.cache, self.scheduler, None, kv_events, Shares())  # type: ignore[arg-type]
        self.running, self.comes_and_goes = running, comes_and_goes
        owner = SimpleNamespace(cache=self.cache, is_running=True)
        self.metrics = Metrics(owner, "benchmark") if is_whole else None

    def request(self, number: int) -> tuple[Request, SamplingState]:
        most = ANSWER_TOKENS if self.comes_and_goes else 10**6
        first = number % ANSWER_TOKENS + 1 if self.comes_and_goes and number < self.running else most
        params = SamplingParams(max_tokens=first, temperature=0, ignore_eos=True, detokenize=False)
        tokens = prompt(number, PROMPT_TOKENS + number % 16)
        request = Request(f"{number}", tokens, params.max_tokens)
        return request, SamplingState.of(params, request.tokens, request.eos_token_ids)

    @contextmanager
    def engine_alone(self) -> Iterator[Turn]:
        """The engine without streams."""
        for number in range(self.running):
            self.engine.add(*self.request(number))
        closing = threading.Event()

        def work() -> None:
            while not closing.is_set():
                self.engine.step()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield self._turn(None)
        finally:
            closing.set()
            self.model.open()
            thread.join()

    @contextmanager
    def streams(self, loop: Loop) -> Iterator[Turn]:
        """The engine's thread, and a coroutine for each request that reads its answer."""
        thread, words, numbers = EngineThread(self.engine, False), Words(None), iter(range(10**9))
        couriers: list[Courier] = []

        async def read(number: int) -> None:
            request, state = self.request(number)
            mail = LoopMail(couriers[0])
            answer = Answer(0, request, state, mail, words, None)
            answers = Answers(request.request_id, None, request.tokens, [answer], time.perf_counter())
            timing = None if self.metrics is None else Timing(self.metrics, answers, state.params)
            thread.submit([(request, state, answer.stream)])
            while not answers.is_done:
                await mail.news()
                fresh = answers.advance(thread)
                if timing is not None:
                    timing.on_tokens(fresh)
                answers.output(fresh, delta=True)
            if timing is not None:
                timing.on_end()
            if self.comes_and_goes and thread.is_alive:
                start()

        def start() -> None:
            task = asyncio.ensure_future(read(next(numbers)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def begin() -> None:
            couriers.append(Courier(asyncio.get_running_loop()))
            for _ in range(self.running):
                start()

        tasks: set[Any] = set()
        loop.run(begin())
        try:
            yield self._turn(loop)
        finally:
            self.model.open()
            thread.close()
            loop.rest()

    def _turn(self, loop: Loop | None) -> Turn:
        model = self.model
        model.wait()

        def steps(count: int) -> None:
            for _ in range(count):
                model.go()
                model.wait()
                if loop is not None:
                    loop.rest()

        while self.scheduler.num_running < self.running or self.scheduler.num_waiting:
            steps(1)
        steps(WARM_UP)

        def turn() -> dict[str, float]:
            model.take()
            with nullcontext() if loop is None else loop.held_up():
                model.go(STEPS)
                for _ in range(STEPS):
                    model.wait()
            alone_s = statistics.fmean(model.take())
            if loop is None:
                return {"thread": alone_s}
            before_s = loop.cpu_s
            steps(STEPS)
            beside_s = statistics.fmean(model.take())
            return {"thread": alone_s, "beside": beside_s, "loop": (loop.cpu_s - before_s) / STEPS}

        return turn


@contextmanager
def books_alone(shape: str, running: int) -> Iterator[Turn]:
    """``schedule``, tables, ``commit``."""
    serving = Serving(shape, running)
    scheduler = serving.scheduler
    for number in range(running):
        scheduler.add(serving.request(number)[0])

    def step() -> None:
        made = scheduler.schedule()
        for name in serving.cache.spec.names:
            made.group(name).block_table, made.group(name).slot_mapping
        scheduler.commit(made, np.zeros(len(made.sample_rows), np.int64))

    while scheduler.num_running < running or scheduler.num_waiting:
        step()
    for _ in range(WARM_UP):
        step()

    def turn() -> dict[str, float]:
        begun_s = time.thread_time()
        for _ in range(STEPS):
            step()
        return {"thread": (time.thread_time() - begun_s) / STEPS}

    yield turn


def cases(shape: str, running: int, loop: Loop) -> dict[str, Any]:
    """What is measured, by name."""
    return {
        "schedule, commit": books_alone(shape, running),
        "engine": Serving(shape, running).engine_alone(),
        "engine, streams": Serving(shape, running).streams(loop),
        "engine, streams, journal, KV events, metrics": Serving(shape, running, is_whole=True).streams(loop),
        "all, requests come and go": Serving(shape, running, is_whole=True, comes_and_goes=True).streams(loop),
    }


def measure(shape: str, running: int, turn_count: int, only: str = "") -> dict[str, dict[str, float]]:
    """Microseconds a step, by case."""
    loop = Loop()
    turns: dict[str, Turn] = {}
    made = {name: case for name, case in cases(shape, running, loop).items() if only in name}
    try:
        for name, case in made.items():
            turns[name] = case.__enter__()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
        for _ in range(turn_count):
            for name, turn in turns.items():
                found[name].append(turn())
    finally:
        for name in turns:
            made[name].__exit__(None, None, None)
    return {
        name: {part: 1e6 * statistics.median(row[part] for row in rows) for part in rows[0]}
        | {"least": 1e6 * min(row["thread"] for row in rows)}
        for name, rows in found.items()
    }


def profile(shape: str, running: int) -> None:
    """Where the time of a step of all features goes."""
    loop, serving = Loop(), Serving(shape, running, is_whole=True)
    with serving.streams(loop) as turn:
        serving.model.profile = cProfile.Profile(time.thread_time)
        for _ in range(TURNS):
            turn()
        made, serving.model.profile = serving.model.profile, None
    pstats.Stats(made).sort_stats("tottime").print_stats(30)


def of_vllm(python: str, running: int) -> dict[str, float]:
    """vLLM's microseconds a step, by part."""
    run = subprocess.run(
        [python, "-m", "benchmarks.vllm.engine_thread", str(running)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--shape", default="L", choices=SHAPES)
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--profile", action="store_true", help="by function instead, all features on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.profile:
        for running in args.running:
            profile(args.shape, running)
        return
    figures: dict[str, Any] = {}
    shown = Table("CPU us a step", "running", "engine's thread", "least", "beside consumers", "event loop")
    with Console(stderr=True).status("measuring"):
        for running in args.running:
            rows = figures[f"{running}"] = measure(args.shape, running, args.turns, args.only)
            if args.vllm:
                rows |= {f"vLLM: {name}": {"thread": us} for name, us in of_vllm(args.vllm, running).items()}
            for name, row in rows.items():
                cells = [f"{row[part]:,.0f}" if part in row else "" for part in ("thread", "least", "beside", "loop")]
                shown.add_row(name, f"{running:,}", *cells)
    if args.json:
        made = {"machine": describe(), "shape": args.shape, "us": figures}
        args.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    stdout().print(shown)


if __name__ == "__main__":
    main()
