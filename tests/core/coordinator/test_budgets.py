"""Tokens of a step: budgets, chunks of prompts, and who gets a first token."""

from __future__ import annotations

import pytest

from core.driving import LOAD, prompt, scheduled
from kvtier import (
    ChunkedLocal,
    ConfigError,
    FullAttention,
    Scheduler,
    SlidingWindow,
)

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def test_a_step_never_exceeds_its_budget_and_prefills_leave_decodes_their_token(make_serving):
    serving = make_serving(GROUPS, 64, scheduler={"max_batched_tokens": 7, "max_running": 8})
    for k in range(4):
        serving.add(f"short {k}", prompt(k, 1), 12)
    serving.step()
    serving.add("long", prompt(9, 40), 2)
    while serving.scheduler.has_work():
        step = serving.step()
        assert step.num_tokens <= 7
        if serving.is_running("long") and "long" in scheduled(step) and "short 0" not in serving.finished:
            assert {f"short {k}" for k in range(4)} <= scheduled(step).keys()


def test_a_prefill_that_comes_first_leaves_later_decodes_their_token(make_serving):
    serving = make_serving(GROUPS, 64, scheduler={"max_batched_tokens": 8})
    serving.add("decode", prompt(0, 3), 12, priority=1)
    serving.step()
    serving.add("urgent", prompt(1, 40), 2)
    chunks = 0
    while not serving.known("urgent") > 40 and chunks < 20:
        step = serving.step()
        assert scheduled(step)["decode"] == 1
        chunks += 1
    assert chunks >= 5, "the prompt came in chunks"
    serving.run()


@pytest.mark.parametrize("prefills", [2, 4])
def test_prefills_that_come_first_leave_later_decodes_their_token_all_together(make_serving, prefills):
    serving = make_serving(FULL, 600, scheduler={"max_batched_tokens": 11})
    for k in range(3):
        serving.add(f"d{k}", prompt(k, 3), 60, priority=1)
    serving.step()
    for k in range(prefills):
        serving.add(f"p{k}", prompt(10 + k, 40), 2)
    for _ in range(5):
        assert scheduled(serving.step()) == {"p0": 8, "d0": 1, "d1": 1, "d2": 1}
    serving.run()


def test_a_prompt_that_another_one_comes_before_does_not_take_the_tokens_of_decodes(make_serving):
    serving = make_serving(FULL, 600, scheduler={"max_batched_tokens": 11})
    for k in range(3):
        serving.add(f"d{k}", prompt(k, 3), 60, priority=1)
    serving.step()
    serving.add("second", prompt(10, 40), 2)
    assert scheduled(serving.step()) == {"second": 8, "d0": 1, "d1": 1, "d2": 1}
    serving.add("first", prompt(11, 40), 2, priority=-1)
    for _ in range(4):
        assert scheduled(serving.step()) == {"first": 8, "d0": 1, "d1": 1, "d2": 1}
    serving.run()


def test_a_budget_too_small_for_all_goes_by_service_order(make_serving):
    serving = make_serving(FULL, 64, scheduler={"max_batched_tokens": 4})
    for name, priority in (("d0", 0), ("d2", 2), ("d3", 3), ("d4", 4)):
        serving.add(name, prompt(priority, 1), 40, priority=priority)
        serving.step()
    serving.add("p", prompt(9, 12), 2, priority=1)
    for _ in range(3):
        assert scheduled(serving.step()) == {"d0": 1, "p": 1, "d2": 1, "d3": 1}
    serving.run()


@pytest.mark.parametrize(("budget", "long", "new"), [(4, 80, 2), (1, 40, 60)])
def test_whoever_was_admitted_gets_a_first_token_before_those_who_have_had_theirs(make_serving, budget, long, new):
    """It cannot be preempted until then: the first in service order, which needs its blocks, would wait as long."""
    serving = make_serving(FULL, 50, 100, hold=[], scheduler={"max_batched_tokens": budget})
    serving.serve("before", prompt(1, 101), 1)
    serving.serve("flood", prompt(2, 190), 1)
    serving.engine.hold = {LOAD}
    serving.add("loads", prompt(1, 104), 2, priority=2)
    serving.step()
    serving.add("long", prompt(3, long), new, priority=1)
    serving.step()
    serving.engine.release()
    serving.add("first", prompt(4, 120), 2, priority=0)
    assert "loads" in scheduled(serving.step())
    assert "first" in scheduled(serving.step())
    serving.run()


