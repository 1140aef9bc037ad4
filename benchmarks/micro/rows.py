"""The rows: each prepares its state, then yields one measurement per repeat, in seconds unless it says otherwise."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.micro import submit
from benchmarks.micro.shapes import BLOCK_TOKENS, SHAPES, age, books, prompt, shared_books
from kvtier import CacheSpec, Request, Scheduler, Step
from kvtier.coordinator.match import Matcher
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.layout import Layout
from kvtier.pools.block_pool import BlockPools

LONG = 90_112
CHUNK = 8_192


@dataclass(frozen=True)
class Row:
    """One line of the table; figures in ``unit``. ``must``, ``reach``: marks, None where nobody has set one.

    ``vllm``: vLLM 0.33's on such a machine, measured elsewhere.
    """

    name: str
    shape: str
    unit: str
    scale: float
    must: float | None
    reach: float | None
    vllm: float | None
    measure: Callable[[], Iterator[float]]


def keys() -> Iterator[float]:
    """Hashing a long prompt, per block."""
    chain = KeyChain(SHAPES["L"], "", b"benchmark")
    root, empty = chain.root(None, None, ()), np.empty((0, 2), np.uint64)
    for seed in range(15):
        tokens = prompt(seed, LONG)
        begun = time.perf_counter()
        chain.extend(root, tokens, empty)
        yield (time.perf_counter() - begun) / (LONG // 16)


def admit_and_free(spec: CacheSpec) -> Iterator[float]:
    """One long prompt in chunks through pools that are full of cached blocks; keys and exports not counted."""
    cache = books(spec, 1 << 17)
    age(cache.core.coordinator.pools)
    scheduler = Scheduler(cache, max_batched_tokens=CHUNK, max_running=4)
    for seed in range(18):
        scheduler.add(Request(f"{seed}", prompt(seed, LONG), 1))
        begun = time.perf_counter()
        while scheduler.has_work():
            step = scheduler.schedule()
            scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
        yield time.perf_counter() - begun
    cache.close()


def match(spec: CacheSpec) -> Iterator[float]:
    """A full hit of a long prompt on the device, with a host tier to ask as well."""
    cache = books(spec, 1 << 14, 1 << 14)
    coordinator, host = cache.core.coordinator, cache.core.host
    scheduler = Scheduler(cache, max_batched_tokens=CHUNK, max_running=4)
    tokens = prompt(0, LONG + 17)
    serve(scheduler, Request("first", tokens, 1))
    matcher = Matcher(coordinator.pools, host)
    chain = coordinator.chain.extend(coordinator.chain.root(None, None, ()), tokens, np.empty((0, 2), np.uint64))
    for _ in range(30):
        begun = time.perf_counter()
        hit = matcher.match(coordinator.tables, chain, len(tokens))
        yield time.perf_counter() - begun
        assert hit.num_tokens >= LONG
    cache.close()


def serve(scheduler: Scheduler, *requests: Request) -> None:
    """Serves to the end with zeros."""
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work():
        step = scheduler.schedule()
        scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))


def export(step: Step, names: tuple[str, ...], pages: bool) -> None:
    """Everything that an engine asks of a step; without ``pages``, what it needs if it keeps block tables itself."""
    for name in names:
        view = step.group(name)
        _ = view.slot_mapping
        if pages:
            _ = view.block_table, view.paged()


def decoding(spec: CacheSpec, running: int) -> Scheduler:
    """A scheduler whose requests all decode at some 4k tokens, lengths staggered over a block."""
    context, cache = 4_096, books(spec, running * 300)
    scheduler = Scheduler(cache, max_batched_tokens=CHUNK, max_running=running)
    for r in range(running):
        scheduler.add(Request(f"{r}", prompt(r, context - 64 + r % 16), 4_096))
    step = scheduler.schedule()
    while step.num_tokens != running or len(step.request_ids) != running:
        scheduler.commit(step, np.ones(len(step.sample_rows), np.int64))
        step = scheduler.schedule()
    scheduler.commit(step, np.ones(running, np.int64))
    return scheduler


def decode(spec: CacheSpec, running: int, pages: bool) -> Iterator[float]:
    """schedule + commit with every exported array."""
    scheduler, ids = decoding(spec, running), np.ones(running, np.int64)
    for _ in range(160):
        begun = time.perf_counter()
        step = scheduler.schedule()
        export(step, spec.names, pages)
        scheduler.commit(step, ids)
        yield time.perf_counter() - begun


def blocked(spec: CacheSpec) -> Iterator[float]:
    """A step of one that decodes, while the first that waits shares its long prompt and lacks blocks for the rest."""
    cache, stem = books(spec, LONG // BLOCK_TOKENS + 300), prompt(0, LONG)
    scheduler, ids = Scheduler(cache, max_batched_tokens=CHUNK, max_running=4), np.ones(1, np.int64)
    scheduler.add(Request("runs", stem, 1_024))
    while not len((step := scheduler.schedule()).sample_rows):
        scheduler.commit(step, ids[:0])
    scheduler.commit(step, ids)
    scheduler.add(Request("waits", np.concatenate([stem, prompt(1, 4_800)]), 1))
    for _ in range(160):
        begun = time.perf_counter()
        step = scheduler.schedule()
        scheduler.commit(step, ids)
        yield time.perf_counter() - begun
        assert "needs" in scheduler.why_waiting()["waits"]
    cache.close()


class _Timed:
    """Adds up the seconds that calls of some methods take."""

    def __init__(self, owner: object, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, function: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **options: object) -> object:
            begun = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed


def store(spec: CacheSpec) -> Iterator[float]:
    """The CPU's side of storing a long prompt: choosing blocks, the ticket, and what its end settles."""
    cache = books(spec, 1 << 13, 1 << 17)
    scheduler = Scheduler(cache, max_batched_tokens=CHUNK, max_running=4)
    connector = cache.core.coordinator.connector
    chosen, moved = _Timed(cache.core.coordinator, "plan_stores"), _Timed(connector, "submit_planned", "poll")
    for seed in range(12):
        chosen.seconds = moved.seconds = 0.0
        serve(scheduler, Request(f"{seed}", prompt(seed, LONG), 1))
        yield chosen.seconds + moved.seconds
    cache.close()


