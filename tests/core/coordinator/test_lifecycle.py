"""abort, finish, cancel and reset in every state of a request, and what is reported."""

from __future__ import annotations

import inside
import numpy as np
import pytest

from core.driving import LOAD, STORE, prompt
from kvtier import ChunkedLocal, DuplicateRequest, FullAttention, SlidingWindow
from kvtier.testing import expected_tokens

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
LENGTH = 25
STATES = ["arrived", "waiting", "waiting for a twin", "waiting for a load", "loading", "prefill", "decode", "preempted"]


def in_state(make_serving, state: str):
    """A serving in which request "A" is in ``state``; others may be about."""
    serving = make_serving(
        GROUPS, {"full": 16, "win": 10, "chunk": 10}, 64, hold=[], scheduler={"max_batched_tokens": 32}
    )
    if "load" in state:
        serving.serve("before", prompt(0, LENGTH), 1)
        inside.pools(serving.cache).forget_all()
        serving.engine.hold = {LOAD}
        if state == "waiting for a load":
            serving.add("first", prompt(0, LENGTH), 3)
    if state == "waiting for a twin":
        serving.add("twin", prompt(0, 40), 3)
    if state == "waiting":
        serving.add("large", prompt(1, 60), 3)
    if state == "prefill":
        serving.add("A", prompt(0, 40), 6)
    else:
        serving.add("A", prompt(0, LENGTH), 6)
    if state == "arrived":
        return serving
    serving.step()
    if state == "decode":
        serving.step()
    if state == "preempted":
        serving.add("large", prompt(1, 62), 1, priority=-1)
        serving.step()
        assert [s.request.request_id for s in serving.scheduler.waiting] == ["A"]
    kind = {"loading": "loading", "prefill": "running", "decode": "running"}.get(state, "waiting")
    seqs = [*serving.scheduler.running, *serving.scheduler.waiting]
    assert next(s.state.value for s in seqs if s.request.request_id == "A") == kind
    return serving


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", ["abort", "finish"])
def test_a_request_can_be_ended_in_any_state(make_serving, state, how):
    serving = in_state(make_serving, state)
    assert getattr(serving.scheduler, how)("A") is True
    assert getattr(serving.scheduler, how)("A") is False, "it is ending already"
    serving.step()
    done = serving.finished["A"]
    assert done.finish_reason == {"abort": "abort", "finish": "stop"}[how]
    assert done.token_ids == expected_tokens(
        serving.spec, list(serving.requests["A"].prompt_token_ids), len(done.token_ids)
    )
    assert getattr(serving.scheduler, how)("A") is False, "it has ended"
    serving.engine.release()
    serving.run()
    serving.serve("whole pool", prompt(7, 63), 1)


@pytest.mark.parametrize("state", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["abort", "finish"])
def test_an_end_between_schedule_and_commit_acts_at_that_commit_without_the_sampled_token(make_serving, state, how):
    serving = in_state(make_serving, state)
    before = serving.known("A") - len(serving.requests["A"].prompt_token_ids)
    step, ids = serving.begin()
    assert "A" in step.request_ids
    assert getattr(serving.scheduler, how)("A")
    serving.end(step, ids)
    assert len(serving.finished["A"].token_ids) == before
    serving.engine.release()
    serving.run()


def aborted_in_its_last_commit(make_serving):
    """Another thread aborts A after the commit has read its mail and before the request is reported."""
    serving = make_serving(FULL)
    serving.add("A", prompt(0, 5), 1)
    coordinator = inside.coordinator(serving.cache)
    plan_stores = coordinator.plan_stores
    coordinator.plan_stores = lambda: (serving.scheduler.abort("A"), plan_stores())
    serving.step()
    coordinator.plan_stores = plan_stores
    return serving


def test_an_end_that_comes_while_the_commit_ends_the_request_harms_nobody(make_serving):
    serving = aborted_in_its_last_commit(make_serving)
    assert serving.finished["A"].finish_reason in ("length", "abort")
    serving.step()
    serving.serve("B", prompt(1, 5), 2)


def test_an_end_for_an_old_request_does_not_hit_a_new_one_of_its_name(make_serving):
    serving = aborted_in_its_last_commit(make_serving)
    assert serving.finished.pop("A").finish_reason in ("length", "abort")
    assert serving.serve("A", prompt(1, 5), 3).finish_reason == "length"


def test_ending_an_unknown_request_is_answered_with_false(make_serving):
    serving = make_serving(FULL)
    assert serving.scheduler.abort("nobody") is False
    assert serving.scheduler.finish("nobody") is False


def test_an_id_is_taken_until_its_request_is_reported(make_serving):
    serving = make_serving(FULL)
    serving.add("A", prompt(0, 5), 2)
    with pytest.raises(DuplicateRequest, match="'A'"):
        serving.add("A", prompt(1, 5), 2)
    serving.scheduler.abort("A")
    with pytest.raises(DuplicateRequest):
        serving.add("A", prompt(1, 5), 2)
    serving.run()
    serving.finished.clear()
    assert serving.serve("A", prompt(1, 5), 2).finish_reason == "length"


def test_eos_ends_a_request_and_is_part_of_its_text(make_serving):
    serving = make_serving(GROUPS)
    text = expected_tokens(serving.spec, prompt(0, 9), 12)
    done = serving.serve("A", prompt(0, 9), 12, eos_token_ids=(text[5], 1000))
    assert done.finish_reason == "stop"
    assert done.token_ids == text[: text.index(text[5]) + 1]


def test_eos_as_the_last_allowed_token_is_a_stop(make_serving):
    serving = make_serving(GROUPS)
    text = expected_tokens(serving.spec, prompt(0, 9), 3)
    assert serving.serve("A", prompt(0, 9), 3, eos_token_ids=text[2:]).finish_reason == "stop"


