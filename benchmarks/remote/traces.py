"""``python -m benchmarks.remote.traces TRACE [TRACE ...] [--json PATH]``: hits of published traces, by tier.

A trace is a file of Mooncake's or of kv-cache-tester's format (``runner.bench.traces``). Its prompts are served in its
order by real schedulers, caches and stores, whose blocks have the shape of Gemma-3-27B's, but 1/2048 of the bytes: one
KV head of one number instead of 16 of 128. Tiers have 1/2048 of --device-gib and --host-gib, and blocks become
objects as they would at full size. The remote is this process's memory, without a limit.

Left out: time. Requests run one after the other, each remote lands before the next request, and looks have as long as
they need. A prompt's answer is one token, since traces do not tell which tokens of the next prompt it was.

With one engine: device and host; and a remote tier. With two, which take requests in turn, whatever they have
cached: device and host alone; a remote each; one remote for both.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from obstore.store import MemoryStore
from rich.progress import Progress
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.output import stdout
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow
from kvtier.coordinator import seek
from kvtier.geometry.sizing import parse_bytes
from kvtier.remote import objects
from kvtier.remote.backends.object_store import ObjectBackend
from runner.bench.plan import Plan
from runner.bench.tokens import Alphabet, Prompt
from runner.bench.traces import TraceOptions, read

SCALE = 2048
BLOCK_TOKENS = 64
"""As the agents' trace has them: shorter blocks would find the same."""
SOURCES = ("device", "host", "remote")
WAYS: dict[str, Sequence[str | None]] = {
    "one engine, device + host": [None],
    "one engine, device + host + store": ["a"],
    "two engines, device + host": [None, None],
    "two engines, a remote each": ["a", "b"],
    "two engines, one remote": ["a", "a"],
}
"""By name: the remote of each engine."""


def spec() -> CacheSpec:
    """Gemma-3-27B's layers, at 1/2048 of their size."""
    full = GroupSpec("full", FullAttention(), 10, 1, 1, block_tokens=BLOCK_TOKENS, dtype="bfloat16")
    window = GroupSpec("sliding", SlidingWindow(1024), 52, 1, 1, block_tokens=BLOCK_TOKENS, dtype="bfloat16")
    return CacheSpec([full, window])


def order(plan: Plan, at_once: int) -> Iterator[Prompt]:
    """Prompts by the trace's times; ``at_once``: sessions that are open at the same time, if they have turns."""
    waiting = iter(plan.sessions)
    many = any(len(session.turns) > 1 for session in plan.sessions)
    due: list[tuple[float, int, int]] = []
    turns = [session.turns for session in plan.sessions]
    numbers = itertools.count()

    def begin(now: float) -> None:
        session = next(waiting, None)
        if session is not None:
            heapq.heappush(due, (now if many else session.start_s, next(numbers), 0))

    for _ in range(at_once if many else len(turns)):
        begin(0.0)
    while due:
        at, number, k = heapq.heappop(due)
        yield turns[number][k].prompt
        if k + 1 < len(turns[number]):
            heapq.heappush(due, (at + turns[number][k + 1].think_s, number, k + 1))
        elif many:
            begin(at)


class Engine:
    """A scheduler and its cache, and what became of its prompts."""

    def __init__(self, store: MemoryStore | None, device_bytes: int, host_bytes: int) -> None:
        how: dict[str, Any] = {} if store is None else {"remote_uri": ObjectBackend(store, "memory", threads=4)}
        self.cache = KVCache(
            spec(), device_bytes=device_bytes, host_bytes=host_bytes, model_id="m", key_secret=b"s", **how
        )
        self.scheduler = Scheduler(self.cache, max_batched_tokens=8192)
        self.found = dict.fromkeys(SOURCES, 0)

    def serve(self, name: str, tokens: Any) -> None:
        """Until nothing is under way any more."""
        self.scheduler.add(Request(name, tokens, 1))
        while self.scheduler.has_work():
            made = self.scheduler.schedule()
            for done in self.scheduler.commit(made, np.zeros(len(made.sample_rows), np.int64)):
                assert done.finish_reason == "length", done
                for source, count in done.cached_tokens.items():
                    self.found[source] += count
            if not made.num_tokens and self.scheduler.has_work():
                self.scheduler.wait(1.0)


