"""Who computes what: budgets, chunks, service order, preemption, growth."""

from __future__ import annotations

import threading

import inside
import numpy as np
import pytest
from breadth import sample
from patience import FOREVER_S

from core.driving import LOAD, STORE, Serving, prompt, scheduled
from core.slabs import shared_serving
from kvtier import (
    ChunkedLocal,
    ConfigError,
    FullAttention,
    Request,
    RequestTooLarge,
    Scheduler,
    SlidingWindow,
    StepError,
)
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.tracked import State
from kvtier.cpu_offload import store_queue
from kvtier.testing import canary_spec

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


# --- budgets and chunks ---------------------------------------------------------------------------


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


# --- service order --------------------------------------------------------------------------------


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


def test_an_urgent_request_takes_the_blocks_of_a_running_one_that_comes_later(make_serving):
    serving = make_serving(FULL, 8)
    serving.add("late", prompt(0, 20), 8, priority=1)
    serving.step()
    serving.add("urgent", prompt(1, 20), 2)
    assert "urgent" in scheduled(serving.step())
    serving.run()
    assert serving.finished["urgent"].preemptions == 0
    assert serving.finished["late"].preemptions == 1


def test_an_urgent_request_takes_what_was_promised_to_a_long_prompt_that_comes_later(make_serving):
    """It waited until the long prompt was through: the blocks that this was still to take counted as taken."""
    serving = make_serving(FULL, 12, scheduler={"max_batched_tokens": 8})
    serving.add("late", prompt(0, 40), 2, priority=1)
    serving.step()
    serving.add("urgent", prompt(1, 18), 2)
    assert list(scheduled(serving.step())) == ["urgent"]
    serving.run()
    assert serving.finished["urgent"].preemptions == 0
    assert serving.finished["late"].preemptions == 1


def test_nobody_gives_way_to_a_request_whose_hit_it_alone_holds_if_that_then_lacks_the_hit(make_serving):
    """Blocks that the urgent one shares with the late one are not freed for it: it would have to take them itself."""
    serving = make_serving(FULL, 12, scheduler={"max_batched_tokens": 9})
    serving.add("first", prompt(0, 5), 16)
    serving.step()
    stem = prompt(1, 16)
    serving.add("late", [*stem, *prompt(2, 24)], 2, priority=2)
    for _ in range(3):
        serving.step()
    serving.add("urgent", [*stem, *prompt(3, 26)], 2, priority=1)
    assert scheduled(serving.step()).keys() == {"first", "late"}
    assert "full" in serving.scheduler.why_waiting()["urgent"]
    serving.run()


def test_an_urgent_request_takes_windows_that_are_part_of_its_hit(make_serving):
    """Windows move on: their blocks are no fewer for being found, so all of the late one's are gained."""
    serving = make_serving({**FULL, "win": (SlidingWindow(6), 4)}, {"full": 40, "win": 3})
    stem = prompt(1, 16)
    serving.serve("before", [*stem, 7])
    serving.add("late", [*stem, 5], 8, priority=1)
    serving.step()
    serving.add("urgent", [*stem, *prompt(3, 26)], 2)
    assert list(scheduled(serving.step())) == ["urgent"]
    serving.run()
    assert serving.finished["late"].preemptions == 1
    assert serving.finished["urgent"].cached_tokens["device"] == 16


def test_whoever_is_not_needed_beside_the_other_victims_is_spared(make_serving):
    """The last one has a block, the one before it ten: the ten are enough."""
    serving = make_serving(FULL, 16, scheduler={"max_batched_tokens": 8})
    serving.add("last", prompt(0, 2), 30, priority=3)
    serving.step()
    serving.add("late", prompt(1, 40), 2, priority=2)
    serving.step()
    serving.step()
    serving.add("urgent", prompt(2, 48), 2, priority=1)
    assert scheduled(serving.step()) == {"urgent": 7, "last": 1}
    serving.run()
    assert [serving.finished[name].preemptions for name in ("last", "late", "urgent")] == [0, 1, 0]


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


def test_what_is_raised_while_requests_give_way_leaves_no_hit_held(make_serving, monkeypatch):
    """A signal may come at any time."""
    serving = make_serving(FULL, 11)
    stem = prompt(1, 8)
    serving.serve("before", [*stem, 7])
    serving.add("late", prompt(0, 20), 8, priority=1)
    serving.step()
    serving.add("urgent", [*stem, *prompt(2, 20)], 2)

    def interrupted(self, seq):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Coordinator, "leave", interrupted)
        serving.scheduler.schedule()
    assert serving.cache.audit() == []
    serving.run()
    assert serving.finished.keys() == {"before", "late", "urgent"}


