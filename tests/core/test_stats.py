"""Numbers that can be trusted: gauges equal the state, counters never fall, sources add up."""

from __future__ import annotations

import json
import random

import inside
import pytest
from breadth import sample

from core.driving import LOAD, STORE, prompt
from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.pools.block_pool import Col, Place
from kvtier.testing import Faults, SimulatedEngine

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def check_gauges(serving) -> None:
    """Every gauge recomputed from the pools' places."""
    stats = serving.cache.stats()
    for pools, shown in ((inside.pools(serving.cache), stats.device), (inside.host(serving.cache), stats.host)):
        for g, group in enumerate(serving.spec.groups if pools is not None else ()):
            pool, a = shown[group.name], pools.arrays
            places = a.place[int(a.meta[g, 0]) + 1 : int(a.meta[g, 0] + a.meta[g, 1])]
            counted = {place: int((places == place).sum()) for place in Place}
            assert pool.usable == len(places) == pool.empty + pool.cached + pool.fenced + pool.held + pool.quarantined
            assert (pool.empty, pool.cached, pool.fenced) == (
                counted[Place.EMPTY],
                counted[Place.CACHED],
                counted[Place.FENCED],
            )
            assert (pool.held, pool.quarantined) == (counted[Place.HELD], counted[Place.QUARANTINED])
            assert min(pool.empty, pool.cached, pool.fenced, pool.held, pool.quarantined, pool.evicted) >= 0
    assert stats.requests["running"] == len(serving.scheduler.running)
    assert stats.transfers.live == len(inside.connector(serving.cache).ledger.live())


@pytest.mark.parametrize("seed", sample(range(4), range(2)))
def test_gauges_equal_the_state_and_counters_never_fall(make_serving, seed):
    rnd = random.Random(seed)
    engine = lambda memory: SimulatedEngine(memory, seed, Faults(fail=0.1, lose=0.05, max_delay_s=5.0))  # noqa: E731
    serving = make_serving(
        GROUPS, {"full": 12, "win": 7, "chunk": 7}, 30, copy_engine=engine, store=("eager", "lazy")[seed % 2]
    )
    last: dict[str, int] = {}
    for k in range(60):
        if k < 40 and rnd.random() < 0.5:
            serving.add(f"r{k}", prompt(k % 4, rnd.randint(1, 30)), rnd.randint(1, 8))
        if rnd.random() < 0.1:
            serving.scheduler.abort(f"r{rnd.randrange(k + 1)}")
        step, ids = serving.begin()
        check_gauges(serving)
        serving.end(step, ids)
        check_gauges(serving)
        stats = serving.cache.stats()
        now = {f"transfers.{n}": v for n, v in vars(stats.transfers).items() if n != "live"}
        now |= {f"tokens.{n}": v for n, v in stats.prompt_tokens.items()}
        now |= {n: stats.requests[n] for n in ("finished", "preemptions")}
        now |= {
            f"{t}.{n}": getattr(p, f)
            for t, s in (("d", stats.device), ("h", stats.host))
            for n, p in s.items()
            for f in ("evicted",)
        }
        assert all(now[name] >= value for name, value in last.items()), "a counter fell"
        last = now
    while serving.scheduler.has_work() or serving.cache.stats().transfers.live:
        serving.engine.end_lost()  # overdue copies are not waited for; here they end after all
        serving.step()
    serving.run()


def test_prompt_tokens_by_source_add_up_to_the_prompts(make_serving):
    serving = make_serving(GROUPS, 24, 64, hold=[])
    lengths = [25, 25, 9, 31]
    serving.serve("computed", prompt(0, 25), 2)
    serving.serve("device", prompt(0, 25), 2)
    serving.serve("short", prompt(1, 9), 2)
    inside.pools(serving.cache).forget_all()
    serving.serve("host", [*prompt(0, 25), *prompt(3, 6)], 2)
    assert serving.cache.stats().prompt_tokens == {"device": 24, "host": 24, "computed": sum(lengths) - 48}