def served(plan: Plan, args: argparse.Namespace, stores: Sequence[str | None], progress: Any) -> dict[str, Any]:
    """What the engines found, and what the remote did."""
    alphabet, begun = Alphabet(range(1, 100_000), "the benchmark"), time.monotonic()
    sizes = [parse_bytes(f"{gib}GiB", "memory") // SCALE for gib in (args.device_gib, args.host_gib)]
    with ExitStack() as stack:
        memories = {name: MemoryStore() for name in stores if name is not None}
        engines = [Engine(None if name is None else memories[name], *sizes) for name in stores]
        for engine in engines:
            stack.enter_context(engine.cache)
        total = count = 0
        for prompt in order(plan, args.sessions_at_once):
            engine = engines[count % len(engines)]
            engine.serve(str(count), alphabet.draw(prompt, 0).astype(np.int32))
            total, count = total + prompt.tokens, count + 1
            progress.update(advance=1)
        found = {source: sum(engine.found[source] for engine in engines) for source in SOURCES}
        kept = [of for engine in engines if (of := engine.cache.stats().remote) is not None]
    row: dict[str, Any] = {"requests": count, "prompt_tokens": total, "cached_tokens": found}
    row["computed_tokens"] = total - sum(found.values())
    row["hit_rate"] = {source: found[source] / total for source in SOURCES} | {"all": sum(found.values()) / total}
    tells = ("spilled_objects", "spilled_bytes", "fetched_objects", "fetched_bytes", "late_looks", "no_room", "expired",
             "failed_fetches", "failed_spills", "missed_objects", "dropped_texts", "dropped_objects")  # fmt: skip
    row["store"] = {name: sum(getattr(one, name) for one in kept) for name in tells} if kept else None
    return row | {"seconds": time.monotonic() - begun}


class _Bar:
    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress, self._task = progress, progress.add_task(name, total=total)

    def update(self, advance: int) -> None:
        self._progress.update(self._task, advance=advance)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="+", help="a file of Mooncake's or of kv-cache-tester's format")
    parser.add_argument("--num-prompts", type=int, default=3000, help="of each trace, from its beginning")
    parser.add_argument("--max-input-len", type=int, default=131_072, help="longer prompts are left out")
    parser.add_argument("--sessions-at-once", type=int, default=16, help="of a trace of sessions")
    parser.add_argument("--device-gib", type=float, default=16.0, help="of KV, at full size")
    parser.add_argument("--host-gib", type=float, default=64.0, help="of KV, at full size")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    objects.LEAST_BYTES //= SCALE
    seek.LEAST_S = 60.0
    rows: dict[str, Any] = {}
    load = os.getloadavg()
    with Progress(disable=not sys.stderr.isatty()) as progress:
        for trace in args.trace:
            plan = read(TraceOptions(trace, num_prompts=args.num_prompts, max_input_len=args.max_input_len),
                        rate=float("inf"), burstiness=1.0, seed=0)  # fmt: skip
            ways = {
                way: served(plan, args, WAYS[way], _Bar(progress, f"{Path(trace).name}, {way}", plan.num_requests))
                for way in args.ways
            }
            rows[Path(trace).name] = {"plan": dict(plan.parameters), "sessions": len(plan.sessions), "ways": ways}
    settings: dict[str, Any] = {"block_tokens": BLOCK_TOKENS, "scale": SCALE}
    settings |= {key: value for key, value in vars(args).items() if key not in ("json", "trace")}
    result = {"machine": describe(), "load": load, "settings": settings, "traces": rows}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _show(rows)
    return 0


def _show(rows: dict[str, Any]) -> None:
    for trace, of in rows.items():
        table = Table("prompt tokens from", *SOURCES, "any", "computed", title=trace)
        for way, row in of["ways"].items():
            rates = [f"{100 * row['hit_rate'][source]:.1f} %" for source in (*SOURCES, "all")]
            table.add_row(way, *rates, f"{row['computed_tokens'] / 1e6:,.2f} M")
        stdout().print(table)


if __name__ == "__main__":
    sys.exit(main())
