"""Compiles the bookkeeping loops before the first request needs them.

Machine code is kept on disk, so only the first process after an installation (or a change of the sources) pays in
full; later ones load it in well under a second.
"""

from __future__ import annotations

import time

import numpy as np

_seconds: float | None = None


def warm_up() -> float:
    """Runs every compiled loop once on a toy cache; returns the seconds that took when it was first called."""
    global _seconds
    if _seconds is None:
        _seconds = 0.0  # the toy cache comes by here again
        start = time.perf_counter()
        _exercise()
        _seconds = time.perf_counter() - start
    return _seconds


def _exercise() -> None:
    """Two long prompts in turn on pools that hold one: prefill, decode, seal, store, evict, load, preempt."""
    from kvtier.cache import KVCache
    from kvtier.coordinator.request import Request
    from kvtier.coordinator.scheduler import Scheduler
    from kvtier.spec import Attention, CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow

    kinds: dict[str, Attention] = {"full": FullAttention(), "window": SlidingWindow(4), "chunk": ChunkedLocal(4)}
    spec = CacheSpec([GroupSpec(name, kind, 1, 1, 4, block_tokens=2) for name, kind in kinds.items()])
    with KVCache(
        spec, device_blocks=dict.fromkeys(kinds, 8), host_blocks=dict.fromkeys(kinds, 32), store="lazy", verify="full"
    ) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=8, max_running=4)
        prompts = [range(1, 11), range(20, 30), range(1, 11), range(40, 44), range(50, 54), range(60, 64)]
        for i, prompt in enumerate(prompts):
            scheduler.add(Request(str(i), list(prompt), max_new_tokens=5))
        while scheduler.has_work():
            step = scheduler.schedule()
            for name in kinds if step.num_tokens else ():
                view = step.group(name)
                _ = view.block_table, view.slot_mapping, view.paged()
            scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
            if not step.num_tokens:
                scheduler.wait(0.01)
        cache.reset()
