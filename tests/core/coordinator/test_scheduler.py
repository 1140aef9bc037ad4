"""Steps in order: each is committed or cancelled before the next, and one scheduler drives a cache."""

from __future__ import annotations

import inside
import numpy as np
import pytest

from core.driving import STORE, prompt
from core.slabs import shared_serving
from kvtier import (
    ChunkedLocal,
    FullAttention,
    Request,
    Scheduler,
    SlidingWindow,
    StepError,
)
from kvtier.testing import canary_spec

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def test_a_step_must_be_committed_or_cancelled_before_the_next(make_serving):
    serving = make_serving(FULL)
    serving.add("A", prompt(0, 5), 2)
    step, ids = serving.begin()
    with pytest.raises(StepError, match="commit"):
        serving.scheduler.schedule()
    serving.end(step, ids)
    for call in (lambda: serving.scheduler.commit(step, ids), lambda: serving.scheduler.cancel(step)):
        with pytest.raises(StepError):
            call()
    serving.run()


@pytest.mark.parametrize(
    "ids", [[], [1, 2], [[1]], [1.0], [-1], [2**31], ["1"], [True], [None], None, 5, [2**70]], ids=str
)
def test_wrong_ids_are_refused_and_nothing_has_changed(make_serving, ids):
    from core.driving import assert_same, snapshot

    serving = make_serving(GROUPS, 16, 32, hold=[STORE])
    serving.add("A", prompt(0, 9), 3)
    step, good = serving.begin()
    before = snapshot(serving.cache)
    with pytest.raises(StepError):
        serving.scheduler.commit(step, ids)
    assert_same(before, snapshot(serving.cache))
    serving.end(step, good)
    serving.engine.release()
    serving.run()


def test_a_step_of_another_scheduler_is_refused(make_serving):
    one, two = make_serving(FULL), make_serving(FULL)
    for serving in (one, two):
        serving.add("A", prompt(0, 5), 2)
    (step, ids), (other, _) = one.begin(), two.begin()
    for bad in (other, None, "step"):
        with pytest.raises(StepError):
            one.scheduler.commit(bad, ids)
        with pytest.raises(StepError):
            one.scheduler.cancel(bad)
    one.end(step, ids)
    two.scheduler.cancel(other)
    one.run()
    two.run()


def test_ids_may_be_any_array_like_of_ints(make_serving):
    for make in (list, tuple, np.array, lambda x: np.array(x, np.int32), lambda x: np.array(x, np.uint8)):
        serving = make_serving(FULL)
        serving.add("A", prompt(0, 5), 2)
        while serving.scheduler.has_work():
            step, ids = serving.begin()
            serving.end(step, make(ids.tolist()))


def test_a_second_scheduler_is_refused_while_the_first_has_work(make_serving):
    serving = make_serving(FULL)
    serving.add("A", prompt(0, 5), 2)
    with pytest.raises(StepError, match="scheduler"):
        Scheduler(serving.cache)
    serving.run()
    Scheduler(serving.cache)


def test_a_request_that_was_aborted_is_reported_so_though_its_cancelled_step_would_end_it(make_cache):
    """Where groups share an arena a text may outgrow what would be admitted, and go on."""
    spec = canary_spec({"full": (FullAttention(), 4), "chunk": (ChunkedLocal(32), 4)})
    for end, reason in (("abort", "abort"), ("finish", "stop"), ("has_work", "capacity")):
        serving = shared_serving(make_cache, spec, 24)
        serving.add("A", prompt(0, 60), 20)
        serving.steps_until(lambda serving=serving: serving.known("A") == 68)
        step, _ = serving.begin()
        assert not inside.coordinator(serving.cache).room.can_come_back(serving.scheduler.running[0].row)
        getattr(serving.scheduler, end)(*["A"] * (end != "has_work"))
        serving.scheduler.cancel(step)
        serving.run()
        assert serving.finished["A"].finish_reason == reason
        assert len(serving.finished["A"].token_ids) == 8
        serving.check_quiet()


def test_texts_that_outgrow_the_tables_in_steps_too_small_for_all_do_not_run_into_each_other(make_serving):
    serving = make_serving(FULL, 400, scheduler={"max_batched_tokens": 2, "max_running": 3})
    serving.add("A", [1], 100, priority=1)
    serving.steps_until(lambda: serving.known("A") == 50)
    for name in ("B", "C"):
        serving.add(name, prompt(ord(name), 1), 20)
    serving.steps_until(lambda: len(serving.finished) == 2)
    serving.add("D", [4], 30, priority=1)
    serving.step()
    serving.add("E", [5], 30)
    done = serving.run()
    assert {name: len(done[name].token_ids) for name in "ABCDE"} == {"A": 100, "B": 20, "C": 20, "D": 30, "E": 30}


def test_a_scheduler_that_was_replaced_refuses_to_go_on(make_serving):
    serving = make_serving(FULL)
    Scheduler(serving.cache)
    with pytest.raises(StepError):
        serving.add("A", prompt(0, 5), 2)


def test_counters_go_on_where_those_of_the_scheduler_before_have_stopped(make_serving):
    serving = make_serving(FULL, 8)
    for name in "AB":
        serving.add(name, prompt(ord(name), 9), 14)
    serving.run()
    before = serving.cache.stats()
    assert before.requests["preemptions"] > 0
    scheduler = Scheduler(serving.cache)
    assert serving.cache.stats() == before
    scheduler.add(Request("C", prompt(3, 9), 1))
    scheduler.commit(scheduler.schedule(), [1])
    assert serving.cache.stats().requests["finished"] == 3
    assert serving.cache.stats().prompt_tokens["computed"] == before.prompt_tokens["computed"] + 9
