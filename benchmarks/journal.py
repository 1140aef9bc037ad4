"""``python -m benchmarks.journal [--json PATH]``: the cost of the journal that ``explain`` is told from.

Two caches take turns, one with a journal and one without: a step of 64 requests that decode, and a request from its
arrival to its end, over pools so full that each one pushes cached content out. Then ``explain`` itself, from a full
journal. CPU microseconds of one thread, the median of many short turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.micro.shapes import SHAPES, age, prompt
from benchmarks.output import stdout
from kvtier import KVCache, Request, Scheduler, explain

EVENTS = 2**15
TURNS, STEPS, REQUESTS = 300, 60, 20
RUNNING = 64


def cache(shape: str, events: int, blocks: int) -> KVCache:
    """Books alone, full of cached content."""
    spec = SHAPES[shape]
    found = KVCache(
        spec,
        device="meta",
        device_blocks=dict.fromkeys(spec.names, blocks),
        host_blocks=dict.fromkeys(spec.names, blocks),
        key_secret=b"benchmark",
        journal_events=events,
    )
    age(found.core.coordinator.pools)
    return found


def step(scheduler: Scheduler) -> None:
    """One step, sampled as zeros."""
    made = scheduler.schedule()
    scheduler.commit(made, np.zeros(len(made.sample_rows), np.int64))


def decodes(shape: str, events: int) -> Callable[[], float]:
    """Seconds of a step of ``RUNNING`` decodes."""
    scheduler = Scheduler(cache(shape, events, 1 << 15), max_running=RUNNING)
    for r in range(RUNNING):
        scheduler.add(Request(f"{r}", prompt(r, 1000 + r), 10**6))
    for _ in range(100):
        step(scheduler)

    def turn() -> float:
        begun = time.thread_time()
        for _ in range(STEPS):
            step(scheduler)
        return (time.thread_time() - begun) / STEPS

    return turn


def requests(shape: str, events: int) -> Callable[[], float]:
    """Seconds of a request of 1,000 tokens, from its arrival to its end."""
    scheduler, seeds = Scheduler(cache(shape, events, 1 << 12)), iter(range(10**9))

    def turn() -> float:
        made = [Request(f"{seed}", prompt(seed, 1000), 2) for seed in (next(seeds) for _ in range(REQUESTS))]
        begun = time.thread_time()
        for request in made:
            scheduler.add(request)
            while scheduler.has_work():
                step(scheduler)
        return (time.thread_time() - begun) / REQUESTS

    return turn


def in_turns(make: Callable[[str, int], Callable[[], float]], shape: str) -> dict[str, float]:
    """Microseconds without and with a journal, and the median of their differences, turn by turn."""
    off, on = make(shape, 0), make(shape, EVENTS)
    pairs = [(off(), on()) if k % 2 else (on(), off())[::-1] for k in range(TURNS)]
    kept = pairs[TURNS // 10 :]
    without, with_ = (1e6 * statistics.median(side) for side in zip(*kept, strict=True))
    return {"off": without, "on": with_, "more": 1e6 * statistics.median(on - off for off, on in kept)}


def explaining() -> float:
    """Milliseconds to explain a request from a journal that is full."""
    books = cache("G", EVENTS, 1 << 12)
    scheduler = Scheduler(books)
    k = 0
    while books.journal.count < EVENTS + 100:
        scheduler.add(Request(f"{k}", prompt(k, 200), 1))
        while scheduler.has_work():
            step(scheduler)
        k += 1
    took = []
    for n in range(30):
        begun = time.thread_time()
        assert explain(books.journal.since(), f"{k - 1 - n}") is not None
        took.append(time.thread_time() - begun)
    return 1e3 * statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with Console(stderr=True).status("measuring: a minute"):
        for name, make in ((f"a step of {RUNNING} decodes", decodes), ("a request of 1,000 tokens", requests)):
            for shape in ("L", "G"):
                figures[f"{name}, {shape}"] = in_turns(make, shape)
        figures["explain, ms"] = explaining()
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "us": figures}, indent=1) + "\n", encoding="utf-8")
    shown = Table("CPU us", "without a journal", "with one", "difference, in pairs")
    for name, row in figures.items():
        if isinstance(row, dict):
            shown.add_row(name, *(f"{row[part]:.2f}" for part in ("off", "on", "more")))
    stdout().print(shown, f"explaining a request from {EVENTS:,} events: {figures['explain, ms']:.2f} ms")


if __name__ == "__main__":
    main()
