"""``python -m benchmarks.remote.steps [--json PATH]``: what a remote costs the scheduling thread.

A step of 64 decodes with and without a remote, in turns. Then a prompt of 90,112 tokens, from its arrival until nothing
is under way: without a remote, with one that has nothing of it (it is spilled), and with one that has all (it is
fetched). CPU time of the scheduling thread alone; the remote's own threads are not counted.
"""

from __future__ import annotations

import argparse
import itertools
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
from benchmarks.micro.shapes import prompt
from benchmarks.output import stdout
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow
from kvtier.coordinator import seek

LONG = 90_112
RUNNING, STEPS, TURNS = 64, 50, 120
_names = itertools.count()


def cache(store: str | None, blocks: int = 8192) -> KVCache:
    """A full and a window group of the bundled model's block size, 8 KiB."""
    groups = [
        GroupSpec("full", FullAttention(), 1, 1, 64, dtype="float32"),
        GroupSpec("window", SlidingWindow(1024), 1, 1, 64, dtype="float32"),
    ]
    sizes = {"full": blocks, "window": 2048}
    how: dict[str, Any] = {} if store is None else {"remote_uri": store, "model_id": "m", "key_secret": b"s"}
    return KVCache(CacheSpec(groups), device_blocks=sizes, host_blocks=sizes, **({"key_secret": b"s"} | how))


def step(scheduler: Scheduler) -> int:
    made = scheduler.schedule()
    scheduler.commit(made, np.zeros(len(made.sample_rows), np.int64))
    return made.num_tokens


def decodes(store: str | None) -> Callable[[], float]:
    """Seconds of a step."""
    made = cache(store)
    scheduler = Scheduler(made, max_running=RUNNING)
    for r in range(RUNNING):
        scheduler.add(Request(f"{r}", prompt(r, 500 + r), 10**6))
    for _ in range(100):
        step(scheduler)
        time.sleep(0.001)

    def turn() -> float:
        assert not made.is_closed
        begun = time.thread_time()
        for _ in range(STEPS):
            step(scheduler)
        return (time.thread_time() - begun) / STEPS

    return turn


def serve(made: KVCache, seed: int) -> tuple[float, dict[str, int]]:
    """CPU milliseconds of the scheduling thread, and where the prompt's tokens came from."""
    scheduler, found = Scheduler(made, max_batched_tokens=8192), {}
    request = Request(f"{seed}", prompt(seed, LONG), 1)
    begun = time.thread_time()
    scheduler.add(request)
    while scheduler.has_work():
        made_step = scheduler.schedule()
        for done in scheduler.commit(made_step, np.zeros(len(made_step.sample_rows), np.int64)):
            found = dict(done.cached_tokens)
        if not made_step.num_tokens:
            scheduler.wait(1.0)
    return 1e3 * (time.thread_time() - begun), found


def long_prompts() -> dict[str, Any]:
    seek.LEAST_S = 5.0  # other work on the machine may keep the remote's threads waiting
    rows: dict[str, list[float]] = {"without a remote": [], "spilled": [], "fetched": []}
    for k in range(5):
        uri = f"memory://steps-{next(_names)}"
        with cache(None) as alone:
            rows["without a remote"].append(serve(alone, k)[0])
        with cache(uri) as one:
            rows["spilled"].append(serve(one, k)[0])
        with cache(uri) as other:
            took, found = serve(other, k)
            assert found["store"] > 0.99 * LONG, (found, other.stats().remote)
            rows["fetched"].append(took)
    return {name: statistics.median(took) for name, took in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    with Console(stderr=True).status("measuring: a minute"):
        off, on = decodes(None), decodes(f"memory://steps-{next(_names)}")
        pairs = [(off(), on()) if k % 2 else (on(), off())[::-1] for k in range(TURNS)][TURNS // 10 :]
        figures = {
            "a decode step, us": {
                "without": 1e6 * statistics.median(a for a, _ in pairs),
                "with": 1e6 * statistics.median(b for _, b in pairs),
                "more": 1e6 * statistics.median(b - a for a, b in pairs),
            },
            f"a prompt of {LONG:,} tokens, ms": long_prompts(),
        }
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), **figures}, indent=1) + "\n", encoding="utf-8")
    shown = Table("CPU time of the scheduling thread", "", "")
    for name, row in figures.items():
        for part, value in row.items():
            shown.add_row(name, part, f"{value:.2f}")
    stdout().print(shown)


if __name__ == "__main__":
    main()
