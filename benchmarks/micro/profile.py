"""``python -m benchmarks.micro.profile [--shape L] [--running 256 | --admit]``: where a step's microseconds go.

Every part is timed from outside, which adds some 0.2 us to each call; "self" leaves out the parts below that are
listed themselves. What remains of a step is the benchmark's own loop.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.micro.rows import CHUNK, LONG, decoding, export
from benchmarks.micro.shapes import SHAPES, age, books, prompt
from benchmarks.output import stdout
from kvtier import Request, Scheduler
from kvtier.coordinator import admission, coordinator, entries, match, needs, plan, room, scheduler
from kvtier.gpu_pool import block_table, exports
from kvtier.pools import pool_loops

LOOPS = {
    "plan_running",
    "extend_rows",
    "fill_step",
    "advance",
    "valid_ids",
    "_fill_slots",
    "_fill_tables",
    "_fill_pages",
}
LOOPS |= {"_match", "plan_rows", "admission_need", "promised", "extend_row", "release_row", "seal_range", "_set_row"}
METHODS = {
    scheduler.Scheduler: ("schedule", "commit"),
    entries.Entries: ("step",),
    exports.Exports: ("slots", "tables", "pages"),
    admission.Admission: ("admit_waiting",),
    coordinator.Coordinator: ("match", "admit", "seal_prefill", "leave"),
    room.Room: ("make_clean",),
}
MODULES = (admission, coordinator, entries, exports, match, needs, plan, room, scheduler, block_table, pool_loops)


class Profile:
    """Calls, seconds and seconds of listed callees, by name."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.total: dict[str, float] = {}
        self.below: dict[str, float] = {}
        self._open: list[str] = []

    def watch(self, owner: ModuleType | type, name: str) -> None:
        """From now on calls of ``owner.name`` are timed."""
        setattr(owner, name, self._wrapped(getattr(owner, name), name))

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self._open.append(name)
            begun = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                seconds = time.perf_counter() - begun
                self._open.pop()
                self.calls[name] = self.calls.get(name, 0) + 1
                self.total[name] = self.total.get(name, 0.0) + seconds
                if self._open:
                    self.below[self._open[-1]] = self.below.get(self._open[-1], 0.0) + seconds

        return timed

    def show(self, title: str, times: int, whole_s: float) -> None:
        """A table, per repeat, longest self time first."""
        table = Table("part", "calls", "us", "self us", title=f"{title}: {whole_s / times * 1e6:,.1f} us untimed")
        own = {name: seconds - self.below.get(name, 0.0) for name, seconds in self.total.items()}
        for name in sorted(own, key=lambda name: -own[name]):
            calls, total = self.calls[name] / times, self.total[name] / times * 1e6
            table.add_row(name, f"{calls:.3g}", f"{total:,.2f}", f"{own[name] / times * 1e6:,.2f}")
        stdout().print(table)


def _watched() -> Profile:
    profile = Profile()
    for owner, names in METHODS.items():
        for name in names:
            profile.watch(owner, name)
    for module in MODULES:
        for name in LOOPS & vars(module).keys():
            profile.watch(module, name)
    return profile


def _timed(work: Callable[[], None], times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="L")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--admit", action="store_true", help="admission of a long prompt instead of a decode step")
    args = parser.parse_args()
    spec = SHAPES[args.shape]
    if args.admit:
        cache = books(spec, 1 << 17)
        age(cache.core.coordinator.pools)
        serving = Scheduler(cache, max_batched_tokens=CHUNK, max_running=4)
        prompts = iter([Request(f"{i}", prompt(i, LONG), 1) for i in range(60)])

        def work() -> None:
            serving.add(next(prompts))
            while serving.has_work():
                step = serving.schedule()
                serving.commit(step, np.zeros(len(step.sample_rows), np.int64))

        title, times = f"admit and free {LONG:,} tokens, {args.shape}, with its keys", 20
    else:
        serving = decoding(spec, args.running)
        ids = np.ones(args.running, np.int64)

        def work() -> None:
            step = serving.schedule()
            export(step, spec.names, True)
            serving.commit(step, ids)

        title, times = f"{args.running:,} running, {args.shape}", 64
    _timed(work, times)
    whole_s = _timed(work, times)
    profile = _watched()
    _timed(work, times)
    profile.show(title, times, whole_s)


if __name__ == "__main__":
    main()
