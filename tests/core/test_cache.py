"""The facade: devices, views, closing, and life after it."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext

import inside
import pytest

from core.driving import LOAD, STORE, HeldEngine, engine_of, prompt
from kvtier import (
    CacheClosed,
    CacheSpec,
    ConfigError,
    FullAttention,
    GroupSpec,
    KVCache,
    Request,
    Scheduler,
    SlidingWindow,
)
from kvtier.testing import SimulatedEngine, canary_spec

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 8)}


def test_views_have_the_shape_of_the_contract(make_cache):
    spec = CacheSpec([GroupSpec("full", FullAttention(), 3, 2, 8, dtype="bfloat16", block_tokens=16, head_dim_v=4)])
    cache = make_cache(spec, 5)
    for layer in range(3):
        k, v = cache.kv("full", layer)
        assert (k.shape, v.shape) == ((6, 16, 2, 8), (6, 16, 2, 4))
        assert k.device.type == "cpu"
    for bad in (3, -1):
        with pytest.raises(ConfigError, match=r"0\.\.2"):
            cache.kv("full", bad)
    with pytest.raises(ConfigError, match="full"):
        cache.kv("other", 0)


def test_pools_may_have_blocks_of_different_tokens(make_serving):
    groups = {"full": (FullAttention(), 8), "win": (SlidingWindow(6), 4), "small": (SlidingWindow(3), 2)}
    serving = make_serving(groups, 24, 48)
    for k in range(8):
        serving.add(str(k), prompt(k % 3, 9 + 5 * k), 6)
    serving.run()


# --- meta -----------------------------------------------------------------------------------------


def test_a_meta_cache_keeps_the_books_of_a_huge_one_without_memory(make_serving):
    spec = CacheSpec([GroupSpec("full", FullAttention(), 60, 8, 128)])
    serving = make_serving(spec, None, device="meta", device_bytes="80GiB", scheduler={"max_batched_tokens": 8192})
    k, _ = serving.cache.kv("full", 0)
    assert k.device.type == "meta"
    assert k.shape[0] == serving.cache.stats().device["full"].usable + 1
    done = serving.serve("r", prompt(0, 50_000), 2)
    assert done.finish_reason == "length"
    assert serving.serve("again", prompt(0, 50_000), 2).cached_tokens["device"] == 49_984


@pytest.mark.parametrize("engine", [None, SimulatedEngine])
def test_a_meta_cache_simulates_its_host_tier_too(make_serving, engine):
    """Planning and simulation: what is stored and loaded must be counted, though no byte moves."""
    serving = make_serving({"full": (FullAttention(), 4)}, 8, 64, device="meta", copy_engine=engine)
    for name, seed in (("S0", 0), ("S1", 1), ("S0 again", 0)):
        done = serving.serve(name, prompt(seed, 29), 1)
    assert done.cached_tokens["host"] > 0
    assert serving.cache.stats().transfers.failed_stores == 0


# --- closing --------------------------------------------------------------------------------------


def test_after_close_everything_answers_with_cache_closed(make_serving):
    serving = make_serving(GROUPS, 16, 32)
    serving.serve("A", prompt(0, 9), 2)
    serving.cache.close()
    for call in (
        lambda: serving.cache.kv("full", 0),
        lambda: serving.cache.reset(),
        lambda: serving.scheduler.schedule(),
        lambda: serving.scheduler.add(Request("B", [1], 1)),
        lambda: Scheduler(serving.cache),
    ):
        with pytest.raises(CacheClosed):
            call()


def test_close_may_be_called_again_and_by_the_context_manager():
    with KVCache(canary_spec(GROUPS), device_blocks={"full": 4, "win": 4}, host_blocks={"full": 4, "win": 4}) as cache:
        cache.close()
        cache.close()
    with pytest.raises(CacheClosed):
        cache.kv("full", 0)


@pytest.mark.parametrize("first", ["raises", "is too short"])
def test_close_gives_back_later_what_it_could_not_give_back_at_once(first):
    waits = []

    class Reluctant(SimulatedEngine):
        def close(self, timeout_s):
            waits.append(timeout_s)
            if len(waits) == 1 and first == "raises":
                raise RuntimeError("cudaStreamSynchronize")
            return len(waits) > 2 and super().close(timeout_s)

    spec = canary_spec(GROUPS)
    blocks = {"full": 4, "win": 4}
    cache = KVCache(spec, device_blocks=blocks, host_blocks=blocks, copy_engine=Reluctant)
    with pytest.raises(RuntimeError) if first == "raises" else nullcontext():
        cache.close()
    cache.close()
    assert all(arena.has_bytes for arena in cache.arenas), "a copy may still write there"
    cache.close()
    cache.close()
    assert all(not arena.has_bytes for arena in cache.arenas)
    assert waits == [30.0, 0.1, 0.1], "whoever closes it again does not wait again"


@pytest.mark.parametrize("audit", ["0", "2"])
def test_a_step_under_way_at_close_ends_with_cache_closed(make_serving, monkeypatch, audit):
    monkeypatch.setenv("KVTIER_AUDIT", audit)
    serving = make_serving(GROUPS, 16, 32)
    serving.add("A", prompt(0, 9), 2)
    step, ids = serving.begin()
    serving.cache.close()
    for call in (lambda: serving.scheduler.commit(step, ids), lambda: serving.scheduler.cancel(step)):
        with pytest.raises(CacheClosed):
            call()
    serving.scheduler.wait(0.01)


def test_close_is_bounded_with_copies_under_way_and_ends_its_threads():
    before = set(threading.enumerate())
    for _ in range(5):
        with KVCache(
            canary_spec(GROUPS), device_blocks={"full": 64, "win": 64}, host_blocks={"full": 64, "win": 64}
        ) as cache:
            scheduler = Scheduler(cache)
            scheduler.add(Request("A", prompt(0, 60), 1))
            scheduler.commit(scheduler.schedule(), [1])
    assert set(threading.enumerate()) <= before, "by the threads themselves: all engines give them the same names"


def test_a_closed_cache_gives_its_memory_back():
    import gc
    import weakref

    cache = KVCache(canary_spec(GROUPS), device_blocks={"full": 64, "win": 64}, host_blocks={"full": 64, "win": 64})
    storages = [weakref.ref(inside.arena(cache).storage), weakref.ref(inside.host_arena(cache).storage)]
    cache.close()
    gc.collect()
    assert [ref() for ref in storages] == [None, None]


# --- one engine, given ----------------------------------------------------------------------------


def test_a_copy_engine_may_be_given(make_serving):
    serving = make_serving(GROUPS, 8, 32, hold=[])
    assert isinstance(engine_of(serving.cache), HeldEngine)
    serving.serve("A", prompt(0, 17), 1)
    assert {t.direction for t in serving.engine.submitted} == {STORE}
    inside.pools(serving.cache).forget_all()
    serving.serve("A again", prompt(0, 17), 1)
    assert LOAD in {t.direction for t in serving.engine.submitted}


def test_a_cache_without_a_host_tier_never_makes_an_engine(make_cache):
    cache = make_cache(GROUPS, 8, copy_engine=lambda memory: pytest.fail("there is nothing to copy"))
    assert engine_of(cache) is None
    assert cache.stats().host == {}


def test_caches_with_the_same_secret_and_other_models_never_share(make_cache):
    chains = [inside.coordinator(make_cache(GROUPS, 8, model_id=m)).chain for m in ("a", "b", "a")]
    roots = [c.root(None, None, ()).tolist() for c in chains]
    assert roots[0] != roots[1]
    assert roots[0] == roots[2]


def test_warm_up_is_reported(make_cache):
    cache = make_cache(GROUPS, 8)
    assert cache.stats().warmup_s >= 0.0
    assert cache.warmup_s == cache.stats().warmup_s


def test_nothing_depends_on_assertions():
    """Under ``python -O`` assert statements are gone, and with them whatever they did."""
    code = """
import kvtier
spec = kvtier.CacheSpec([kvtier.GroupSpec("full", kvtier.FullAttention(), 1, 1, 8, block_tokens=4)])
with kvtier.KVCache(spec, device="meta", device_blocks={"full": 12}, host_blocks={"full": 32}) as cache:
    scheduler = kvtier.Scheduler(cache, max_batched_tokens=16)
    for k in range(6):
        scheduler.add(kvtier.Request(str(k), range(10 * k, 10 * k + 9), 12))
    while scheduler.has_work():
        step = scheduler.schedule()
        if cache.audit():
            raise SystemExit(str(cache.audit()))
        scheduler.commit(step, [5] * len(step.sample_rows))
"""
    ran = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


def test_public_names_are_exactly_those_that_are_exported():
    import kvtier

    for name in kvtier.__all__:
        assert getattr(kvtier, name).__module__.startswith("kvtier")
    assert {"KVCache", "Scheduler", "Request", "CacheSpec", "GroupSpec", "Shortage", "RequestTooLarge"} <= set(
        kvtier.__all__
    )