def load(spec: CacheSpec) -> Iterator[float]:
    """The CPU's side of loading one: pins, the ticket, and what its end settles."""
    cache = books(spec, 1 << 13, 1 << 14)
    scheduler = Scheduler(cache, max_batched_tokens=CHUNK, max_running=4)
    connector, tokens = cache.core.coordinator.connector, prompt(0, LONG + 17)
    serve(scheduler, Request("first", tokens, 1))
    timed = _Timed(connector, "pin_host", "load", "unpin_host", "poll")
    for i in range(12):
        cache.core.coordinator.pools.forget_all()
        timed.seconds = 0.0
        serve(scheduler, Request(f"{i}", tokens, 1))
        yield timed.seconds
    assert cache.stats().transfers.loaded_blocks > 11 * LONG // 16
    cache.close()


def compact(spec: CacheSpec) -> Iterator[float]:
    """Emptying a slab for another group, half of whose blocks have to be moved, while 128 requests run."""
    running = 256
    cache = shared_books(spec, running * 80)
    coordinator = cache.core.coordinator
    scheduler = Scheduler(cache, max_batched_tokens=CHUNK, max_running=running)
    for i in range(running):
        scheduler.add(Request(f"{i}", prompt(i, BLOCK_TOKENS), 2_048))
    for _ in range(1_008):  # in lockstep, so that every slab holds blocks of many requests
        step = scheduler.schedule()
        scheduler.commit(step, np.ones(len(step.sample_rows), np.int64))
    for i in range(0, running, 2):
        scheduler.abort(f"{i}")
    scheduler.commit(scheduler.schedule(), np.ones(running // 2, np.int64))
    for _ in range(30):
        need, moved = np.array([coordinator.pools.clean[0] + 1, 0]), coordinator.compactor.num_moved
        begun = time.perf_counter()
        assert coordinator.compactor.empty_slab(need, None)
        yield time.perf_counter() - begun
        assert coordinator.compactor.num_moved > moved
    cache.close()


def build_pool() -> Iterator[float]:
    """A pool of a million blocks."""
    for _ in range(8):
        begun = time.perf_counter()
        BlockPools(Layout.fixed([64], [1_000_000]))
        yield time.perf_counter() - begun


def bytes_per_block() -> Iterator[float]:
    """Memory of the books per cached block, by the size of their arrays and by the process's growth."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pools = BlockPools(Layout.fixed([64], [1_000_000]))
    age(pools)
    yield sum(array.nbytes for array in pools.arrays) / 1e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >= before


Marks = dict[str, tuple[float, float, float | None]]
"""shape -> (must, reach, vLLM)."""

ADMIT: Marks = {"L": (0.6, 0.35, 6.3), "G": (0.6, 0.35, 19.6), "C": (0.6, 0.35, 29.9), "X": (0.9, 0.6, None)}
MATCH: Marks = {"L": (0.12, 0.08, 2.5), "G": (0.15, 0.08, 2.7), "X": (0.2, 0.12, None)}
DECODE: dict[tuple[int, bool], Marks] = {
    (256, True): {"L": (30, 18, 2400), "G": (35, 22, 6000), "X": (80, 49, None)},
    (1024, True): {"L": (90, 50, 10800), "G": (115, 69, 34600), "X": (250, 165, None)},
    (1024, False): {"L": (40, 24, None), "G": (50, 35, None), "X": (110, 70, None)},
}
"""(running, with page indices) -> marks."""


def rows() -> list[Row]:
    """The whole table."""
    found = [Row("keys of 90,112 tokens", "L", "ns/block", 1e9, 45, 30, 1428, keys)]
    for shape, marks in ADMIT.items():
        found.append(Row("admit + free 90,112", shape, "ms", 1e3, *marks, partial(admit_and_free, SHAPES[shape])))
    for shape, marks in MATCH.items():
        found.append(Row("match 90,112, full hit", shape, "ms", 1e3, *marks, partial(match, SHAPES[shape])))
    for (running, pages), shapes in DECODE.items():
        name = f"step, {running:,} running" + ("" if pages else ", no pages")
        for shape, marks in shapes.items():
            found.append(Row(name, shape, "us", 1e6, *marks, partial(decode, SHAPES[shape], running, pages)))
    for shape in MATCH:
        measure = partial(blocked, SHAPES[shape])
        found.append(Row("step, head lacks blocks, hit 90,112", shape, "us", 1e6, None, None, None, measure))
    found.append(Row("store 90,112, CPU side", "G", "ms", 1e3, 0.5, 0.2, 10.5, partial(store, SHAPES["G"])))
    found.append(Row("load 90,112, CPU side", "G", "ms", 1e3, 0.5, 0.2, 6.2, partial(load, SHAPES["G"])))
    found.append(Row("slab emptied, half of it moved", "G", "us", 1e6, None, None, None, partial(compact, SHAPES["G"])))
    whole, per_copy = partial(submit.whole, "gpt-oss-20b"), partial(submit.per_descriptor, "Gemma-3-12B")
    found.append(Row("submit a load, no driver", f"{submit.RUNS:,} copies", "ms", 1e3, 0.25, 0.1, None, whole))
    found.append(Row("submit a load, no driver", "each of 5,632", "us", 1e6, 0.1, 0.02, None, per_copy))
    found.append(
        Row("submit, scheduling thread", "any", "us", 1e6, 50, 15, None, partial(submit.handing_over, "gpt-oss-20b"))
    )
    found.append(Row("1,000,000 blocks, build", "-", "s", 1.0, 0.02, 0.005, 1.9, build_pool))
    found.append(Row("1,000,000 blocks, each", "-", "bytes", 1.0, 64, 48, 277, bytes_per_block))
    return found
