"""Defect a: a second long request arrives while the stores of the first are in flight, and the allocator crashes."""

from __future__ import annotations

import pytest
from core.driving import LOAD, STORE, prompt, scheduled

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvtier.testing import Faults, SimulatedEngine

TOKENS = 90_112
POOL_TOKENS = 145_024
KINDS = {"full": (FullAttention(), 4), "win": (SlidingWindow(10), 4), "chunk": (ChunkedLocal(16), 4)}


def long_spec() -> CacheSpec:
    """Block sizes of a real hybrid model: its stores exceed what may be in flight at once."""
    return CacheSpec(
        [
            GroupSpec("full", FullAttention(), 4, 4, 128),
            GroupSpec("win", SlidingWindow(1024), 12, 4, 128),
            GroupSpec("chunk", ChunkedLocal(8192), 8, 4, 128),
        ]
    )


@pytest.fixture
def long_serving(make_serving):
    blocks = {"full": POOL_TOKENS // 16, "win": 1024, "chunk": 1280}
    host = {"full": 2 * TOKENS // 16 + 64, "win": 512, "chunk": 1280}

    def make(**options):
        limits = {"max_batched_tokens": 8192, "max_running": 4, "audit_every": 8}
        return make_serving(long_spec(), blocks, host, device="meta", scheduler=limits, **options)

    return make


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a_second_long_request_runs_while_stores_of_the_first_are_in_flight(long_serving, store):
    serving = long_serving(hold=[STORE], store=store)
    serving.add("S0", prompt(0, TOKENS), 4)
    serving.steps_until(lambda: "S0" in serving.finished)
    serving.add("S1", prompt(1, TOKENS), 4)
    serving.steps_until(lambda: "S1" in serving.finished, limit=40)
    assert serving.finished["S1"].finish_reason == "length"
    assert serving.finished["S1"].preemptions == 0
    assert serving.cache.stats().transfers.live > 0, "the stores were to be under way all the while"
    serving.engine.release()
    serving.run()


def test_a_third_long_request_finds_the_first_one_in_the_host_tier(long_serving):
    serving = long_serving(hold=[])
    for name, seed in (("S0", 0), ("S1", 1), ("S0 again", 0)):
        done = serving.serve(name, prompt(seed, TOKENS), 4)
    assert done.cached_tokens["host"] > 0
    assert sum(done.cached_tokens.values()) == TOKENS - 16


def test_a_long_request_arrives_in_every_step_of_the_first(long_serving):
    serving = long_serving(hold=[STORE])
    serving.add("S0", prompt(0, TOKENS), 4)
    for k in range(12):
        serving.add(f"T{k}", prompt(1 + k, 4096), 2)
        serving.step()
    serving.engine.release()
    serving.run()
    assert all(done.finish_reason == "length" for done in serving.finished.values())


def test_a_text_of_the_second_request_is_right_though_it_overwrites_blocks_being_stored(make_serving):
    serving = make_serving(KINDS, {"full": 110, "win": 24, "chunk": 24}, 256, hold=[STORE])
    serving.add("S0", prompt(0, 300), 6)
    serving.steps_until(lambda: "S0" in serving.finished)
    serving.add("S1", prompt(1, 300), 6)
    serving.steps_until(lambda: "S1" in serving.finished)
    assert serving.engine.ordered, "S1's blocks were to be behind the stores"
    serving.engine.release()
    serving.run()
    assert serving.serve("S0 again", prompt(0, 300), 6).cached_tokens["host"] > 0


@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("engine", [None, lambda memory: SimulatedEngine(memory, 7, Faults(max_delay_s=40.0))])
def test_a_back_to_back_texts_are_right_on_real_and_simulated_engines(make_serving, engine, store):
    serving = make_serving(
        KINDS,
        {"full": 110, "win": 30, "chunk": 30},
        256,
        copy_engine=engine,
        store=store,
        verify="full",
        deadline_s=1e6,
    )
    for name, seed in (("S0", 0), ("S1", 1), ("S0 again", 0), ("S1 again", 1)):
        serving.serve(name, prompt(seed, 300), 6)
    assert serving.finished["S0 again"].cached_tokens["host"] > 0


def test_a_block_is_fenced_and_unfenced_once_per_store_and_no_key_is_stored_twice(make_serving):
    """A window row recycles blocks, and two requests share one: each copy still names each block and key once."""
    serving = make_serving(KINDS, 60, 200, hold=[STORE])
    serving.add("A", prompt(3, 60), 3)
    serving.steps_until(lambda: "A" in serving.finished)
    serving.add("B", prompt(3, 60), 3)
    serving.steps_until(lambda: "B" in serving.finished)
    keys = [(int(g), k.tobytes()) for t in serving.engine.submitted for g, k in zip(t.groups, t.keys, strict=True)]
    assert len(keys) == len(set(keys)), "a key was stored twice"
    for t in serving.engine.submitted:
        assert len(set(zip(t.groups.tolist(), t.device.tolist(), strict=True))) == len(t.groups)
    serving.engine.release()
    serving.run()


def test_a_request_that_hits_blocks_still_being_stored_does_not_wait_for_the_store(make_serving):
    """The blocks it hits need no writer behind the store, and two empty ones are enough for the rest."""
    serving = make_serving(blocks=8, host=32, hold=[STORE])
    turn = prompt(0, 24)
    serving.add("first turn", turn, 1)
    serving.step()
    assert serving.cache.stats().device["full"].fenced == 6
    serving.add("second turn", [*turn, 1, 2], 1)
    step = serving.step()
    assert scheduled(step) == {"second turn": 2}
    assert serving.engine.ordered == [], "nothing was to be overwritten"
    serving.engine.release()
    serving.run()


def test_a_store_that_never_ends_costs_its_blocks_until_the_deadline_and_no_request(make_serving):
    serving = make_serving(blocks=16, host=32, hold=[STORE], deadline_s=5.0)
    serving.engine.can_order = False
    serving.add("S0", prompt(0, 40), 1)
    serving.step()
    serving.add("S1", prompt(1, 24), 1)
    serving.steps_until(lambda: "S1" in serving.finished)
    assert serving.finished["S1"].finish_reason == "length"
    serving.engine.end(error="late")
    serving.engine.release()
    serving.run()
    assert {LOAD, STORE} >= {t.direction for t in serving.engine.submitted}
