"""Another engine over a world's store: all that it knows of a text, it has from there."""

from __future__ import annotations

from collections import Counter

from core.driving import HeldEngine, check_text

from kvtier import CacheSpec, KVCache, Request, Scheduler
from kvtier.audit.run import AuditLevel
from kvtier.testing import CanaryEngine

from .played_backend import PlayedBackend, Shelf

NAMES = {"model_id": "world", "key_secret": b"world"}
"""Of all caches of a world: who has the same shares their objects."""
MOST_STEPS = 500


def another_engine_serves(spec: CacheSpec, request: Request, shelf: Shelf) -> Counter[str]:
    """Serves a request, leaves what it computed in the store, and ends. Its calls end at once, nearly all well."""
    roomy = dict.fromkeys(spec.names, 40)
    cache = KVCache(
        spec,
        device_blocks=roomy,
        host_blocks=roomy,
        copy_engine=lambda memory: HeldEngine(memory, hold=()),
        remote_uri=PlayedBackend(shelf, quick=1.0),
        **NAMES,
    )
    cache.checks.level = AuditLevel.OFF
    scheduler, canary, finished = Scheduler(cache), CanaryEngine(cache), []
    canary.add(request)
    scheduler.add(request)
    for _ in range(MOST_STEPS):
        if not scheduler.has_work():
            break
        step = scheduler.schedule()
        finished += scheduler.commit(step, canary.forward(step))
    assert not scheduler.has_work(), scheduler.why_waiting()
    [done] = finished
    assert done.finish_reason == "length", done
    check_text(cache, request, done)
    assert cache.audit() == []
    stats = cache.stats().remote
    cache.close()
    names = ("spilled_objects", "fetched_objects", "missed_objects", "damaged_objects")
    seen = Counter({f"store: {name}": getattr(stats, name) for name in names})
    return seen + Counter({"prompt tokens from store": done.cached_tokens["remote"], "engines elsewhere": 1})
