"""``MooncakeBackend`` beside the library itself: bytes a second, and CPU seconds a gigabyte, over TCP on loopback.

    make test-store ARGS=--co                                        once, for the environment
    .venv-store/bin/python -m tests.remote.alone .venv-store/bin/python -m benchmarks.remote.mooncake

All ways move the same bytes of the same registered memory, to and from one storage process, in turn; medians of rounds.
``one``      the library's ``batch_put_from`` and ``batch_get_into``: an object is one buffer; batches of 32.
``pieces``   its ``*_multi_buffers``: an object is some pieces and a trailer; 256 pieces a call.
``kvtier``   ``MooncakeBackend``: the same objects; those of small pieces are copied together first.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import machine, output
from kvtier.remote.backends.contract import Buffers, Outcome
from kvtier.remote.backends.mooncake import MooncakeBackend
from tests.remote.alone import is_alone
from tests.remote.mooncake_cluster import HOST, PORT, Cluster, Process

TRAILER = 64
LIBRARY_BATCH, MOST_TOGETHER = 32, 256
Way = Callable[[str, list[str]], None]


class Bench:
    """Objects in registered memory, and the ways to move them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.size = args.pieces * args.piece_kib * 1024
        self.count = args.objects
        self.store = MooncakeBackend(HOST, PORT, {"threads": str(args.threads)})
        self.client: Any = self.store._client
        self.mapping = mmap.mmap(-1, self.count * self.size)
        arena = memoryview(self.mapping)
        np.frombuffer(arena, np.uint8)[:] = 7
        self.store.register(arena)
        self.address = np.frombuffer(arena, np.uint8).ctypes.data
        piece = args.piece_kib * 1024
        trailers = np.zeros((self.count, TRAILER), np.uint8)
        self.objects: list[Buffers] = []
        self.where: list[list[int]] = []
        order = np.random.default_rng(0).permutation(self.count * args.pieces)
        for k in range(self.count):
            places = [int(at) * piece for at in order[k * args.pieces : (k + 1) * args.pieces]]
            self.objects.append([arena[at : at + piece] for at in places] + [memoryview(trailers[k])])
            self.where.append([self.address + at for at in places] + [trailers[k].ctypes.data])
        self.sizes = [[piece] * args.pieces + [TRAILER]] * self.count
        self.tickets = 0

    def one(self, what: str, names: list[str]) -> None:
        """The library, one buffer an object."""
        call = self.client.batch_put_from if what == "put" else self.client.batch_get_into
        for begin in range(0, self.count, LIBRARY_BATCH):
            part = range(begin, min(begin + LIBRARY_BATCH, self.count))
            codes = call(
                [names[k] for k in part], [self.address + k * self.size for k in part], [self.size] * len(part)
            )
            assert min(codes) >= 0, codes

    def pieces(self, what: str, names: list[str]) -> None:
        """The library, pieces; in calls of so many pieces that it does not run into its time limits."""
        put = what == "put"
        call = self.client.batch_put_from_multi_buffers if put else self.client.batch_get_into_multi_buffers
        together = max(1, MOST_TOGETHER // len(self.sizes[0]))
        for begin in range(0, self.count, together):
            part = slice(begin, begin + together)
            codes = call(names[part], self.where[part], self.sizes[part])
            assert min(codes) >= 0, codes

    def kvtier(self, what: str, names: list[str]) -> None:
        """Our class."""
        self.tickets += 1
        (self.store.put if what == "put" else self.store.get)(self.tickets, names, self.objects, 60.0)
        while not (found := self.store.poll()):
            self.store.wait(60.0)
        assert set(found[0].outcomes) == {Outcome.OK}, found

    def round(self, way: Way, name: str, storage: Process) -> dict[str, float]:
        """One put and one get: MB/s, and CPU s/GB here and of the storage process."""
        names = [f"{name}/{k}" for k in range(self.count)]
        gigabytes = self.count * self.size / 1e9
        found: dict[str, float] = {}
        for what in ("put", "get"):
            ours, theirs, begun = time.process_time(), storage.cpu_s(), time.perf_counter()
            way(what, names)
            seconds = time.perf_counter() - begun
            found[f"{what} MB/s"] = gigabytes * 1e3 / seconds
            found[f"{what} CPU s/GB"] = (time.process_time() - ours) / gigabytes
            found[f"{what} CPU s/GB, storage"] = (storage.cpu_s() - theirs) / gigabytes
        self.client.batch_remove(names, True)
        return found


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians by way and figure."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), lease_ms=30_000)
        try:
            storage = cluster.start_storage(memory_mb=4 * args.objects * args.pieces * args.piece_kib // 1024 + 64)
            bench = Bench(args)
            ways: dict[str, Way] = {"one": bench.one, "pieces": bench.pieces, "kvtier": bench.kvtier}
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
            for turn in range(args.rounds + 1):
                for name, way in ways.items():
                    row = bench.round(way, f"{name}/{turn}", storage)
                    rows[name] += [row] if turn else []  # the first one opens connections
            bench.store.close(60.0)
        finally:
            cluster.close()
    return {name: {key: statistics.median(row[key] for row in each) for key in each[0]} for name, each in rows.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.remote.mooncake", description=__doc__.split("\n")[0])
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--pieces", type=int, default=4, help="of an object")
    parser.add_argument("--piece-kib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures there, with machine and commit")
    args = parser.parse_args()
    if not is_alone():
        sys.exit("Mooncake listens on all addresses: run this by `python -m tests.remote.alone`")
    found = measure(args)
    table = Table("", *found["one"], title=f"{args.objects} objects of {args.pieces} x {args.piece_kib} KiB")
    for name, row in found.items():
        table.add_row(name, *(f"{value:,.0f}" if "MB/s" in key else f"{value:.2f}" for key, value in row.items()))
    for base in ("one", "pieces"):
        shares = {key: found["kvtier"][key] / found[base][key] for key in found[base]}
        table.add_row(f"kvtier / {base}", *(f"{100 * share:.0f} %" for share in shares.values()))
    output.stdout().print(table)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        result = {"machine": machine.describe(), "settings": settings, "figures": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
