"""``python -m benchmarks.micro.backlog``: the worst ``schedule()`` while stores are backed up.

Full and window layers share 80 GiB of a device without memory; 32 requests at a time compute prompts of 500 to 9,000
tokens, faster than the link takes what they leave behind: thousands of stores wait, and most blocks are fenced.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from benchmarks.output import stdout
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow
from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Transfer

SPEC = CacheSpec([GroupSpec("full", FullAttention(), 8, 8, 128), GroupSpec("window", SlidingWindow(1024), 40, 8, 128)])
REQUESTS = 32


class SlowLink:
    """A copy engine that ends ``ends`` transfers a poll, the oldest first, and orders writers as streams do."""

    def __init__(self, ends: int) -> None:
        self._ends = ends
        self._live: list[int] = []
        self.num_ordered = 0

    def submit(self, transfer: Transfer) -> None:
        self._live.append(transfer.ticket)

    def poll(self) -> Sequence[Outcome]:
        ended, self._live = self._live[: self._ends], self._live[self._ends :]
        return [Outcome(ticket) for ticket in ended]

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        self.num_ordered += len(tickets)
        return True

    def wait(self, timeout_s: float) -> bool:
        return bool(self._live)

    def wake(self) -> None:
        """Nobody sleeps here."""

    def now(self) -> float:
        return 0.0

    def close(self, timeout_s: float) -> bool:
        return True


def measure(ends: int, seconds: float) -> tuple[list[float], list[int], int]:
    """Serves for so long: of every ``schedule()`` milliseconds of CPU and the stores that writers were ordered behind;
    and how many stores wait for the link at the end."""
    link, rnd, added = SlowLink(ends), np.random.default_rng(0), 0
    took_ms, ordered = list[float](), list[int]()

    def engine(_: TierMemory) -> SlowLink:
        return link

    with KVCache(SPEC, device="meta", device_bytes="80GiB", host_bytes="300GiB", copy_engine=engine) as cache:
        scheduler, end = Scheduler(cache, 8192, 256), time.perf_counter() + seconds
        while time.perf_counter() < end:
            while scheduler.num_running + scheduler.num_waiting < REQUESTS:
                prompt = rnd.integers(0, 1000, int(rnd.integers(500, 9000)))
                scheduler.add(Request(f"{added}", prompt, int(rnd.integers(5, 60))))
                added += 1
            before, begun = link.num_ordered, time.thread_time()
            step = scheduler.schedule()
            took_ms.append((time.thread_time() - begun) * 1e3)
            ordered.append(link.num_ordered - before)
            scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
        return took_ms, ordered, len(cache.parts[0].connector.books.planned)


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
