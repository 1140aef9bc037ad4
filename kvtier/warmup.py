"""Compiles the bookkeeping loops before the first request needs them.

Machine code is kept on disk, so only the first process after an installation (or a change of the sources) pays in
full; later ones load it in well under a second.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)

SILENT_S = 3.0
"""Nobody is told of a warm-up that ends sooner."""
NOTICE = "compiling the bookkeeping loops, once after an installation or a change of the sources; some 20 to 60 s"

_seconds: float | None = None
_running = False


def warm_up() -> float:
    """Runs every compiled loop once on toy caches; returns the seconds that took when it was first called."""
    global _seconds, _running
    if _seconds is None and not _running:
        _running = True  # the toy caches come by here again
        start = time.perf_counter()
        notice = threading.Timer(SILENT_S, _log.warning, [NOTICE])
        notice.daemon = True
        notice.start()
        try:
            fixed = {"device_blocks": dict.fromkeys(_KINDS, 8), "host_blocks": dict.fromkeys(_KINDS, 64)}
            _exercise("eager", [1, 2, 1, 1, 2], fixed, [4] * 3, lose=False)  # hits on the device and from the host
            _exercise("lazy", [1, 2, 3, 1, 2], fixed, [4] * 3, lose=True)  # evictions, and copies that never end
            shared = {"device_bytes": 5000, "host_bytes": 10000}
            _exercise("eager", [1, 2], shared, [6, 13, 20] * 4, lose=False)  # slabs change hands, blocks are moved
            _coalesce()
        finally:
            _running = False
            notice.cancel()
            notice.join()
        _seconds = time.perf_counter() - start
    return _seconds or 0.0


_KINDS = ("full", "window", "chunk")


def _coalesce() -> None:
    """What only a GPU's engine calls."""
    from kvtier.cpu_offload.engines.descriptors import coalesce

    none = np.empty(0, np.uint64)
    coalesce(none, none, none, True, none)


def _exercise(store: str, prompts: list[int], memory: dict[str, Any], crowd: list[int], lose: bool) -> None:
    """Serves numbered prompts in turn on pools that hold one of them, then a crowd: prompts of so many tokens."""
    from kvtier.cache import KVCache
    from kvtier.coordinator.request import Request
    from kvtier.coordinator.scheduler import Scheduler
    from kvtier.cpu_offload.engines.simulated import Faults, SimulatedEngine
    from kvtier.cpu_offload.tier_memory import TierMemory
    from kvtier.events import KVEvents
    from kvtier.spec import Attention, CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow

    engines: list[SimulatedEngine] = []

    def make_engine(memory: TierMemory) -> SimulatedEngine:
        engines.append(SimulatedEngine(memory, faults=Faults(lose=0.3 if lose else 0.0)))
        return engines[-1]

    kinds: list[Attention] = [FullAttention(), SlidingWindow(4), ChunkedLocal(4)]
    groups = enumerate(zip(_KINDS, kinds, strict=True))
    spec = CacheSpec([GroupSpec(name, kind, 1 + g, 1, 4, block_tokens=2) for g, (name, kind) in groups])
    with KVCache(
        spec,
        **memory,
        store=store,
        verify="full",
        deadline_s=4.0,
        copy_engine=make_engine,
    ) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=8, max_running=6)

        def serve(*requests: Request) -> None:
            for request in requests:
                scheduler.add(request)
            while scheduler.has_work():
                step = scheduler.schedule()
                for name in _KINDS if step.num_tokens else ():
                    view = step.group(name)
                    _ = view.block_table, view.slot_mapping, view.paged()
                scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))

        for i, prompt in enumerate(prompts):
            serve(Request(f"{i}", [prompt] * 10, max_new_tokens=6))
        serve(*(Request(f"crowd {i}", [7 + i] * n, 12) for i, n in enumerate(crowd)))  # some are preempted
        engines[0].end_lost()
        for _ in range(4):
            scheduler.commit(scheduler.schedule(), np.empty(0, np.int64))
        KVEvents(cache).poll()
        cache.parts[0].pools.is_enough(np.zeros(len(_KINDS), np.int64))  # asked where stores are in the way
        cache.reset()