def test_many_eos_ids_and_none_may_run_together(make_serving):
    serving = make_serving(GROUPS)
    text = expected_tokens(serving.spec, prompt(0, 9), 4)
    serving.add("many", prompt(0, 9), 4, eos_token_ids=[*range(200, 230), text[3]])
    serving.add("none", prompt(1, 9), 4)
    done = serving.run()
    assert (done["many"].finish_reason, done["none"].finish_reason) == ("stop", "length")


# --- cancel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", range(5))
def test_a_cancelled_step_publishes_nothing_and_its_requests_run_again(make_serving, when):
    serving = make_serving(GROUPS, 40, 64, scheduler={"max_batched_tokens": 14})
    for k in range(3):
        serving.add(str(k), prompt(k, 11), 6)
    for _ in range(when):
        serving.step()
    names = serving.cancelled().request_ids
    waiting = [s.request.request_id for s in serving.scheduler.waiting]
    assert set(names) <= set(waiting)
    serving.run()
    assert all(serving.finished[name].preemptions == 1 for name in names)


def test_blocks_of_a_cancelled_forward_are_not_found(make_serving):
    serving = make_serving(GROUPS, 40, 64, hold=[])
    serving.add("A", prompt(0, LENGTH), 3)
    serving.cancelled()
    serving.scheduler.abort("A")
    serving.run()
    assert sum(serving.serve("B", prompt(0, LENGTH), 1).cached_tokens.values()) == 0
    assert serving.cache.stats().host["full"].cached <= 6


def test_every_step_may_be_cancelled_once(make_serving):
    serving = make_serving(GROUPS, {"full": 12, "win": 8, "chunk": 8}, 64, scheduler={"max_batched_tokens": 10})
    for k in range(3):
        serving.add(str(k), prompt(k, 9), 5)
    while serving.scheduler.has_work():
        serving.cancelled()
        serving.step()


def test_a_cancelled_empty_step_is_fine(make_serving):
    serving = make_serving(FULL)
    serving.scheduler.cancel(serving.scheduler.schedule())
    serving.scheduler.cancel(serving.scheduler.schedule())
    assert not serving.scheduler.has_work()


def test_an_abort_before_a_cancel_still_ends_the_request(make_serving):
    serving = make_serving(FULL)
    serving.add("A", prompt(0, 9), 3)
    step = serving.scheduler.schedule()
    serving.scheduler.abort("A")
    serving.scheduler.cancel(step)
    serving.run()
    assert serving.finished["A"].finish_reason == "abort"


# --- reset ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_a_reset_in_any_state_leaves_texts_right_and_nothing_old_to_be_found(make_serving, state):
    serving = in_state(make_serving, state)
    serving.cache.reset()
    serving.audit()
    serving.engine.release()
    serving.run()
    assert all(done.finish_reason == "length" for done in serving.finished.values())


def test_what_runs_across_a_reset_is_not_found_afterwards(make_serving):
    serving = make_serving(GROUPS, 40, 64, hold=[])
    serving.add("A", prompt(0, LENGTH), 8)
    serving.step()
    serving.cache.reset()
    serving.run()
    assert sum(serving.serve("B", prompt(0, LENGTH), 1).cached_tokens.values()) == 0


def test_what_is_preempted_after_a_reset_recomputes_and_is_found_again(make_serving):
    serving = make_serving(GROUPS, 40, 64, hold=[])
    serving.add("A", prompt(0, LENGTH), 8)
    serving.step()
    serving.cache.reset()
    serving.cancelled()
    step = serving.step()
    assert step.num_tokens == LENGTH + 1
    serving.run()
    assert serving.serve("B", prompt(0, LENGTH), 1).cached_tokens["device"] == 24


def test_stores_planned_by_an_end_after_a_reset_are_not_of_old_content(make_serving):
    serving = make_serving(GROUPS, 40, 64, hold=[STORE])
    serving.add("A", prompt(0, LENGTH), 8)
    serving.step()
    serving.engine.release()
    serving.cache.reset()
    serving.run()
    assert all(pool.cached == 0 for pool in serving.cache.stats().host.values())
    a = inside.pools(serving.cache).arrays
    assert not np.any(a.mark)


def test_a_block_that_two_twins_fill_is_one_block_in_every_group(make_serving):
    """Both compute the rest of a shared prompt and the same text: each block they seal becomes one, in all groups."""
    serving = make_serving({"first": (FullAttention(), 4), "second": (FullAttention(), 4)}, 128)
    for name in "AB":
        serving.add(name, prompt(0, 18), 12)
    serving.steps_until(lambda: min(serving.known("A"), serving.known("B")) > 26)
    tables = inside.coordinator(serving.cache).tables
    for g in range(2):
        one, other = (tables.table(g)[seq.row, :6].tolist() for seq in serving.scheduler.running)
        assert 0 not in one
        assert one == other
    serving.run()


def test_a_block_that_a_decode_fills_while_a_load_is_bringing_its_twin_stays_the_rows_own(make_serving):
    serving = make_serving(FULL, 32, 32, hold=[])
    text = serving.serve("first", prompt(0, 9), 8).token_ids
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, 9), 8)  # has 8 tokens from the host, and computes what the host has as well
    serving.step()
    serving.engine.end()
    serving.steps_until(lambda: serving.known("again") == 10)
    serving.add("next turn", [*prompt(0, 9), *text[:8]], 1)
    serving.steps_until(lambda: serving.known("again") == 16)  # past the border at 12
    assert serving.engine.live, "the load is still under way"
    serving.engine.release()
    done = serving.run()
    assert done["again"].token_ids == text
    assert done["next turn"].cached_tokens["host"] == 8
