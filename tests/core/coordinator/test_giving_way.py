"""Who gives way to whom: rows, blocks, windows and anchors; nobody does in vain, and never the oldest."""

from __future__ import annotations

import inside
import pytest
from breadth import sample

from core.driving import LOAD, STORE, prompt, scheduled
from kvtier import (
    ChunkedLocal,
    FullAttention,
    SlidingWindow,
)
from kvtier.coordinator import room
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.tracked import State

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


# --- service order --------------------------------------------------------------------------------


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


def test_what_is_raised_while_requests_give_way_leaves_no_hit_held(make_serving, monkeypatch):
    """A signal may come at any time."""
    serving = make_serving(FULL, 11)
    stem = prompt(1, 8)
    serving.serve("before", [*stem, 7])
    serving.add("late", prompt(0, 20), 8, priority=1)
    serving.step()
    serving.add("urgent", [*stem, *prompt(2, 20)], 2)

    def interrupted(self, seq, comes_back):
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


def test_a_row_that_sat_a_step_out_and_was_given_up_serves_another_in_that_step(make_serving, monkeypatch):
    """B lacks a block and sits out; then A's block turns out to be held up by a store that hangs, so B gives way, and
    W, whose prefix another store was to bring into the host tier, begins in B's row."""
    monkeypatch.setattr(room, "MARGIN", 0)
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


def test_blocks_of_windows_are_given_up_before_anybody_is_preempted(make_serving):
    """Blocks that a row keeps only as anchors go first."""
    serving = make_serving({"win": (SlidingWindow(5), 4)}, 5)
    serving.add("A", prompt(0, 8), 20)
    serving.add("B", prompt(1, 8), 20)
    serving.run()
    assert serving.scheduler.reports.num_preemptions == 0


# --- steps in order -------------------------------------------------------------------------------


def test_who_is_aborted_during_a_step_that_is_cancelled_has_ended_and_was_not_sent_back(make_serving):
    serving = make_serving(FULL, 20, 20)
    serving.add("A", prompt(0, 20), 9)
    step, _ = serving.begin()
    assert serving.scheduler.abort("A")
    serving.scheduler.cancel(step)
    serving.run()
    assert (serving.finished["A"].finish_reason, serving.finished["A"].preemptions) == ("abort", 0)


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