def test_an_urgent_request_leaves_those_before_it_their_next_block(make_serving):
    """Nobody is admitted for one step, and preempted in the next for the block that a decode before it needed."""
    serving = make_serving(FULL, 8, 40, hold=[], scheduler={"max_batched_tokens": 16})
    serving.serve("before", prompt(1, 21), 1)
    serving.serve("flood", prompt(2, 30), 1)
    serving.engine.hold = {LOAD}
    serving.add("first", prompt(0, 3), 8, priority=0)
    serving.step()
    serving.add("loads", prompt(1, 21), 2, priority=2)
    serving.step()
    assert serving.known("first") == 5
    assert serving.cache.stats().device["full"].held == 7
    serving.add("between", prompt(3, 2), 2, priority=1)
    assert scheduled(serving.step()) == {"first": 1}
    serving.engine.release()
    serving.run()
    assert serving.finished["between"].preemptions == 0


def test_a_prefill_that_comes_first_leaves_those_behind_it_a_token_each_and_nobody_gives_way(make_serving):
    """Its windows could borrow whatever a victim frees, in each step anew, and whom they gave way to got nothing."""
    groups = {"full": (FullAttention(), 4), "win": (SlidingWindow(8), 4)}
    serving = make_serving(groups, {"full": 400, "win": 22}, scheduler={"max_batched_tokens": 160})
    for i in range(4):
        serving.add(f"r{i}", prompt(i, 9), 30, priority=3)
    serving.step()
    serving.step()
    serving.add("second", prompt(4, 300), 2, priority=2)
    serving.step()
    serving.add("first", prompt(5, 600), 2, priority=1)
    for _ in range(12):
        assert set(scheduled(serving.step())) == {"first", "second", "r0", "r1", "r2", "r3"}
    serving.run()
    assert serving.scheduler.reports.num_preemptions == 0


def test_no_more_requests_run_than_there_are_rows(make_serving):
    serving = make_serving(GROUPS, 64, scheduler={"max_running": 2})
    for k in range(5):
        serving.add(str(k), prompt(k, 5), 4)
    while serving.scheduler.has_work():
        assert len(serving.step().request_ids) <= 2


@pytest.mark.parametrize("group", ["full", "win", "chunk"])
def test_a_prompt_chunk_that_does_not_fit_is_shortened_down_to_one_token(make_serving, group):
    """A window group needs window and chunk together while it runs: with few blocks the chunk shrinks instead."""
    peak = {"full": 10, "win": 3, "chunk": 2}
    serving = make_serving(
        GROUPS, {"full": 40, "win": 40, "chunk": 40, group: peak[group]}, scheduler={"max_batched_tokens": 64}
    )
    serving.add("A", prompt(0, 40), 1)
    counts = []
    while "A" not in serving.finished:
        counts.append(scheduled(serving.step()).get("A", 0))
    assert sum(counts) == 40
    assert min(counts) >= 1
    if group != "full":
        assert max(counts) <= 4 * peak[group]


def test_more_running_than_budget_are_served_from_the_first(make_serving):
    serving = make_serving(GROUPS, 64, scheduler={"max_batched_tokens": 3, "max_running": 8})
    for k in range(5):
        serving.add(str(k), prompt(k, 1), 6)
    serving.step()
    serving.step()
    assert list(scheduled(serving.step()))[:3] == ["0", "1", "2"]
    serving.run()


@pytest.mark.parametrize("bad", [0, -1, 1.5, None, True, "8"])
def test_limits_that_are_no_positive_ints_are_refused(make_cache, bad):
    for name in ("max_batched_tokens", "max_running"):
        with pytest.raises(ConfigError, match=name):
            Scheduler(make_cache(), **{name: bad})