def test_a_token_counts_as_host_if_any_group_had_to_load_a_block_for_it(make_serving):
    """The full group is on the device, the window is not: only what the window needs counts as host."""
    serving = make_serving({"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}, 24, 64, hold=[])
    serving.serve("before", prompt(0, 25), 1)
    pools = inside.pools(serving.cache)
    import numpy as np

    pools.unpublish(np.ones(24, np.int32), np.arange(1, 25, dtype=np.int32))
    done = serving.serve("again", prompt(0, 25), 1)
    assert done.cached_tokens == {"device": 16, "host": 8}


def test_cached_tokens_are_those_of_the_first_admission(make_serving):
    serving = make_serving(GROUPS, 24, 64, hold=[])
    serving.add("A", prompt(0, 25), 4)
    serving.step()
    serving.cancelled()
    done = serving.run()["A"]
    assert done.cached_tokens == {"device": 0, "host": 0}
    assert done.preemptions == 1


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 24, 25])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_second_request_reports_its_hit_exactly(make_serving, length, tier):
    serving = make_serving(GROUPS, 24, 64, hold=[])
    serving.serve("one", prompt(0, length), 1)
    if tier == "host":
        inside.pools(serving.cache).forget_all()
    other = {"device": "host", "host": "device"}[tier]
    done = serving.serve("two", prompt(0, length), 1)
    assert done.cached_tokens == {tier: (length - 1) // 4 * 4, other: 0}


def test_a_load_is_counted_once_in_blocks_and_bytes(make_serving):
    serving = make_serving(FULL, 24, 64, hold=[])
    serving.serve("before", prompt(0, 25), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, 25), 1)
    serving.step()
    assert serving.cache.stats().transfers.loaded_blocks == 0
    assert serving.cache.stats().transfers.live == 1
    serving.engine.release()
    serving.run()
    transfers = serving.cache.stats().transfers
    assert (transfers.loaded_blocks, transfers.loaded_bytes) == (
        6,
        6 * serving.cache.stats().device["full"].block_bytes,
    )
    assert transfers.live == 0


def test_fenced_blocks_are_neither_held_nor_clean(make_serving):
    serving = make_serving(FULL, 24, 64, hold=[STORE])
    serving.add("A", prompt(0, 25), 1)
    serving.step()
    pool = serving.cache.stats().device["full"]
    assert (pool.fenced, pool.held, pool.cached, pool.empty) == (6, 0, 0, 18)
    serving.engine.release()
    serving.run()


def test_evictions_and_the_peak_are_counted(make_serving):
    serving = make_serving(FULL, 8)
    serving.serve("A", prompt(0, 29), 1)
    assert serving.cache.stats().device["full"].peak_held == 8
    serving.serve("B", prompt(1, 13), 1)
    assert serving.cache.stats().device["full"].evicted == 3


def test_capacity_is_what_one_context_can_fill(make_cache):
    stats = make_cache(GROUPS, {"full": 10, "win": 4, "chunk": 4}, {"full": 20, "win": 4, "chunk": 4}).stats()
    assert stats.device_capacity_tokens == 40
    assert stats.host_capacity_tokens == 80
    assert make_cache(GROUPS, {"full": 100, "win": 2, "chunk": 4}).stats().device_capacity_tokens < 12
    assert make_cache(FULL, 10).stats().host_capacity_tokens == 0


def test_stats_are_plain_values_ready_for_json(make_serving):
    serving = make_serving(GROUPS, 24, 64)
    serving.serve("A", prompt(0, 25), 2)
    text = json.dumps(serving.cache.stats().to_dict())
    assert json.loads(text)["device"]["full"]["usable"] == 24


def test_a_cache_without_a_scheduler_has_stats(make_cache):
    stats = make_cache(GROUPS, 8).stats()
    assert stats.requests == {"waiting": 0, "running": 0, "finished": 0, "preemptions": 0}
    assert stats.prompt_tokens == {"device": 0, "host": 0, "computed": 0}


def test_requests_are_counted_where_they_stand(make_serving):
    serving = make_serving(FULL, 8, scheduler={"max_running": 1})
    for k in range(3):
        serving.add(str(k), prompt(k, 9), 2)
    assert serving.cache.stats().requests["waiting"] == 3
    serving.step()
    requests = serving.cache.stats().requests
    assert (requests["waiting"], requests["running"], requests["finished"]) == (2, 1, 0)
    serving.run()
    assert serving.cache.stats().requests["finished"] == 3


@pytest.mark.parametrize(("held", "cached"), [(3, 2), (9, 9), (-1, 4), (0, 99)])
def test_a_snapshot_adds_up_even_if_its_numbers_are_of_different_moments(make_cache, unaudited, held, cached):
    """Another thread asks in the midst of a step."""
    cache = make_cache(FULL, 10)
    meta = inside.pools(cache).arrays.meta
    before = meta.copy()
    meta[0, Col.HELD], meta[0, Col.CACHED] = held, cached
    pool = cache.stats().device["full"]
    parts = (pool.empty, pool.cached, pool.fenced, pool.held, pool.quarantined, pool.lent)
    assert sum(parts) == pool.usable == 10
    assert min(parts) >= 0
    meta[:] = before
