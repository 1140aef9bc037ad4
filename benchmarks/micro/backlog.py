"""``python -m benchmarks.micro.backlog``: the worst ``schedule()`` while stores are backed up.

Full and window layers share 80 GiB of a device without memory; 32 requests at a time compute prompts of 500 to 9,000
tokens, faster than the link takes what they leave behind: thousands of stores wait, and most blocks are fenced. The
engine is the one that drives a GPU's streams, over streams that cost nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from rich.table import Table

from benchmarks.output import stdout
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow
from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.tier_memory import Ids, TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer

SPEC = CacheSpec([GroupSpec("full", FullAttention(), 8, 8, 128), GroupSpec("window", SlidingWindow(1024), 40, 8, 128)])
REQUESTS = 32


class SlowLink:
    """Streams that make ``ends`` copies between two looks of the host. Nothing here takes time but the engine's own."""

    def __init__(self, ends: int) -> None:
        self._ends = ends
        self._given = [0, 0, 0]  # copies, by stream; the first stream is the one that computes
        self._ended = [0, 0, 0]
        self.num_ordered = 0

    def pass_time(self) -> None:
        """Some copies end."""
        self._ended = [min(n + self._ends, given) for n, given in zip(self._ended, self._given, strict=True)]

    def compute_stream(self) -> int:
        return 0

    def new_stream(self, name: str) -> int:
        return 1 + list(Direction).index(Direction(name))

    def record(self, stream: int) -> tuple[int, int]:
        return stream, self._given[stream]

    def wait(self, stream: int, event: tuple[int, int]) -> None:
        self.num_ordered += stream == 0

    def retire(self, event: tuple[int, int]) -> None:
        """An event is two numbers."""

    def is_done(self, event: tuple[int, int]) -> bool:
        stream, copies = event
        return copies <= self._ended[stream]

    def copy(self, stream: int, memory: TierMemory, transfer: Transfer) -> Callable[[], Outcome]:
        self._given[stream] += 1
        return partial(Outcome, transfer.ticket)

    def move(self, memory: TierMemory, g: int, sources: Ids, targets: Ids) -> None:
        """There are no bytes."""

    def wipe(self, memory: TierMemory, groups: Ids, blocks: Ids) -> None:
        """Likewise."""

    def sleep(self, heads: Callable[[], Sequence[tuple[int, int]]], timeout_s: float) -> bool:
        raise AssertionError("the host waits for a link that moves")

    def wake(self) -> None:
        """Nobody sleeps here."""

    def hurry(self, on: bool) -> None:
        """Nobody waits for copies to be given."""

    def now(self) -> float:
        return 0.0

    def close(self, timeout_s: float) -> bool:
        return True


def measure(ends: int, seconds: float) -> tuple[list[float], list[int], int]:
    """Serves for so long: of every ``schedule()`` milliseconds of CPU and the stores that writers were ordered behind;
    and how many stores wait for the link at the end."""
    link, rnd, added = SlowLink(ends), np.random.default_rng(0), 0
    took_ms, ordered = list[float](), list[int]()

    def engine(memory: TierMemory) -> StreamsEngine:
        return StreamsEngine(memory, link)

    with KVCache(SPEC, device="meta", device_bytes="80GiB", host_bytes="300GiB", copy_engine=engine) as cache:
        scheduler, end = Scheduler(cache, 8192, 256), time.perf_counter() + seconds
        while time.perf_counter() < end:
            while scheduler.num_running + scheduler.num_waiting < REQUESTS:
                prompt = rnd.integers(0, 1000, int(rnd.integers(500, 9000)))
                scheduler.add(Request(f"{added}", prompt, int(rnd.integers(5, 60))))
                added += 1
            link.pass_time()
            before, begun = link.num_ordered, time.thread_time()
            step = scheduler.schedule()
            took_ms.append((time.thread_time() - begun) * 1e3)
            ordered.append(link.num_ordered - before)
            link.pass_time()
            scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
        return took_ms, ordered, len(cache.core.coordinator.connector.books.planned)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.backlog", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each of the rows")
    seconds = parser.parse_args().seconds
    table = Table("ends a poll", "steps", "median ms", "99 % ms", "worst ms", "stores ordered then", "planned at last")
    for ends in (0, 2, 8):
        took, ordered, planned = measure(ends, seconds)
        worst = int(np.argmax(took))
        middle, most = np.percentile(took, [50, 99])
        numbers = f"{middle:.2f}", f"{most:.2f}", f"{took[worst]:.1f}", f"{ordered[worst]}", f"{planned:,}"
        table.add_row(str(ends), f"{len(took):,}", *numbers)
    stdout().print(table)


if __name__ == "__main__":
    main()
