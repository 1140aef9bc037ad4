"""Defect b: a shortage in one group is found when blocks of others have been taken already."""

from __future__ import annotations

import pytest
from breadth import sized
from core.driving import LOAD, assert_same, prompt, scheduled, snapshot
from hypothesis import given, settings, strategies as st

from kvtier import ChunkedLocal, FullAttention, KVCache, Request, Scheduler, SlidingWindow
from kvtier.testing import canary_spec

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(8), 4), "chunk": (ChunkedLocal(8), 4)}
AMPLE = {"full": 64, "win": 64, "chunk": 64}


@pytest.mark.parametrize("short", ["full", "win", "chunk"])
def test_b_a_waiting_request_that_one_group_cannot_serve_changes_nothing(make_serving, short):
    """Another request's load holds the blocks: it cannot be preempted, so the newcomer must wait, with no trace."""
    serving = make_serving(GROUPS, {**AMPLE, short: 4 if short == "full" else 3}, 128, hold=[LOAD])
    long = prompt(1, 12)
    serving.serve("earlier", long, 1)
    for k in range(24):  # push the prefix out of the device
        serving.serve(f"flood {k}", prompt(100 + k, 12), 1)
    serving.add("loading", long, 1)
    assert serving.step().num_tokens == 0
    before = snapshot(serving.cache)
    serving.add("newcomer", prompt(2, 12), 1)
    assert serving.step().num_tokens == 0
    after = snapshot(serving.cache)
    assert after.pop("waiting") == ["newcomer"]
    assert before.pop("waiting") == []
    assert_same(before, after)
    assert short in serving.scheduler.why_waiting()["newcomer"]
    serving.engine.release()
    serving.run()


def test_b_a_running_request_that_one_group_cannot_serve_sits_out_and_takes_nothing_in_the_others(make_serving):
    """A decode needs a block in every group; the window group has none, held by a load that cannot be preempted."""
    serving = make_serving(GROUPS, {"full": 64, "win": 5, "chunk": 64}, 128, hold=[LOAD])
    shared = prompt(1, 9)
    serving.serve("earlier", shared, 1)
    for k in range(24):
        serving.serve(f"flood {k}", prompt(100 + k, 12), 1)
    serving.add("decoding", prompt(2, 7), 12)
    serving.step()
    serving.add("loading", shared, 1)
    serving.steps_until(lambda: serving.is_running("loading") and serving.known("decoding") == 9)
    serving.step()
    before = snapshot(serving.cache)
    assert scheduled(serving.step()) == {}
    assert_same(before, snapshot(serving.cache))
    serving.engine.release()
    serving.run()
    assert serving.finished["decoding"].preemptions == 0


def test_b_a_step_is_short_even_if_the_last_group_lacks_nothing(make_serving):
    """Blocks of the last group are four times as long: most shortages are of the first group alone."""
    groups = {"full": (FullAttention(), 2), "win": (SlidingWindow(8), 8)}
    serving = make_serving(groups, {"full": 6, "win": 16})
    for k in range(2):
        serving.add(str(k), prompt(k, 3), 10)
    serving.run()
    assert serving.finished["1"].preemptions > 0


@settings(max_examples=sized(15, 40))
@given(
    full=st.integers(3, 14),
    win=st.integers(3, 8),
    chunk=st.integers(2, 8),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=2, max_size=6),
    budget=st.integers(1, 40),
)
def test_b_whatever_the_pools_every_request_ends_or_is_refused_and_no_step_raises(full, win, chunk, lengths, budget):
    with KVCache(canary_spec(GROUPS), device_blocks={"full": full, "win": win, "chunk": chunk}) as cache:
        scheduler, expected = Scheduler(cache, max_batched_tokens=budget, max_running=4), set()
        for i, (length, new) in enumerate(lengths):
            request = Request(str(i), prompt(i, length), new)
            if -(-length // 4) <= full:
                scheduler.add(request)
                expected.add(str(i))
        ended = set()
        for _ in range(600):
            if not scheduler.has_work():
                break
            step = scheduler.schedule()
            assert cache.audit() == []
            ended |= {f.request_id for f in scheduler.commit(step, [1] * len(step.sample_rows))}
            assert cache.audit() == []
        assert ended == expected


@pytest.mark.parametrize("short", ["full", "win", "chunk"])
def test_b_a_lone_prompt_runs_on_pools_of_its_peak_need(make_serving, short):
    """Whichever group is the tight one."""
    spec = canary_spec(GROUPS)
    for length in range(1, 41, sized(3, 1)):
        tight = spec.group(short).peak_blocks(length)
        serving = make_serving(GROUPS, {**AMPLE, short: tight}, scheduler={"max_batched_tokens": 64})
        assert serving.serve("lone", prompt(length, length), 1).finish_reason == "length"
