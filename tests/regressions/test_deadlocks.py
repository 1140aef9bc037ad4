"""Known deadlocks and livelocks of other engines, with the numbers of their reports where there are any."""

from __future__ import annotations

import inside
import pytest
from breadth import sample, sized
from core.driving import LOAD, prompt, scheduled
from hypothesis import given, settings, strategies as st

from kvtier import ChunkedLocal, FullAttention, GroupSpec, KVCache, Request, RequestTooLarge, Scheduler, SlidingWindow
from kvtier.geometry.spec import CacheSpec
from kvtier.testing import Faults, SimulatedEngine, canary_spec, expected_tokens

FULL = {"full": (FullAttention(), 16)}
GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def on_host(serving, name: str, tokens: list[int], flood: int) -> None:
    """Brings a prefix to the host tier only: serves it, then floods the device."""
    serving.serve(f"{name} before", tokens, 1)
    serving.serve(f"{name} flood", prompt(hash_of(name), flood), 1)


def hash_of(name: str) -> int:
    return 1000 + sum(name.encode())


def meta_serving(make_serving, blocks: int, host: int, **options):
    spec = CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 8)])
    limits = {"max_batched_tokens": 8192, "max_running": 8, "audit_every": 16}
    return make_serving(spec, blocks, host, hold=[], device="meta", scheduler=limits, **options)


def test_two_parked_loads_do_not_hold_the_blocks_that_the_first_of_them_needs(make_serving):
    """2,048 blocks; 25,596 tokens with 8,192 in the host tier, and 19,196 with 11,776: each fits alone, not both."""
    serving = meta_serving(make_serving, 2048, 8192)
    a, b = prompt(1, 25_596), prompt(2, 19_196)
    on_host(serving, "A", a[:8193], 32_700)
    on_host(serving, "B", b[:11_777], 32_700)
    serving.engine.hold = {LOAD}
    serving.add("A1", a, 4)
    serving.add("B1", b, 4)
    serving.step()
    serving.step()
    assert serving.is_running("A1")
    assert not serving.is_running("B1"), "its blocks would be those that A1 needs after its load"
    serving.engine.release()
    serving.run()
    assert serving.finished["A1"].cached_tokens["host"] == 8192
    assert serving.finished["B1"].cached_tokens["host"] == 11_776
    assert serving.finished["A1"].preemptions == 0


@pytest.mark.parametrize("engine", ["held", "threads"])
def test_two_parked_loads_on_twelve_blocks(make_serving, engine):
    """The same in small: 12 blocks, requests that need 9 and 7, of which 3 and 4 are in the host tier."""
    groups = {"full": (FullAttention(), 4)}
    serving = make_serving(groups, 12, 64, **({"hold": []} if engine == "held" else {}))
    a, b = prompt(1, 33), prompt(2, 25)
    on_host(serving, "A", a[:13], 45)
    on_host(serving, "B", b[:17], 45)
    serving.add("A1", a, 3)
    serving.add("B1", b, 3)
    serving.run()
    assert serving.finished["A1"].cached_tokens["host"] == 12
    assert serving.finished["B1"].cached_tokens["host"] == 16


def that_loads_a_long_prompt(make_serving):
    """270 blocks; L: 4,080 tokens, 4,000 of them are being loaded."""
    serving = meta_serving(make_serving, 270, 600)
    long = prompt(1, 4080)
    on_host(serving, "L", long[:4001], 4300)
    serving.engine.hold = {LOAD}
    serving.add("L", long, 16)
    serving.step()
    return serving


@pytest.mark.parametrize("priority", [0, -1])
def test_a_finished_load_is_not_stranded_behind_a_head_that_does_not_fit(make_serving, priority):
    """H: 1,600 tokens, holds nothing; W: 160 tokens."""
    serving = that_loads_a_long_prompt(make_serving)
    serving.add("H", prompt(2, 1600), 4, priority=priority)
    serving.add("W", prompt(3, 160), 4)
    serving.step()
    serving.engine.release()
    assert "L" in scheduled(serving.step()), "it holds blocks and its load is complete"
    serving.run()
    assert {serving.finished[name].finish_reason for name in "LHW"} == {"length"}


