"""Who is served first: priority, then arrival, and what a request must find free to begin."""

from __future__ import annotations

import inside
import pytest

from core.driving import LOAD, prompt, scheduled
from kvtier import (
    ChunkedLocal,
    FullAttention,
    SlidingWindow,
)

FULL = {"full": (FullAttention(), 4)}


def test_equal_priorities_are_served_in_order_of_arrival(make_serving):
    serving = make_serving(FULL, 6, scheduler={"max_batched_tokens": 64})
    for k in range(5):
        serving.add(str(k), prompt(k, 20), 1)
    serving.run()
    assert list(serving.finished) == [str(k) for k in range(5)]


def test_a_smaller_priority_is_served_first(make_serving):
    serving = make_serving(FULL, 6)
    for k, priority in enumerate([5, 0, 3, -2, 0]):
        serving.add(str(k), prompt(k, 20), 1, priority=priority)
    serving.run()
    assert list(serving.finished) == ["3", "1", "4", "2", "0"]


def test_what_decodes_leave_of_a_step_is_for_those_who_wait(make_serving):
    serving = make_serving(FULL, 64, scheduler={"max_batched_tokens": 2})
    serving.add("first", prompt(0, 1), 30)
    serving.step()
    serving.add("second", prompt(1, 1), 2)
    assert scheduled(serving.step()) == {"first": 1, "second": 1}


def test_windows_that_others_hold_too_are_still_to_be_taken(make_serving):
    """They do not become free as the window moves on. The victim does not come back until all that it knows fits."""
    groups = {"full": (FullAttention(), 3), "win": (SlidingWindow(6), 3)}
    serving = make_serving(groups, {"full": 40, "win": 6}, scheduler={"max_batched_tokens": 8, "max_running": 8})
    stem = prompt(0, 12)
    serving.add("first", [*stem, 1], 25)
    serving.steps_until(lambda: serving.known("first") == 16)
    serving.add("late", [50, 51], 12, priority=1)
    serving.step()
    serving.add("urgent", [*stem, *prompt(1, 20)], 2)
    steps = [scheduled(serving.step()).keys() for _ in range(4)]
    assert steps == [{"first", "urgent"}] * 4
    serving.run()
    assert serving.finished["late"].preemptions == 1


def test_nobody_is_let_into_the_windows_that_a_prompt_shares_and_will_still_need(make_serving):
    """The stem's windows are "first"'s as well: they do not become free as "urgent" computes on."""
    groups = {"full": (FullAttention(), 3), "win": (SlidingWindow(8), 3)}
    serving = make_serving(groups, {"full": 40, "win": 8}, scheduler={"max_batched_tokens": 8, "max_running": 8})
    stem = prompt(0, 15)
    serving.add("first", [*stem, 1], 25)
    serving.steps_until(lambda: serving.known("first") >= 14)
    serving.add("late", [50, 50], 12, priority=1)
    serving.step()
    serving.add("urgent", [*stem, *prompt(1, 8)], 2)
    steps = [scheduled(serving.step()).keys() for _ in range(4)]
    assert steps == [{"first", "urgent"}] * 3 + [{"first", "late"}]
    serving.run()


@pytest.mark.parametrize("num_blocks, let_in", [(5, False), (6, True)])
def test_windows_that_a_load_brings_are_its_requests_own(make_serving, num_blocks, let_in):
    """Each of the two has three blocks of the window at a time; those that the load writes are among the first's."""
    groups = {**FULL, "win": (SlidingWindow(6), 4)}
    serving = make_serving(groups, {"full": 40, "win": num_blocks}, 64, hold=[])
    serving.serve("before", prompt(1, 21), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("loading", prompt(1, 30), 1)
    serving.step()
    serving.add("fits", prompt(2, 30), 1)
    assert (serving.step().num_tokens > 0) == let_in
    serving.engine.release()
    serving.run()
    assert serving.finished["loading"].cached_tokens["host"] == 20


def test_a_request_that_finds_too_few_blocks_is_let_in_once_others_have_computed_what_it_lacks(make_serving):
    """Nothing becomes free meanwhile: what others hold is its own prefix."""
    serving = make_serving({"full": (FullAttention(), 16)}, 11, scheduler={"max_batched_tokens": 256})
    text = prompt(0, 90)
    serving.add("short", prompt(1, 33), 3, priority=-1)
    serving.add("long", prompt(2, 33), 15, priority=-1)
    serving.step()
    serving.add("waits", text, 1)
    serving.step()
    assert serving.scheduler.why_waiting() == {"waits": "full: needs 6, has 5"}
    serving.step()
    serving.add("stem", text[:64], 15, priority=-1)
    serving.step()
    assert "waits" in scheduled(serving.step())


def test_the_first_in_service_order_advances_although_an_urgent_arrival_could_fill_the_step(make_serving):
    """The arrival comes before the last running request, but after the first."""
    serving = make_serving(FULL, 64, scheduler={"max_batched_tokens": 8})
    serving.add("first", prompt(0, 3), 30, priority=0)
    serving.add("last", prompt(1, 3), 30, priority=9)
    serving.step()
    serving.step()
    for k in range(3):
        serving.add(f"between {k}", prompt(2 + k, 20), 2, priority=5)
        step = serving.step()
        assert "first" in scheduled(step)
        assert step.request_ids == sorted(step.request_ids, key=lambda name: (serving.requests[name].priority, name))
    serving.run()


def test_the_first_in_service_order_advances_although_all_that_run_are_at_their_prompts(make_serving):
    serving = make_serving(FULL, 64, scheduler={"max_batched_tokens": 8})
    for name, priority in (("last", 9), ("first", 0), ("between", 5)):
        serving.add(name, prompt(priority, 40), 2, priority=priority)
        step = serving.step()
    assert scheduled(step) == {"first": 8}
    serving.run()


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_stream_of_urgent_arrivals_does_not_starve_the_first_of_a_small_budget(make_serving, budget):
    serving = make_serving(FULL, 64, scheduler={"max_batched_tokens": budget})
    serving.add("last", prompt(1, 1), 30, priority=9)
    serving.step()
    serving.add("first", prompt(0, 1), 30, priority=0)
    serving.step()
    for k in range(6):
        serving.add(f"between {k}", prompt(2 + k, 1), 1, priority=5)
        assert "first" in scheduled(serving.step())
    serving.run()


@pytest.mark.parametrize(("attention", "peak"), [(SlidingWindow(6), 3), (ChunkedLocal(8), 2)])
def test_a_request_begins_only_once_all_that_its_prompt_will_hold_at_a_time_is_free(make_serving, attention, peak):
    serving = make_serving({**FULL, "local": (attention, 4)}, {"full": 64, "local": peak + 1})
    serving.add("decoding", prompt(0, 5), 20)
    serving.step()
    serving.add("long", prompt(1, 40), 2)
    serving.step()
    free = int(inside.pools(serving.cache).free[1])
    assert serving.scheduler.why_waiting() == {"long": f"local: needs {peak}, has {free}"}
    serving.run()
