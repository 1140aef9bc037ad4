"""Where the tests of the audit plant damage: a cache with blocks in every place, and ways to find some of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import inside
import numpy as np

from core.driving import LOAD, STORE, HeldEngine, Serving, prompt
from kvtier import ChunkedLocal, FullAttention, KVCache, SlidingWindow
from kvtier.cpu_offload.transfer import Transfer
from kvtier.pools.block_pool import Col, Place
from kvtier.testing import canary_spec

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


@contextmanager
def busy() -> Iterator[Serving]:
    """Blocks in every place: two requests run, a load and a store are under way, others wait, content is cached."""
    sizes = dict.fromkeys(GROUPS, 24)
    with KVCache(
        canary_spec(GROUPS),
        device_blocks=sizes,
        host_blocks=sizes,
        copy_engine=lambda memory: HeldEngine(memory, []),
    ) as cache:
        made = Serving(cache, max_batched_tokens=64)
        made.serve("hosted", prompt(0, 17), 1)
        inside.pools(cache).forget_all()
        made.serve("cached", prompt(1, 13), 1)
        made.engine.hold = {LOAD, STORE}
        made.add("A", prompt(2, 14), 20)
        made.add("B", prompt(3, 14), 20)
        made.step()
        made.add("loading", prompt(0, 17), 3)
        made.add("ended", prompt(4, 13), 1)
        made.step()
        made.step()
        made.add("too large for now", prompt(5, 60), 1)
        made.step()
        assert cache.audit() == []
        yield made


def entry(serving: Serving, place: Place, tier: str = "device", g: int = 0) -> int:
    """Some entry of the flat arrays in this place."""
    pools = inside.pools(serving.cache) if tier == "device" else inside.host(serving.cache)
    base, rows = int(pools.arrays.meta[g, Col.BASE]), int(pools.arrays.meta[g, Col.ROWS])
    return base + int(np.flatnonzero(pools.arrays.place[base : base + rows] == place)[0])


def row_of(serving: Serving, name: str = "A") -> int:
    """The row of a running request."""
    return next(s.row for s in serving.scheduler.running if s.request.request_id == name)


def a_store(serving: Serving) -> Transfer:
    """A store under way."""
    return next(t for t in inside.connector(serving.cache).ledger.live() if t.direction is STORE)


def a_load(serving: Serving) -> Transfer:
    """The load under way."""
    return next(t for t in inside.connector(serving.cache).ledger.live() if t.direction is LOAD)


def assert_seen(plant: Callable[[Serving], None], checks: list[str]) -> None:
    """The audit of a busy cache reports what ``plant`` does to it, by all of these checks."""
    with busy() as serving:
        plant(serving)
        assert_reported(serving.cache, *checks)


def assert_reported(cache: KVCache, *checks: str) -> None:
    """Each check, an invariant's number and words of what is said of it, has found something."""
    found = cache.audit()
    for check in checks:
        invariant, words = check.split(" ", 1)
        assert any(v.invariant == invariant and words in v.detail for v in found), (check, found)