def test_a_failed_load_is_not_stranded_behind_a_head_that_does_not_fit(make_serving):
    serving = that_loads_a_long_prompt(make_serving)
    serving.add("H", prompt(2, 1600), 4)
    serving.engine.end(error="no link")
    serving.engine.hold = set()
    serving.run()
    assert {serving.finished[name].finish_reason for name in "LH"} == {"length"}


def test_two_admissions_that_need_one_block_more_later_both_end(make_serving):
    """7 blocks; A needs 4 and one more, B needs 3 and one more."""
    serving = make_serving({"full": (FullAttention(), 4)}, 7)
    serving.add("A", prompt(1, 15), 5)
    serving.add("B", prompt(2, 11), 5)
    serving.run()
    assert {done.finish_reason for done in serving.finished.values()} == {"length"}


def test_sharers_are_preempted_as_a_set_when_neither_alone_frees_a_block(make_serving):
    """102 blocks: A owns 2; B and C share the other 100, and all need one more.

    C's prompt is B's with its first token of text, so both fill the 100th block in one step, and they merge there.
    """
    serving = make_serving({"full": (FullAttention(), 4)}, 102, scheduler={"max_batched_tokens": 512})
    shared = prompt(2, 397)
    serving.add("A", prompt(1, 1), 12)
    serving.add("B", shared, 12)
    serving.step()
    serving.add("C", [*shared, *expected_tokens(serving.spec, shared, 1)], 11)
    serving.steps_until(lambda: serving.known("A") == 9)
    rows = {s.request.request_id: s.row for s in serving.scheduler.running}
    tables = inside.coordinator(serving.cache).tables
    held = {name: set(tables.table(0)[row, : tables.arrays.hi[0, row]].tolist()) for name, row in rows.items()}
    assert held["B"] == held["C"]
    assert (len(held["A"]), len(held["B"]), len(held["A"] | held["B"])) == (2, 100, 102)
    known = {name: serving.known(name) for name in "ABC"}
    assert known == {"A": 9, "B": 401, "C": 401}, "all need one more"
    assert serving.scheduler.reports.num_preemptions == 0
    assert scheduled(serving.step()) == {"A": 1}
    assert serving.scheduler.reports.num_preemptions == 2, "B and C go together or not at all"
    serving.run()
    assert {done.finish_reason for done in serving.finished.values()} == {"length"}
    assert serving.finished["A"].preemptions == 0
    assert max(done.preemptions for done in serving.finished.values()) <= 2


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("extra", [-1, 0, 1, 4])
def test_a_prompt_at_the_edge_of_the_pool_runs_or_is_refused_and_never_hangs(make_serving, n, extra):
    """n rows, one of which is the null block: prompts of (n - 1) * bt - 1, (n - 1) * bt, (n - 1) * bt + 1, n * bt."""
    serving = make_serving({"full": (FullAttention(), 4)}, n - 1)
    length = (n - 1) * 4 + extra
    if extra > 0:
        with pytest.raises(RequestTooLarge) as refused:
            serving.add("edge", prompt(1, length), 1)
        assert refused.value.needs == {"full": n}
        assert refused.value.have == {"full": n - 1}
    else:
        assert serving.serve("edge", prompt(1, length), 1).finish_reason == "length"
    assert serving.serve("next", prompt(2, 3), 1).finish_reason == "length"


def test_a_request_that_outgrows_the_pool_alone_ends_with_capacity_and_keeps_its_tokens(make_serving):
    for groups, blocks in (({"full": (FullAttention(), 4)}, 3), (GROUPS, {"full": 3, "win": 8, "chunk": 8})):
        serving = make_serving(groups, blocks)
        done = serving.serve("grows", prompt(1, 5), 100)
        assert done.finish_reason == "capacity"
        assert len(done.token_ids) == 8
        assert done.preemptions == 0


def test_a_request_that_outgrew_the_pool_while_preempted_ends_with_capacity(make_serving):
    serving = make_serving({"full": (FullAttention(), 4)}, 6)
    serving.add("first", prompt(1, 9), 8)
    serving.add("second", prompt(2, 9), 100)
    done = serving.run()
    assert done["first"].finish_reason == "length"
    assert done["second"].finish_reason == "capacity"
    assert len(done["second"].token_ids) == 24 - 9 + 1


