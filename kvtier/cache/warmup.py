"""Compiles the loops before the first request needs them.

Machine code is kept on disk (``machine_code``). So only the first process after an installation or a change of the
sources compiles. Later processes load the code in well under a second. ``kvtier warmup`` does it ahead, for an image.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier.machine.loops.machine_code import VARIABLE, Keeper, clear_up, cpu, folder, keepers, lock, why_not_written

if TYPE_CHECKING:
    from kvtier.geometry.spec import CacheSpec

_log = logging.getLogger("kvtier.cache.warmup")

COMPILING = "compiling %d loops into %s (once after an installation or a change of the sources)"
WAITING = "waiting for another process, which compiles the loops into %s"
UNKEPT = (
    "compiling %d loops, which cannot be kept: %s: every start compiles them; set %s to a folder that can be written"
)


@dataclass(frozen=True)
class WarmUp:
    """The result of the process's one warm-up."""

    seconds: float
    loops: int
    """Compiled functions that Python calls."""
    compiled: int
    """The part of these that this process has compiled; the others were loaded."""
    folder: str | None
    """The folder of their machine code."""
    cpu: str
    """The CPU of this code, by LLVM's name; another CPU needs its own."""
    problem: str
    """Why some could not be kept, so that every start compiles them; empty if all are kept."""

    @property
    def kept(self) -> bool:
        """Whether the next process finds them all."""
        return not self.problem

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self) | {"kept": self.kept}


_done: WarmUp | None = None
_lock = threading.RLock()
_running = False


def warm_up() -> WarmUp:
    """Loads or compiles every loop, by a run on toy caches; returns the result of the first call.

    Other threads wait for it. One process at a time compiles, others wait and load. A warning of the logger
    ``kvtier.cache.warmup`` says whether it compiles or waits; there is none if all loops were kept.
    """
    global _done, _running
    with _lock:
        if _done is None and _running:
            return WarmUp(0.0, 0, 0, None, "", "")  # re-entered by the warm-up's own caches
        if _done is None:
            _running = True
            try:
                _done = _warm_up()
            finally:
                _running = False
        return _done


def _warm_up() -> WarmUp:
    start = time.perf_counter()
    root, why = folder()
    with ExitStack() as stack:

        def before_compiling() -> None:
            """Called before the first loop without kept code. Another process may keep it while this process waits."""
            nonlocal why
            Keeper.before_compiling = None
            why = why_not_written(root, why)
            if root is not None and not why:
                stack.enter_context(lock(root, lambda: _log.warning(WAITING, root)))
            missing = sum(not keeper.is_kept() for keeper in keepers())
            if missing and why:
                _log.warning(UNKEPT, missing, why, VARIABLE)
            elif missing:
                _log.warning(COMPILING, missing, root)

        Keeper.before_compiling = before_compiling
        stack.callback(setattr, Keeper, "before_compiling", None)
        _run()
    loops = keepers()
    compiled = [keeper for keeper in loops if keeper.compiled]
    if root is not None:
        clear_up(root)
    problem = next((why or keeper.problem for keeper in compiled if why or keeper.problem), "")
    where = None if root is None else str(root)
    return WarmUp(time.perf_counter() - start, len(loops), len(compiled), where, cpu(), problem)


def _run() -> None:
    """Calls every loop."""
    fixed = {"device_blocks": dict.fromkeys(_KINDS, 8), "host_blocks": dict.fromkeys(_KINDS, 64)}
    shared = {"device_bytes": 5000, "host_bytes": 10000}
    _attention()
    _rows()
    _bytes()
    _exercise("eager", [1, 2, 1, 1, 2], fixed, [4] * 3, lose=False)  # hits on the device and from the host
    _exercise("lazy", [1, 2, 3, 1, 2], fixed, [4] * 3, lose=True)  # evictions, and copies that never end
    _exercise("eager", [1, 2], shared, [6, 13, 20] * 4, lose=False)  # slabs change hands, blocks are moved


_KINDS = ("full", "window", "chunk", "state")


def _bytes() -> None:
    """Calls loops that the toy caches, which have books and no bytes, do not call, and loops of a GPU's engine."""
    from kvtier.cpu_offload.engines._blocks import checksum_blocks, copy_blocks
    from kvtier.cpu_offload.engines.cuda.descriptors import coalesce
    from kvtier.cpu_offload.engines.cuda.driver import copy_each
    from kvtier.remote.sums import copy_words, sum_words

    none, nowhere, memory = np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint8)
    copy_each(0, coalesce(none, none, none, True, none), 0)
    copy_blocks(memory, nowhere, memory, nowhere, nowhere)
    checksum_blocks(memory.view(np.uint64), nowhere, nowhere, none)
    sum_words(none, 0)
    copy_words(none, 0, none)


def _attention() -> None:
    """One query of one head over one key that it has written: calls the loops of attention on a CPU."""
    from kvtier.attention import _decode_loops as loops

    one, none = np.ones(1, np.float32), np.empty(0, np.float32)
    at_one = one.ctypes.data
    sizes = np.ones(len(loops.Size), np.int64)
    table, at, pieces = np.zeros((1, 1), np.int64), np.empty((2, loops.TILE), np.int64), np.empty((1, 4), np.int64)
    loops.write_slots(at_one, at_one, at_one, at_one, np.zeros(1, np.int64), sizes, (1, 1, 1, 1))
    taken, lens = np.empty(1, np.bool_), np.ones(1, np.int64)
    _, count = loops.plan_pieces(pieces, taken, np.arange(2), lens, 0, False)
    means, state = np.empty((1, 1, 1), np.float32), np.empty((1, 1, 2), np.float32)
    room = np.empty(1 + loops.TILE, np.float32)
    arrays = means.reshape(-1), state, at_one, at_one, at_one, table, pieces
    loops.attend_pieces(*arrays, 0, count, sizes, (1, 1), (1.0, 0.0), room, at)
    loops.merge_pieces(np.empty((1, 1, 1), np.float32), means, state, pieces, none)
    _exact_attention(sizes, table, none)


