"""Work is never asleep: what is work, what wakes whoever waits, and who rests."""

from __future__ import annotations

import threading

import inside
import numpy as np
import pytest
from breadth import sample
from patience import FOREVER_S

from core.driving import STORE, assert_same, prompt, scheduled, snapshot
from kvtier import (
    ChunkedLocal,
    FullAttention,
    SlidingWindow,
    StepError,
)
from kvtier.cpu_offload import store_queue

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


# --- waiting and waking ---------------------------------------------------------------------------


def test_has_work_until_everything_is_reported_and_every_transfer_has_settled(make_serving):
    serving = make_serving(FULL, 16, 32, hold=[STORE])
    assert not serving.scheduler.has_work()
    serving.add("A", prompt(0, 9), 1)
    assert serving.scheduler.has_work()
    serving.step()
    assert "A" in serving.finished
    assert serving.scheduler.has_work(), "a store is under way"
    serving.engine.release()
    serving.step()
    assert not serving.scheduler.has_work()


def test_wait_gives_a_closed_engine_nothing_and_returns(make_serving, monkeypatch):
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 1)
    serving = make_serving(FULL, 16, 32, hold=[STORE])
    for name in "AB":
        serving.add(name, prompt(ord(name), 9), 1)
        serving.step()
    assert inside.connector(serving.cache).books.planned
    submitted = len(serving.engine.submitted)
    inside.lift_most_in_flight(serving.cache, 1 << 30)
    serving.cache.close()
    for _ in range(2):
        serving.scheduler.wait(FOREVER_S)
    assert len(serving.engine.submitted) == submitted


def test_an_uncommitted_step_is_work(make_serving):
    serving = make_serving(FULL)
    step = serving.scheduler.schedule()
    assert serving.scheduler.has_work()
    serving.scheduler.cancel(step)
    assert not serving.scheduler.has_work()


@pytest.mark.parametrize("host", [None, 32])
def test_wait_sleeps_and_an_arrival_or_an_abort_wakes_it(make_serving, monkeypatch, host):
    serving, slept = make_serving(FULL, 16, host), list[float]()
    with monkeypatch.context() as patch:
        patch.setattr(inside.connector(serving.cache), "wait", slept.append)
        serving.scheduler.wait(5.0)
    assert slept == [5.0]
    threading.Timer(0.05, lambda: serving.add("A", prompt(0, 9), 4)).start()
    serving.scheduler.wait(FOREVER_S)
    assert serving.scheduler.num_waiting == 1
    serving.step()
    threading.Timer(0.05, lambda: serving.scheduler.abort("A")).start()
    while serving.scheduler.num_running:
        serving.scheduler.wait(FOREVER_S)
        serving.step()
    serving.run()


def test_an_engine_that_waits_between_empty_steps_sees_its_load_end(make_serving):
    serving = make_serving(FULL, 16, 32)
    serving.serve("before", prompt(0, 25), 1)
    inside.pools(serving.cache).forget_all()
    serving.add("again", prompt(0, 25), 2)
    empty = 0
    while "again" not in serving.finished:
        if not serving.step().num_tokens:
            empty += 1
            serving.scheduler.wait(FOREVER_S)
    assert empty <= 3, "no busy loop"
    assert serving.finished["again"].cached_tokens["host"] == 24
    serving.run()


def test_why_a_request_waits_names_the_group_that_is_short(make_serving):
    serving = make_serving(GROUPS, {"full": 30, "win": 4, "chunk": 30})
    serving.add("A", prompt(0, 20), 8)
    serving.add("B", prompt(1, 20), 8)
    serving.step()
    assert "win" in serving.scheduler.why_waiting()["B"]
    assert "full" not in serving.scheduler.why_waiting()["B"]
    serving.run()


