"""What KV events cost: CPU time of the engine's thread, and of the publisher's.

    python -m benchmarks.kv_events [--json OUT]

Bookkeeping alone, without tensors: full attention and a window of 1,024 tokens, 131,072 blocks a group and tier.

``step``       ``KVEventPublisher.step`` when no look is due, which is nearly always.
``look``       a look for changes that finds none; there are 20 a second at most.
``prompt``     what a prompt of 90,112 tokens costs on each thread, from its arrival to its end.
``decode``     a step with 256 running requests at 4k tokens each, with and without events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks import machine
from benchmarks.output import stdout
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, KVEvents, Request, Scheduler, SlidingWindow
from kvtier.cache.kv_events.claims import Claims
from kvtier.cache.kv_events.publisher import KVEventPublisher
from kvtier.cache.kv_events.wire import Encoder, Event

Tokens = npt.NDArray[np.int32]
PROMPT_TOKENS = 90_112
BLOCKS = 131_072
CONFIG = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kv_events", description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there, with machine and commit")
    args = parser.parse_args()
    rows = [*_idle(args.repeats), *_prompts(args.repeats), *_decodes(args.repeats)]
    table = Table("what", "thread", "us", title="KV events, CPU time")
    for row in rows:
        table.add_row(row["what"], row["thread"], f"{row['us']:,.2f}" if row["us"] < 100 else f"{row['us']:,.0f}")
    stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=2) + "\n")
    return 0


def _cache() -> KVCache:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 64, "dtype": "float32"}
    full = GroupSpec("full", FullAttention(), num_layers=2, **shape)
    window = GroupSpec("window", SlidingWindow(1024), num_layers=10, **shape)
    blocks = dict.fromkeys(("full", "window"), BLOCKS)
    spec = CacheSpec([full, window])
    return KVCache(spec, device="meta", device_blocks=blocks, host_blocks=blocks, copy_engine="null")


def _row(what: str, thread: str, seconds: list[float]) -> dict[str, Any]:
    return {"what": what, "thread": thread, "us": round(1e6 * statistics.median(seconds), 3)}


def _timed(call: Callable[[], object], count: int = 1) -> float:
    begin = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - begin) / count


def _idle(repeats: int) -> list[dict[str, Any]]:
    with _cache() as cache:
        seldom, often = KVEventPublisher(cache, CONFIG, interval_s=3600.0), KVEventPublisher(cache, CONFIG)
        steps = [_timed(lambda: seldom.step([]), 20_000) for _ in range(repeats)]
        looks = [_timed(often.poll, 50) for _ in range(repeats)]
        seldom.close()
        often.close()
    return [_row("step, no look due", "engine", steps), _row(f"look at {4 * BLOCKS:,} blocks", "engine", looks)]


def _prompt(rng: np.random.Generator) -> Tokens:
    return rng.integers(0, 100_000, PROMPT_TOKENS, dtype=np.int32)


def _run(scheduler: Scheduler, after: Callable[[list[Any]], object] = lambda _: None) -> float:
    """Until all is done; the CPU seconds spent in ``after``."""
    spent = 0.0
    while scheduler.has_work():
        step = scheduler.schedule()
        finished = scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
        spent += _timed(lambda finished=finished: after(finished))  # type: ignore[misc]
    return spent


def _prompts(repeats: int) -> list[dict[str, Any]]:
    """The engine's thread hands over; the publisher's work is done here, on one thread, to be timed."""
    rng, engine, text, claims, encoding = np.random.default_rng(0), [], [], [], []
    with _cache() as cache:
        scheduler, publisher = Scheduler(cache, max_batched_tokens=8192), KVEventPublisher(cache, CONFIG)
        for k in range(repeats + 1):
            request = Request(f"{k}", _prompt(rng), 1)
            scheduler.add(request)
            engine.append(_timed(lambda request=request: publisher.add(request)))  # type: ignore[misc]
            engine[-1] += _run(scheduler, publisher.step) + _timed(publisher.poll)
        publisher.close()
    with _cache() as cache:
        scheduler, events, encoder = Scheduler(cache, max_batched_tokens=8192), KVEvents(cache), Encoder()
        told, chain = Claims(cache.spec, 10**6), cache.core.coordinator.chain
        root, none = chain.root(None, None, ()), np.empty((0, 2), np.uint64)
        for k in range(repeats + 1):
            tokens = _prompt(rng)
            text.append(_timed(lambda tokens=tokens: told.add_text(chain.extend(root, tokens, none)[:, 0], tokens)))  # type: ignore[misc]
            scheduler.add(Request(f"{k}", tokens, 1))
            _run(scheduler)
            changes = events.poll()
            out: list[Event] = []
            claims.append(_timed(partial(told.note, changes)) + _timed(lambda out=out: out.extend(told.take())))  # type: ignore[misc]
            encoding.append(_timed(lambda out=out: encoder.encode(out)))  # type: ignore[misc]
    what = f"a prompt of {PROMPT_TOKENS:,} tokens"
    return [
        _row(what, "engine", engine[1:]),
        _row(f"{what}: its text", "publisher", text[1:]),
        _row(f"{what}: its claims", "publisher", claims[1:]),
        _row(f"{what}: its batch", "publisher", encoding[1:]),
    ]


def _decodes(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for with_events in (False, True):
        rng, seconds = np.random.default_rng(0), []
        with _cache() as cache:
            scheduler = Scheduler(cache, max_batched_tokens=2**20)
            publisher = KVEventPublisher(cache, CONFIG) if with_events else None
            for k in range(256):
                request = Request(f"{k}", rng.integers(0, 100_000, 4096, dtype=np.int32), 10_000)
                scheduler.add(request)
                if publisher is not None:
                    publisher.add(request)
            for _ in range(20):
                _step(scheduler, publisher)
            for _ in range(repeats):
                seconds.append(_timed(lambda s=scheduler, p=publisher: _step(s, p), 400))  # type: ignore[misc]
            if publisher is not None:
                publisher.close()
        rows.append(_row(f"a decode step of 256, {'with' if with_events else 'without'} events", "engine", seconds))
    return rows


def _step(scheduler: Scheduler, publisher: KVEventPublisher | None) -> None:
    step = scheduler.schedule()
    finished = scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
    if publisher is not None:
        publisher.step(finished)


if __name__ == "__main__":
    sys.exit(main())