def _rows() -> None:
    """The norm of a row of one number, a head of two that is turned, a gate, and a product of no panels."""
    from kvtier.machine.loops.products import multiplied
    from kvtier.machine.loops.rows import gated, normed, turned

    numbers = np.ones(2, np.float32)
    at = numbers.ctypes.data
    normed(at, at, at, 1, np.float32(1), 0, 1, 1, (0, 0, 0, 0))
    turned(at, at, (at, at), 0, 1, 1, 2, (0,) * 6)
    gated(at, at, 0, 1, 1, np.float32(1), np.float32(0))
    multiplied(at, at, at, 0, at, (0, 1, 1), 0, 0, False)


def _exact_attention(sizes: Any, table: Any, none: Any) -> None:
    """Runs the loops of the exact attention once."""
    from kvtier.attention import _exact_loops as loops
    from kvtier.machine.loops.chains import HEADS, KEYS

    one, cube, pair = np.ones(1, np.float32), np.ones((1, 1, 1), np.float32), np.ones((1, 1, 2), np.float32)
    pieces, at = np.empty((1, 4), np.int64), np.empty((2, loops.SPLIT + KEYS), np.int64)
    loops.plan(pieces, np.arange(2), np.ones(1, np.int64), np.ones(1, np.bool_), 0, False)
    scores, room = np.empty((1, 1, loops.SPLIT), np.float32), np.empty(HEADS * (1 + KEYS), np.float32)
    loops.score(scores, cube, one.ctypes.data, table, pieces, sizes, room, at)
    loops.weigh(scores, pair, np.array([[0, 1]]), np.float32(0))
    loops.mix(cube, scores, one.ctypes.data, table, pieces, sizes, at)
    loops.merge(cube.copy(), pair.copy(), cube, pair, np.zeros(1, np.int64), 0)
    loops.finish(cube, pair, none)


def _toy_spec(with_states: bool) -> CacheSpec:
    """A group of each kind, in blocks of two tokens."""
    from kvtier.geometry.kinds import Attention, ChunkedLocal, FullAttention, Part, RecurrentState, SlidingWindow
    from kvtier.geometry.spec import CacheSpec, GroupSpec

    kinds: tuple[Attention, ...] = FullAttention(), SlidingWindow(4), ChunkedLocal(4)
    groups = [GroupSpec(_KINDS[g], kind, 1 + g, 1, 4, block_tokens=2) for g, kind in enumerate(kinds)]
    if with_states:
        groups.append(GroupSpec("state", RecurrentState((Part("state", (8,), "float32"),)), 1, block_tokens=2))
    return CacheSpec(groups)


def _exercise(store: str, prompts: list[int], memory: dict[str, Any], crowd: list[int], lose: bool) -> None:
    """Serves numbered prompts in turn on pools that hold one of them, then a crowd: prompts of these lengths.

    It is not audited, whatever ``KVTIER_AUDIT`` says: no user's cache is at stake.
    """
    from kvtier.audit.run import AuditLevel
    from kvtier.cache.facade import KVCache
    from kvtier.coordinator.request import Request
    from kvtier.coordinator.scheduler import Scheduler
    from kvtier.cpu_offload.engines.simulated import Faults, SimulatedEngine
    from kvtier.cpu_offload.tier_memory import TierMemory
    from kvtier.pools.changes import changed_keys

    engines: list[SimulatedEngine] = []

    def make_engine(memory: TierMemory) -> SimulatedEngine:
        engines.append(SimulatedEngine(memory, faults=Faults(lose=0.3 if lose else 0.0)))
        return engines[-1]

    spec = _toy_spec(with_states="device_blocks" in memory)  # where slabs are exchanged, blocks of states do not move
    with KVCache(
        spec,
        device="meta",  # without torch
        **memory,
        store=store,
        verify="full",
        deadline_s=4.0,
        copy_engine=make_engine,
    ) as cache:
        cache.core.coordinator.connector.news.logs = False
        cache.checks.level = AuditLevel.OFF
        scheduler = Scheduler(cache, max_batched_tokens=8, max_running=6)

        def serve(*requests: Request) -> None:
            for request in requests:
                scheduler.add(request)
            while scheduler.has_work():
                step = scheduler.schedule()
                for name in spec.names if step.num_tokens else ():
                    view = step.group(name)
                    _ = view.states() if name == "state" else (view.block_table, view.slot_mapping, view.paged())
                scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))

        for i, prompt in enumerate(prompts):
            serve(Request(f"{i}", [prompt] * 10, max_new_tokens=6))
        serve(*(Request(f"crowd {i}", [7 + i] * n, 12) for i, n in enumerate(crowd)))  # some are preempted
        engines[0].end_lost()
        for _ in range(4):
            scheduler.commit(scheduler.schedule(), np.empty(0, np.int64))
        pools = cache.core.coordinator.pools
        meta, blocks, _, ring, *_ = pools.arrays
        n, few = len(blocks), np.empty((2, 1, 2), np.uint64)
        changed_keys(meta, blocks, ring, 0, -1, np.zeros(n, bool), np.zeros((n, 2), np.uint64), *few)
        pools.is_enough(np.zeros(len(spec.names), np.int64))  # asked if stores are in the way
        cache.reset()