def test_requests_come_from_many_threads(make_serving):
    serving = make_serving(GROUPS, 24, 64)

    def feed(t: int) -> None:
        for k in range(8):
            serving.add(f"{t}.{k}", prompt(k % 4, 6 + k), 3)
            if k % 3 == 0:
                serving.scheduler.abort(f"{t}.{k}")

    threads = [threading.Thread(target=feed, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or serving.scheduler.has_work():
        if not serving.step().num_tokens:
            serving.scheduler.wait(0.01)
    assert len(serving.finished) == 32


# --- requests that the engine lets rest -----------------------------------------------------------


def test_who_rests_keeps_its_blocks_and_goes_on_where_it_was(make_serving):
    serving = make_serving(GROUPS, 64)
    for k in range(3):
        serving.add(f"{k}", prompt(k, 9), 12)
    serving.steps_until(lambda: all(serving.is_running(f"{k}") for k in range(3)))
    while any(n > 1 for n in scheduled(serving.step()).values()):
        pass
    assert serving.scheduler.running_ids == ["0", "1", "2"]
    known = serving.known("0")
    for _ in range(3):
        step = serving.scheduler.schedule(resting={"0", "2", "a stranger"})
        assert scheduled(step) == {"1": 1}
        serving.end(step, serving.canary.forward(step))
    assert serving.known("0") == known and serving.scheduler.num_running == 3
    serving.run()


def test_who_has_just_been_admitted_does_not_rest(make_serving):
    serving = make_serving(GROUPS, 64)
    serving.add("a", prompt(0, 9), 2)
    step = serving.scheduler.schedule(resting={"a"})
    assert scheduled(step) == {"a": 9}
    serving.end(step, serving.canary.forward(step))
    assert serving.scheduler.schedule(resting={"a"}).num_tokens == 0
    serving.scheduler.cancel(serving.scheduler.step)
    serving.run()


@pytest.mark.parametrize(
    "bad",
    ["ab", "", b"a", 5, None, iter(["a"]), [b"a"], [["a"]], ["a", 1], np.array(5), np.array([1, 2])],
    ids=lambda bad: "",
)
def test_what_names_no_requests_is_refused_before_anything_changes(make_serving, bad):
    """Arrivals and ends were taken already, and "ab" let "a" rest."""
    serving = make_serving(GROUPS, 64, 64)
    for name in ("a", "b"):
        serving.add(name, prompt(ord(name), 9), 4)
        serving.step()
    serving.add("new", prompt(0, 9), 4)
    serving.scheduler.abort("b")
    before = snapshot(serving.cache)
    with pytest.raises(StepError, match="resting must be a set of request ids"):
        serving.scheduler.schedule(bad)
    assert_same(before, snapshot(serving.cache))
    serving.run()
    assert {name: done.finish_reason for name, done in serving.finished.items()} == {
        "a": "length",
        "b": "abort",
        "new": "length",
    }


@pytest.mark.parametrize("form", [set, tuple, dict.fromkeys, np.array], ids=["set", "tuple", "dict", "array"])
def test_who_rests_may_be_named_in_any_collection(make_serving, form):
    serving = make_serving(GROUPS, 64)
    serving.add("a", prompt(0, 9), 4)
    serving.step()
    step = serving.scheduler.schedule(form(["a", "b"]))
    assert step.num_tokens == 0
    serving.scheduler.cancel(step)
    serving.run()


@pytest.mark.parametrize("seed", sample(range(40), quick=range(4)))
def test_whoever_rests_and_whenever_texts_are_right_and_all_ends(make_serving, monkeypatch, seed):
    """In pools that are too small for all of them."""
    rnd = np.random.default_rng(seed)
    serving = make_serving(GROUPS, 24, 24, scheduler={"max_batched_tokens": 16, "max_running": 6})
    schedule = serving.scheduler.schedule

    def some_rest():
        names = serving.scheduler.running_ids
        return schedule(resting=[name for name in names if rnd.random() < 0.5])

    monkeypatch.setattr(serving.scheduler, "schedule", some_rest)
    for k in range(12):
        serving.add(f"{k}", prompt(int(rnd.integers(4)), int(rnd.integers(1, 40))), int(rnd.integers(1, 20)))
        if rnd.random() < 0.5:
            serving.step()
    serving.run()
    assert len(serving.finished) == 12
    assert {done.finish_reason for done in serving.finished.values()} == {"length"}
