"""``python -m benchmarks.remote.backends [URI ...] [--mib N ...] [--json PATH]``: stores against their libraries.

The same objects, moved by as many threads: by kvtier's store with trailers made and checked, and by the library itself
in the plainest quick way, without names, trailers, checks or an arena to read into. (obstore's memory would only pass
pointers on, so there both copy.) What the library reads lies in memory of its own, which the next read uses again, so
that much of it never leaves the CPU's cache. "arena" is the library with a copy from there to where the bytes are
needed: the least that a cache over it takes. All take many short turns; the best of each counts, in MB/s (1e6 bytes),
and the least CPU seconds for a GB, which other load disturbs less. "share": kvtier's of the library's speed.

Without URIs: a directory on the disk of --folder, one in /dev/shm, and memory. Reads come from the page cache. A bucket
is given as s3://bucket?endpoint=http://127.0.0.1:9000&region=us-east-1, and must be empty or disposable.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from obstore.store import LocalStore, MemoryStore
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.output import stdout
from kvtier.remote.backends.contract import Outcome
from kvtier.remote.backends.uri import bucket, open_backend, parse_uri
from kvtier.remote.envelope import TRAILER_BYTES, Envelope
from kvtier.remote.names import object_name

MIB = 1 << 20
A_CALL = 32
"""Objects of a call."""
LONG_S = 600.0


@dataclass
class Load:
    """Objects in one piece of memory, and room to read them into another."""

    count: int
    num_bytes: int
    pieces: int

    def __post_init__(self) -> None:
        size = self.count * self.num_bytes
        self.source = memoryview(bytearray(np.random.default_rng(0).bytes(size)))
        self.target = memoryview(bytearray(size))
        self.keys = [os.urandom(16) for _ in range(self.count)]
        self.names = [object_name(bytes(16), "t", key) for key in self.keys]

    def of(self, memory: memoryview, i: int) -> list[memoryview]:
        """Object i in blocks."""
        step = self.num_bytes // self.pieces
        return [memory[i * self.num_bytes + k * step : i * self.num_bytes + (k + 1) * step] for k in range(self.pieces)]


class Ours:
    """kvtier's store."""

    def __init__(self, uri: str, load: Load) -> None:
        self.store = open_backend(uri)
        self.store.register(load.target)
        self._load = load
        self._envelope = Envelope(bytes(16), b"secret" if parse_uri(uri).digest == "blake2b" else None)

    def put(self) -> None:
        """Stores all objects."""
        self._move(self._load.source, self._envelope.seal, self.store.put)

    def get(self) -> None:
        """Reads all objects."""
        self._move(self._load.target, self._envelope.check, self.store.get)

    def _move(self, memory: memoryview, step: Callable[..., Any], call: Callable[..., None]) -> None:
        load, calls = self._load, 0
        for first in range(0, load.count, A_CALL):
            numbers = range(first, min(load.count, first + A_CALL))
            blocks = [load.of(memory, i) for i in numbers]
            trailers = [memoryview(bytearray(TRAILER_BYTES)) for _ in numbers]
            keys = [load.keys[i] for i in numbers]

            def around(
                k: int, total: int | None = None, blocks: Any = blocks, trailers: Any = trailers, keys: Any = keys
            ) -> Any:
                more = {} if total is None else {"total": total}
                return step(keys[k], "t", blocks[k], trailers[k], **more)

            objects = [[*of, trailer] for of, trailer in zip(blocks, trailers, strict=True)]
            call(calls, [load.names[i] for i in numbers], objects, LONG_S, around)
            calls += 1
        while calls:
            self.store.wait(LONG_S)
            for answer in self.store.poll():
                assert all(outcome is Outcome.OK for outcome in answer.outcomes), answer.reasons
                calls -= 1