@pytest.mark.parametrize("store", sample(["off", "eager", "lazy"], ["lazy"]))
def test_preemptions_per_request_stay_few_under_heavy_overload(make_serving, store):
    """A healthy engine preempts a request at most about four times; ping-pong shows as hundreds."""
    serving = make_serving(GROUPS, {"full": 20, "win": 9, "chunk": 9}, 200, store=store)
    for k in range(10):
        serving.add(f"r{k}", prompt(k, 9), 24)
    serving.run()
    assert max(done.preemptions for done in serving.finished.values()) <= 4


def test_an_idle_engine_with_a_free_pool_never_leaves_a_request_waiting(make_serving):
    serving = make_serving(GROUPS, {"full": 12, "win": 6, "chunk": 6}, 40)
    for k in range(20):
        serving.add(f"r{k}", prompt(k % 5, 6 + 2 * k % 30), 4)
        before = serving.cache.stats().transfers
        step = serving.step()
        after = serving.cache.stats().transfers
        assert step.num_tokens or after.live or after != before or not serving.scheduler.num_waiting
    serving.run()


def test_loads_that_together_exceed_the_pool_are_not_all_half_allocated(make_serving):
    serving = make_serving({"full": (FullAttention(), 4)}, 12, 200, hold=[])
    for k in range(4):
        serving.serve(f"before {k}", prompt(k, 29), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    for k in range(4):
        serving.add(f"again {k}", prompt(k, 29), 8)
    serving.step()
    assert len(serving.engine.live) == 1
    serving.engine.release()
    serving.run()


def test_hundreds_of_aborted_loads_leak_nothing(make_serving, unaudited):
    serving = make_serving({"full": (FullAttention(), 4)}, 16, 64, hold=[], scheduler={"audit_every": 50})
    tokens = prompt(1, 29)
    serving.serve("before", tokens, 1)
    for k in range(sized(200, 1000)):
        inside.pools(serving.cache).forget_all()
        serving.engine.hold = {LOAD}
        serving.add(f"r{k}", tokens, 1)
        serving.step()
        assert serving.scheduler.abort(f"r{k}")
        if k % 2:
            serving.step()
        serving.engine.release()
        serving.run()
    assert serving.serve("whole pool", prompt(2, 64), 1).finish_reason == "length"


def test_the_host_tier_still_serves_after_many_times_its_size_has_passed_through(make_serving):
    serving = make_serving({"full": (FullAttention(), 4)}, 8, 10)
    for k in range(100):
        serving.serve(f"r{k}", prompt(k, 21), 1)
    serving.serve("again", prompt(98, 21), 1)
    assert sum(serving.finished["again"].cached_tokens.values()) > 0


def test_a_lone_request_whose_load_fails_ends_without_any_other_event(make_serving):
    serving = make_serving({"full": (FullAttention(), 4)}, 16, 64, hold=[])
    serving.serve("before", prompt(1, 29), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(1, 29), 3)
    serving.step()
    serving.engine.end(error="no link")
    serving.engine.hold = set()
    assert serving.run(limit=10)["again"].finish_reason == "length"


@settings(max_examples=sized(8, 30))
@given(seed=st.integers(0, 10_000), fail=st.sampled_from([0.0, 0.3, 1.0]))
def test_every_mix_of_requests_ends_within_a_bounded_number_of_steps(seed, fail):
    engine = lambda memory: SimulatedEngine(memory, seed, Faults(fail=fail, max_delay_s=4.0))  # noqa: E731
    sizes = {"full": 9, "win": 5, "chunk": 5}
    with KVCache(canary_spec(GROUPS), device_blocks=sizes, host_blocks=sizes, copy_engine=engine) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=7, max_running=4)
        for k in range(6):
            scheduler.add(Request(str(k), prompt((seed + k) % 4, 5 + (seed * k) % 28), 6, priority=k % 2))
        ended, steps = set(), 0
        while scheduler.has_work():
            steps += 1
            assert steps < 400, scheduler.why_waiting()
            step = scheduler.schedule()
            ended |= {f.request_id for f in scheduler.commit(step, [3] * len(step.sample_rows))}
        assert len(ended) == 6