def test_what_is_raised_while_blocks_are_made_clean_leaves_no_hit_held(make_serving, monkeypatch):
    serving = make_serving(FULL, 6, 64, hold=[STORE])
    for name in (0, 1):
        serving.add(f"{name}", prompt(name, 12), 1)
        serving.step()

    def interrupted(*_):
        raise KeyboardInterrupt

    serving.add("again", [*prompt(0, 8), 7, 7, 7, 7], 1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(serving.engine, "order_after", interrupted)
        serving.scheduler.schedule()
    assert serving.cache.audit() == []
    assert serving.cache.stats().device["full"].held == 0
    serving.engine.release()
    serving.run()


def test_an_urgent_request_takes_the_row_of_a_running_one_that_comes_later(make_serving):
    serving = make_serving(FULL, 64, scheduler={"max_running": 1})
    serving.add("late", prompt(0, 5), 30, priority=1)
    serving.step()
    serving.add("urgent", prompt(1, 5), 2)
    serving.run()
    assert list(serving.finished) == ["urgent", "late"]


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


@pytest.mark.parametrize("max_running", [2, 8])
def test_nobody_gives_up_row_or_blocks_to_one_that_would_not_fit_all_the_same(make_serving, max_running):
    """One is loading and cannot yield; without its blocks the urgent request does not fit, so the last one goes on."""
    serving = make_serving(FULL, 12, 64, hold=[], scheduler={"max_running": max_running})
    serving.serve("before", prompt(0, 25), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("loading", prompt(0, 25), 2, priority=0)
    serving.add("last", prompt(1, 5), 20, priority=9)
    serving.step()
    serving.add("urgent", prompt(2, 30), 1, priority=5)
    for _ in range(3):
        assert "last" in scheduled(serving.step())
    assert serving.scheduler.reports.num_preemptions == 0
    serving.engine.release()
    serving.run()


def test_one_that_could_not_give_way_does_once_it_has_run_although_nothing_has_become_free(make_serving):
    """A load's request cannot yield. As soon as it has computed a token it can, and whoever waits looks again."""
    serving = make_serving(FULL, 12, 64, hold=[])
    serving.serve("before", prompt(0, 25), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("late", prompt(0, 25), 20, priority=1)
    serving.step()
    serving.add("urgent", prompt(1, 30), 2)
    serving.step()
    assert "has 5" in serving.scheduler.why_waiting()["urgent"]
    serving.engine.release()
    assert scheduled(serving.step()) == {"late": 1}
    assert "urgent" in scheduled(serving.step())
    serving.run()
    assert serving.finished["late"].preemptions == 1


def test_a_row_that_sat_a_step_out_and_was_given_up_serves_another_in_that_step(make_serving):
    """B lacks a block and sits out; then A's block turns out to be held up by a store that hangs, so B gives way, and
    W, whose prefix another store was to bring into the host tier, begins in B's row."""
    serving = make_serving(FULL, 7, 64, hold=[], deadline_s=5.0, scheduler={"max_running": 4})
    serving.add("A", prompt(0, 6), 8, priority=0)
    serving.add("B", prompt(1, 14), 8, priority=2)
    serving.step()
    serving.engine.hold = {STORE}
    for k in (2, 3):  # the second one gets the first one's block, which is still read
        serving.add(f"stored {k}", prompt(k, 4), 1, priority=3)
        serving.step()
    assert serving.cache.stats().device["full"].fenced == 1
    serving.engine.can_order = False
    serving.add("W", prompt(2, 5), 1, priority=1)
    assert scheduled(serving.step()) == {"A": 1, "W": 5}
    assert [s.request.request_id for s in serving.scheduler.waiting] == ["B"]
    serving.engine.release()
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


def test_the_first_in_service_order_keeps_its_blocks_when_an_urgent_arrival_wants_all(make_serving):
    serving = make_serving(FULL, 14, scheduler={"max_batched_tokens": 64})
    serving.add("first", prompt(0, 4), 20, priority=0)
    serving.add("last", prompt(1, 4), 20, priority=9)
    serving.step()
    serving.add("between", prompt(2, 40), 4, priority=5)
    while serving.scheduler.has_work():
        step = serving.step()
        if step.num_tokens and "first" not in serving.finished:
            assert "first" in scheduled(step)
    assert serving.finished["first"].preemptions == 0


@pytest.mark.parametrize("store", sample(["off", "eager", "lazy"], ["eager"]))
def test_the_oldest_is_never_preempted_and_always_advances(make_serving, store):
    serving = make_serving(
        GROUPS, {"full": 16, "win": 8, "chunk": 8}, 64, store=store, scheduler={"max_batched_tokens": 16}
    )
    for k in range(6):
        serving.add(str(k), prompt(k, 10), 30)
    while serving.scheduler.has_work():
        oldest = next((str(k) for k in range(6) if str(k) not in serving.finished), None)
        step, ids = serving.begin()
        copies = [seq.request.request_id for seq in serving.scheduler.running if seq.state is State.LOADING]
        copies += [name for name, why in serving.scheduler.why_waiting().items() if "transfer" in why]
        if step.num_tokens and oldest is not None:
            assert oldest in scheduled(step) or oldest in copies
        serving.end(step, ids)
    assert serving.finished["0"].preemptions == 0


def test_the_younger_are_preempted_first(make_serving):
    serving = make_serving(FULL, 9)
    for k in range(3):
        serving.add(str(k), prompt(k, 11), 12)
    serving.run()
    counts = [serving.finished[str(k)].preemptions for k in range(3)]
    assert counts[0] == 0
    assert counts == sorted(counts)


def test_the_last_in_service_order_is_the_one_preempted(make_serving):
    serving = make_serving(FULL, 9)
    for k in range(3):
        serving.add(str(k), prompt(k, 11), 12)
    serving.steps_until(lambda: serving.scheduler.reports.num_preemptions)
    assert [seq.request.request_id for seq in serving.scheduler.waiting] == ["2"]
    assert serving.scheduler.reports.num_preemptions == 1
    serving.run()


def decoding_beside_a_load(make_serving):
    """A request that decodes beside one whose load, which the engine holds, has all other blocks."""
    serving = make_serving(FULL, 9, 64, hold=[])
    serving.serve("before", prompt(1, 21), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("decoding", prompt(0, 11), 8)
    serving.step()
    serving.add("loading", prompt(1, 21), 4)
    serving.step()
    return serving


def test_nobody_is_preempted_if_all_victims_together_would_not_do(make_serving):
    """The only other blocks are held by a load, which cannot yield: the decode sits out instead."""
    serving = decoding_beside_a_load(make_serving)
    serving.step()
    assert scheduled(serving.step()) == {}
    assert serving.scheduler.reports.num_preemptions == 0
    serving.engine.release()
    serving.run()
    assert serving.finished["decoding"].preemptions == 0


def test_the_first_waits_for_one_that_is_about_to_run_before_it_ends_with_capacity(make_serving):
    """The load has just landed: its request cannot yield before it has computed a token, and no copy is under way."""
    serving = decoding_beside_a_load(make_serving)
    serving.engine.release()
    assert scheduled(serving.step()) == {"loading": 1}
    assert "decoding" in scheduled(serving.step())
    serving.run()
    assert {done.finish_reason for done in serving.finished.values()} == {"length"}
    assert serving.finished["loading"].preemptions == 1


def test_a_resumed_request_computes_a_token_before_it_is_preempted_again(make_serving):
    serving = make_serving(GROUPS, {"full": 12, "win": 6, "chunk": 6}, scheduler={"max_batched_tokens": 5})
    for k in range(5):
        serving.add(str(k), prompt(k, 9), 14, priority=k % 2)
    seen = dict.fromkeys(serving.requests, 0)
    progress: dict[str, int] = {}
    while serving.scheduler.has_work():
        step = serving.step()
        for name in scheduled(step):
            progress[name] = progress.get(name, 0) + 1
        for seq in serving.scheduler.waiting:
            name = seq.request.request_id
            if seq.preemptions > seen[name]:
                assert seq.preemptions == seen[name] + 1
                assert progress.pop(name, 0) >= 1, f"{name} was preempted before it had run"
                seen[name] = seq.preemptions


# --- what is refused, what outgrows ---------------------------------------------------------------


@pytest.mark.parametrize("group", ["full", "win", "chunk"])
def test_a_prompt_that_one_group_alone_can_never_hold_is_refused_with_numbers(make_serving, group):
    sizes = {"full": 20, "win": 20, "chunk": 20, group: 1}
    serving = make_serving(GROUPS, sizes)
    need = {"full": 5, "win": 3, "chunk": 2}
    with pytest.raises(RequestTooLarge, match=f"{group}.*needs {need[group]}.*have 1") as refused:
        serving.add("A", prompt(0, 20), 1)
    assert refused.value.needs == {group: need[group]}
    assert refused.value.have == {group: 1}
    assert not serving.scheduler.has_work()
    assert serving.serve("A", prompt(0, 4), 1).finish_reason == "length"


def test_all_groups_that_are_too_small_are_named(make_serving):
    serving = make_serving(GROUPS, {"full": 2, "win": 2, "chunk": 9})
    with pytest.raises(RequestTooLarge) as refused:
        serving.add("A", prompt(0, 20), 1)
    assert refused.value.needs == {"full": 5, "win": 3}
    assert refused.value.have == {"full": 2, "win": 2}


@pytest.mark.parametrize("memory", [{"device_blocks": {"full": 20, "win": 4, "chunk": 9}}, {"device_bytes": 20_000}])
def test_who_is_refused_is_told_the_longest_prompt_that_is_not(make_serving, memory):
    serving = make_serving(GROUPS, None, **memory)
    with pytest.raises(RequestTooLarge) as refused:
        serving.add("A", prompt(0, 5000), 1)
    longest = refused.value.longest
    assert f"the longest prompt that fits has {longest} tokens" in str(refused.value)
    with pytest.raises(RequestTooLarge):
        serving.add("B", prompt(0, longest + 1), 1)
    assert serving.serve("C", prompt(0, longest), 1).finish_reason == "length"


def test_a_request_that_outgrows_one_group_ends_with_capacity_and_the_others_go_on(make_serving):
    serving = make_serving(GROUPS, {"full": 6, "win": 20, "chunk": 20})
    serving.add("grows", prompt(0, 10), 100)
    serving.add("small", prompt(1, 3), 3)
    done = serving.run()
    assert done["grows"].finish_reason == "capacity"
    assert 10 + len(done["grows"].token_ids) == 25, "the last token was sampled and has no place to be computed in"
    assert done["small"].finish_reason == "length"


def test_blocks_of_windows_are_given_up_before_anybody_is_preempted(make_serving):
    """Blocks that a row keeps only as anchors go first."""
    serving = make_serving({"win": (SlidingWindow(5), 4)}, 5)
    serving.add("A", prompt(0, 8), 20)
    serving.add("B", prompt(1, 8), 20)
    serving.run()
    assert serving.scheduler.reports.num_preemptions == 0


# --- steps in order -------------------------------------------------------------------------------


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


def test_a_long_hit_fits_into_the_tables_of_a_scheduler_that_has_run_nothing_yet(make_serving):
    """Tables grow with what runs, and a new scheduler's begin small: the hit comes before any extension."""
    first = make_serving(FULL, 200)
    first.serve("A", prompt(0, 600))
    second = Serving(first.cache)
    assert second.serve("B", prompt(0, 600)).cached_tokens == {"device": 596, "host": 0}


def test_a_victim_that_has_outgrown_the_pools_ends_instead_of_waiting_for_what_never_comes(make_serving):
    """It would head the queue until everything that runs has ended, and then end with "capacity" all the same."""
    serving = make_serving(FULL, 9, scheduler={"max_running": 4})
    serving.add("outgrown", prompt(0, 35), 9)
    serving.steps_until(lambda: serving.known("outgrown") == 37)  # 36 tokens are in 9 blocks of 4
    serving.add("urgent", prompt(1, 5), 9, priority=-1)
    serving.add("behind", prompt(2, 5), 1)
    assert scheduled(serving.step()) == {"urgent": 5, "behind": 5}
    assert serving.finished["outgrown"].finish_reason == "capacity"
    assert len(serving.finished["outgrown"].token_ids) == 2
    assert serving.scheduler.reports.num_preemptions == 0
    assert "behind" in serving.finished
    serving.run()


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


def test_who_is_aborted_during_a_step_that_is_cancelled_has_ended_and_was_not_sent_back(make_serving):
    serving = make_serving(FULL, 20, 20)
    serving.add("A", prompt(0, 20), 9)
    step, _ = serving.begin()
    assert serving.scheduler.abort("A")
    serving.scheduler.cancel(step)
    serving.run()
    assert (serving.finished["A"].finish_reason, serving.finished["A"].preemptions) == ("abort", 0)


def test_a_request_that_has_outgrown_the_pools_does_not_wait_for_a_store(make_serving):
    """The store has blocks fenced, and nobody knows for how long; they would not do."""
    serving = make_serving(FULL, 9, 20, hold=[STORE])
    serving.add("outgrown", prompt(0, 35), 9)
    serving.add("behind", prompt(1, 5), 1)
    serving.steps_until(lambda: "outgrown" in serving.finished, 4)
    assert serving.finished["outgrown"].finish_reason == "capacity"
    assert len(serving.finished["outgrown"].token_ids) == 2
    serving.steps_until(lambda: serving.engine.ordered, 4)
    assert serving.engine.live, "the stores were to be under way"


def test_blocks_kept_for_an_anchor_to_come_are_given_up_before_anybody_gives_way(make_serving):
    """Between two boundaries of 16 tokens a row keeps up to ten blocks of a window for which two would do."""
    serving = make_serving({"full": (FullAttention(), 16), "win": (SlidingWindow(4), 2)}, {"full": 20, "win": 12})
    serving.add("A", prompt(0, 17), 60)
    serving.steps_until(lambda: serving.known("A") == 48)
    assert serving.cache.stats().device["win"].held > 8
    serving.add("urgent", prompt(1, 5), 3, priority=-1)
    assert scheduled(serving.step()) == {"urgent": 5, "A": 1}
    serving.run()
    assert (serving.finished["A"].finish_reason, serving.finished["A"].preemptions) == ("length", 0)


def test_nobody_is_trimmed_in_vain(make_serving):
    """What is lacking are blocks of the full group: somebody must leave, and the others keep their anchors to come."""
    groups = {"full": (FullAttention(), 16), "win": (SlidingWindow(4), 2)}
    serving = make_serving(groups, {"full": 6, "win": 40})
    serving.add("first", prompt(0, 17), 60, priority=-2)
    serving.add("leaves", prompt(2, 17), 60)
    serving.steps_until(lambda: serving.known("first") == 44)
    t = inside.coordinator(serving.cache).tables.arrays
    kept = int(t.lo[1, serving.scheduler.running[0].row])
    assert kept < 40 // 2 - 2
    serving.add("urgent", prompt(1, 5), 3, priority=-1)
    assert scheduled(serving.step()) == {"urgent": 5, "first": 1}
    assert int(t.lo[1, serving.scheduler.running[0].row]) == kept


def test_who_runs_is_not_trimmed_in_vain_either(make_serving):
    """What is lacking are blocks of the full group: somebody is preempted, and finds what it had left."""
    groups = {"full": (FullAttention(), 16), "win": (SlidingWindow(8), 4)}
    serving = make_serving(groups, {"full": 20, "win": 200}, scheduler={"max_batched_tokens": 512})
    for k, (name, n) in enumerate((("first", 150), ("second", 60), ("third", 66))):
        serving.add(name, prompt(k, n), 60)
    computed = 0
    while serving.scheduler.has_work():
        computed += scheduled(serving.step()).get("second", 0)
    assert serving.finished["second"].preemptions == 1
    assert computed <= 60 + 60 - 1 + 16


def test_anchors_to_come_that_requests_share_are_given_up_together(make_serving):
    """None of them frees a block alone, and nobody is preempted."""
    serving = make_serving({"full": (FullAttention(), 16), "win": (SlidingWindow(10), 4)}, {"full": 13, "win": 8})
    serving.add("A", prompt(0, 33), 40)
    serving.step()
    for name in "BCD":
        serving.step()
        serving.add(name, prompt(0, 33), 40)
    serving.run()
    assert [(done.finish_reason, done.preemptions) for done in serving.finished.values()] == [("length", 0)] * 4


def test_a_victim_that_just_fits_comes_back(make_serving):
    serving = make_serving(FULL, 9, scheduler={"max_running": 4})
    serving.add("fits", prompt(0, 35), 2)
    serving.steps_until(lambda: serving.known("fits") == 36)
    serving.add("urgent", prompt(1, 5), 1, priority=-1)
    serving.run()
    assert (serving.finished["fits"].finish_reason, serving.finished["fits"].preemptions) == ("length", 1)


def test_texts_that_outgrow_the_tables_while_they_are_made_do_not_run_into_each_other(make_serving):
    """Tables begin with room for 128 tokens a row at this block size, and for 64 sampled ones."""
    serving = make_serving({"full": (FullAttention(), 2), "win": (SlidingWindow(3), 2)}, 200)
    for name, tokens in (("A", 60), ("B", 57), ("C", 3)):
        serving.add(name, prompt(tokens, tokens), 80)
    done = serving.run()
    assert [len(done[name].token_ids) for name in "ABC"] == [80] * 3
    assert serving.scheduler.reports.num_preemptions == 0


def test_a_text_that_outgrows_the_tables_after_sitting_a_step_out_is_whole(make_serving):
    """As the first of all rows to have 64 sampled tokens it lacks a block; another one goes on meanwhile."""
    serving = make_serving({"full": (FullAttention(), 32)}, 3)
    serving.add("waits", [7] * 10, 80, priority=1)
    serving.steps_until(lambda: serving.known("waits") == 50)
    serving.add("goes on", [2], 31)
    assert len(serving.run()["waits"].token_ids) == 80


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