class Library:
    """obstore as it is."""

    def __init__(self, uri: str, load: Load) -> None:
        parsed = parse_uri(uri)
        self._load = load
        self._pool = ThreadPoolExecutor(parsed.threads)
        if parsed.scheme == "file":
            self._store: Any = LocalStore(Path(parsed.path) / "plain", mkdir=True)
        else:
            self._store = MemoryStore() if parsed.scheme == "memory" else bucket(parsed)

    def put(self) -> None:
        """Stores all objects, each from one buffer."""
        size, source = self._load.num_bytes, self._load.source
        if isinstance(self._store, MemoryStore):
            self._all(lambda i: obstore.put(self._store, f"plain/{i}", bytes(source[i * size : (i + 1) * size])))
            return
        self._all(
            lambda i: obstore.put(self._store, f"plain/{i}", source[i * size : (i + 1) * size], use_multipart=False)
        )

    def get(self) -> None:
        """Reads all objects into the library's own memory."""
        if isinstance(self._store, MemoryStore):
            self._all(lambda i: bytes(obstore.get(self._store, f"plain/{i}").bytes()))
            return
        self._all(lambda i: len(obstore.get(self._store, f"plain/{i}").bytes()))

    def get_into_arena(self) -> None:
        """Reads all objects, and copies them to where kvtier reads them to."""
        size, target = self._load.num_bytes, np.frombuffer(self._load.target, np.uint8)

        def one(i: int) -> None:
            found: Any = obstore.get(self._store, f"plain/{i}").bytes()
            data = np.frombuffer(found, np.uint8)
            np.copyto(target[i * size : (i + 1) * size], data)  # without the GIL

        self._all(one)

    def _all(self, one: Callable[[int], Any]) -> None:
        list(self._pool.map(one, range(self._load.count)))


def measured(uri: str, load: Load, turns: int) -> dict[str, dict[str, float]]:
    """By what was done: MB/s and CPU s/GB of the library and of kvtier."""
    ours, library = Ours(uri, load), Library(uri, load)
    ways: dict[str, dict[str, Callable[[], None]]] = {
        "put": {"library": library.put, "kvtier": ours.put},
        "get": {"library": library.get, "arena": library.get_into_arena, "kvtier": ours.get},
    }
    size = load.count * load.num_bytes
    rows = {what: {f"{side} {unit}": 0.0 for side in of for unit in ("MB/s", "CPU s/GB")} for what, of in ways.items()}
    for turn in range(turns):
        for what, row in rows.items():
            order = list(ways[what].items())
            for side, move in order if turn % 2 else order[::-1]:
                cpu, begun = time.process_time(), time.perf_counter()
                move()
                speed = size / 1e6 / (time.perf_counter() - begun)
                spent = (time.process_time() - cpu) / (size / 1e9)
                row[f"{side} MB/s"] = max(row[f"{side} MB/s"], speed)
                row[f"{side} CPU s/GB"] = min(row[f"{side} CPU s/GB"] or spent, spent)
    load.target[:] = bytes(len(load.target))
    ours.get()
    assert load.target == load.source
    for row in rows.values():
        row["share"] = row["kvtier MB/s"] / row["library MB/s"]
        if "arena MB/s" in row:
            row["share, arena"] = row["kvtier MB/s"] / row["arena MB/s"]
    assert ours.store.close(LONG_S)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", nargs="*", help="of stores to measure")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where a directory is made")
    parser.add_argument("--mib", type=float, nargs="*", default=[0.25, 1, 8], help="sizes of an object")
    parser.add_argument("--pieces", type=int, default=1, help="blocks of an object")
    parser.add_argument("--total-mib", type=int, default=64, help="of all objects")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        places = {uri: uri for uri in args.uri} or _places(disk, memory)
        with Console(stderr=True).status("measuring") as status:
            for name, uri in places.items():
                for mib in args.mib:
                    status.update(f"{name}, {mib:g} MiB")
                    size = int(mib * MIB)
                    load = Load(max(1, args.total_mib * MIB // size), size, args.pieces)
                    figures[f"{name}, {mib:g} MiB"] = measured(uri, load, args.turns)
    if args.json:
        result = {"machine": describe(), "load": os.getloadavg(), "stores": figures}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _show(figures)


def _places(disk: str, memory: str) -> dict[str, str]:
    return {
        "a directory on the disk": f"file://{disk}/store",
        "the same, signed": f"file://{disk}/signed?digest=blake2b",
        "a directory in /dev/shm": f"file://{memory}/store",
        "memory": "memory://",
    }


def _show(figures: dict[str, Any]) -> None:
    sides = ("library", "arena", "kvtier")
    columns = [*(f"{side} MB/s" for side in sides), "share", "share, arena", *(f"{side} CPU s/GB" for side in sides)]
    table = Table("objects", "", *columns)
    for name, rows in figures.items():
        for what, row in rows.items():
            digits = {c: ".0%" if "share" in c else ".2f" if "CPU" in c else ",.0f" for c in columns}
            table.add_row(name, what, *(format(row[c], digits[c]) if c in row else "" for c in columns))
    stdout().print(table)


if __name__ == "__main__":
    main()
