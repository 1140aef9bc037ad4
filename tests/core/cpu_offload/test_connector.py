"""Transfers from plan to end: what they pin, when keys are findable, deadlines, late ends, resets."""

from __future__ import annotations

import inside
import numpy as np
import pytest

from core.driving import LOAD, STORE, conserved, prompt
from kvtier import ChunkedLocal, FullAttention, SlidingWindow, TransferError
from kvtier.cpu_offload import store_queue
from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.transfer import TransferState

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
LENGTH = 25


def loading(make_serving, groups=FULL, blocks=16, **options):
    """Prompt 0 is in the host tier only; request "again" is loading it."""
    serving = make_serving(groups, blocks, 64, hold=[], **options)
    serving.serve("original", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, LENGTH), 3)
    assert serving.step().num_tokens == 0
    assert serving.is_running("again")
    return serving


# --- publication ----------------------------------------------------------------------------------


def test_a_host_key_is_found_only_once_its_store_has_ended(make_serving):
    serving = make_serving(FULL, 8, 64, hold=[STORE])
    serving.add("A", prompt(0, LENGTH), 1)
    serving.step()
    transfer = serving.engine.submitted[0]
    host = inside.host(serving.cache)
    assert np.all(host.arrays.mark[host.entries(transfer.groups, transfer.host)] == 1), "pending"
    serving.engine.end()
    serving.step()
    assert np.all(host.arrays.mark[host.entries(transfer.groups, transfer.host)] == 2), "ready"
    serving.engine.release()
    serving.run()


def test_a_key_is_stored_once_however_often_it_is_used_while_the_store_runs(make_serving):
    serving = make_serving(GROUPS, 64, 128, hold=[STORE])
    for k in range(4):
        serving.add(f"r{k}", prompt(0, LENGTH), 1)
        serving.step()
    stored = [(int(g), k.tobytes()) for t in serving.engine.submitted for g, k in zip(t.groups, t.keys, strict=True)]
    assert len(stored) == len(set(stored))
    serving.engine.release()
    serving.run()


def test_a_store_that_fails_publishes_nothing_and_leaves_the_device_copy(make_serving):
    serving = make_serving(FULL, 16, 64, hold=[STORE])
    serving.add("A", prompt(0, LENGTH), 1)
    serving.step()
    serving.engine.end(error="no link")
    serving.engine.release()  # the hit below has the blocks stored again
    serving.run()
    assert serving.cache.stats().host["full"].cached == 0
    assert serving.cache.stats().transfers.failed_stores == 1
    assert serving.serve("again", prompt(0, LENGTH), 1).cached_tokens == {"device": 24, "host": 0}


def test_a_partly_failed_store_publishes_what_arrived(make_serving):
    serving = make_serving(FULL, 16, 64, hold=[STORE])
    serving.add("A", prompt(0, LENGTH), 1)
    serving.step()
    serving.engine.end(error="torn", bad=[4, 5])
    serving.engine.release()
    serving.run()
    stats = serving.cache.stats()
    assert stats.host["full"].cached == 4
    assert (stats.transfers.stored_blocks, stats.transfers.failed_stores) == (4, 1)
    assert stats.transfers.stored_bytes == 4 * stats.host["full"].block_bytes
    inside.pools(serving.cache).forget_all()
    assert serving.serve("again", prompt(0, LENGTH), 1).cached_tokens == {"device": 0, "host": 16}


def test_an_unknown_end_is_an_error_of_the_engine(make_serving):
    serving = make_serving(FULL, 16, 64, hold=[])
    serving.serve("A", prompt(0, LENGTH), 1)
    serving.engine.hold = {STORE}
    serving.add("B", prompt(1, LENGTH), 1)
    serving.step()
    serving.engine.ended.append(Outcome(999))
    with pytest.raises(TransferError, match="999"):
        serving.scheduler.schedule()
    serving.engine.release()


# --- loads ----------------------------------------------------------------------------------------


def test_a_load_pins_both_ends_and_gives_them_back_when_it_has_landed(make_serving):
    serving = loading(make_serving)
    stats = serving.cache.stats()
    assert stats.host["full"].held == 6
    assert stats.device["full"].held == 7
    serving.engine.release()
    serving.step()
    assert serving.cache.stats().host["full"].held == 0
    serving.run()
    assert serving.finished["again"].cached_tokens == {"device": 0, "host": 24}


@pytest.mark.parametrize("groups", [FULL, GROUPS])
@pytest.mark.parametrize("bad", [None, [0], [1], [3], [5], [0, 1, 2]])
def test_a_failed_load_is_recomputed_and_never_tried_again(make_serving, groups, bad):
    serving = loading(make_serving, groups)
    serving.engine.end(error="no link", bad=bad)
    serving.engine.hold = {LOAD}
    serving.run()
    done = serving.finished["again"]
    assert done.finish_reason == "length"
    assert done.cached_tokens["host"] == 0
    assert len([t for t in serving.engine.submitted if t.direction is LOAD]) == 1
    assert serving.cache.stats().transfers.failed_loads == 1


def test_a_request_whose_load_failed_does_not_turn_to_a_shorter_prefix_in_the_host_tier(make_serving):
    serving = make_serving(GROUPS, 24, 64, hold=[])
    serving.serve("short", prompt(0, 13), 1)  # an anchor at 12 ...
    serving.serve("long", prompt(0, LENGTH), 1)  # ... and one at 24
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, LENGTH), 3)
    serving.step()
    (load,) = (t for t in serving.engine.live.values() if t.direction is LOAD)
    window = np.flatnonzero(load.groups == 1)
    serving.engine.end(error="torn", bad=window.tolist())
    serving.engine.hold = {LOAD}
    serving.run()
    assert serving.finished["again"].finish_reason == "length"
    assert [t.ticket for t in serving.engine.submitted if t.direction is LOAD] == [load.ticket]


def test_a_bad_host_block_is_not_offered_to_anybody_again(make_serving):
    serving = loading(make_serving)
    serving.engine.end(error="torn", bad=[2])
    serving.engine.hold = set()
    serving.run()
    inside.pools(serving.cache).forget_all()
    done = serving.serve("third", prompt(0, LENGTH), 1)
    assert sum(done.cached_tokens.values()) in (8, 24), "up to the bad block, or all if it was stored anew"


def test_all_who_share_a_failed_load_recompute(make_serving):
    serving = loading(make_serving, GROUPS)
    serving.add("sharer", prompt(0, LENGTH), 5)
    serving.step()
    assert not serving.is_running("sharer")
    serving.engine.end(error="no link", bad=[1])
    serving.engine.hold = set()
    serving.run()
    assert serving.cache.stats().transfers.failed_loads == 1


def test_by_policy_a_failed_load_ends_the_request(make_serving):
    serving = loading(make_serving, on_load_error="fail")
    serving.engine.end(error="no link")
    done = serving.run()["again"]
    assert (done.finish_reason, done.token_ids, done.cached_tokens) == ("load_error", [], {"device": 0, "host": 0})
    assert serving.serve("after", prompt(0, LENGTH), 2).finish_reason == "length"


# --- deadlines ------------------------------------------------------------------------------------


def test_an_overdue_load_is_given_up_and_its_blocks_are_quarantined_until_it_ends(make_serving):
    serving = loading(make_serving, deadline_s=5.0)
    ticket = next(iter(serving.engine.live))
    serving.engine.clock_s = 5.5
    serving.step()
    assert serving.is_running("again"), "it recomputes"
    stats = serving.cache.stats()
    assert (stats.device["full"].quarantined, stats.host["full"].quarantined) == (6, 6)
    assert stats.transfers.expired == 1
    serving.steps_until(lambda: "again" in serving.finished)
    assert not serving.scheduler.has_work(), "a copy that was given up is not waited for"
    assert serving.cache.stats().device["full"].quarantined == 6
    serving.engine.end(ticket)
    serving.run()
    assert conserved(inside.pools(serving.cache))
    assert serving.cache.stats().device["full"].usable == 16


def test_an_overdue_load_ends_the_request_by_policy(make_serving):
    serving = loading(make_serving, deadline_s=5.0, on_load_error="fail")
    serving.engine.clock_s = 5.5
    serving.step()
    serving.engine.release()
    assert serving.run()["again"].finish_reason == "load_error"


def test_a_load_that_ends_late_but_before_its_request_has_noticed_leaves_nothing_quarantined(make_serving):
    """Overdue at the commit's poll, ended at the next schedule's: the request still holds the blocks in between."""
    serving = loading(make_serving, deadline_s=5.0)
    step = serving.scheduler.schedule()
    serving.engine.clock_s = 5.5
    serving.scheduler.commit(step, [])
    assert serving.cache.stats().transfers.expired == 1
    serving.engine.release()
    serving.run()


@pytest.mark.parametrize("when", ["waiting for the end", "aborted", "reset", "aborted before", "reset before"])
def test_quarantine_ends_whatever_became_of_the_request(make_serving, when):
    serving = loading(make_serving, deadline_s=5.0)
    if when == "aborted before":
        serving.scheduler.abort("again")
    if when == "reset before":
        serving.cache.reset()
    serving.engine.clock_s = 5.5
    serving.step()
    if when == "aborted":
        serving.scheduler.abort("again")
    if when == "reset":
        serving.cache.reset()
    serving.step()
    serving.engine.release()
    serving.run()


def test_an_overdue_store_makes_its_key_a_miss_and_frees_all_when_it_ends_late(make_serving):
    serving = make_serving(FULL, 8, 64, hold=[STORE], deadline_s=5.0)
    serving.add("A", prompt(0, LENGTH), 1)
    serving.step()
    serving.engine.clock_s = 5.5
    serving.step()
    stats = serving.cache.stats()
    assert (stats.device["full"].quarantined, stats.host["full"].quarantined) == (6, 6)
    assert not serving.scheduler.has_work()
    serving.engine.end()
    serving.run()
    assert serving.cache.stats().device["full"].empty == 8


def test_a_hit_that_finds_no_block_beside_it_is_let_go_again(make_serving):
    """Blocks that a store reads count as free until the engine cannot order a writer behind it."""
    serving = make_serving(FULL, 8, 64, hold=[], deadline_s=5.0)
    serving.serve("hit", prompt(0, 17), 1)
    serving.engine.hold, serving.engine.can_order = {STORE}, False
    serving.add("fences", prompt(1, 16), 1)
    serving.step()
    before = serving.cache.stats().device["full"]
    assert (before.cached, before.fenced, before.empty) == (4, 4, 0)
    serving.add("again", prompt(0, 17), 1)
    serving.step()
    assert not serving.is_running("again")
    after = serving.cache.stats().device["full"]
    assert (after.held, after.cached, after.quarantined) == (0, 4, 4)
    serving.engine.release()
    serving.run()
    assert serving.finished["again"].finish_reason == "length"


def test_blocks_of_an_overdue_store_that_a_request_holds_stay_with_it_and_are_quarantined_after(make_serving):
    serving = make_serving(FULL, 16, 64, hold=[STORE], deadline_s=5.0)
    serving.add("A", prompt(0, 9), 8)
    serving.step()
    serving.engine.clock_s = 5.5
    serving.steps_until(lambda: "A" in serving.finished)
    serving.step()
    assert serving.cache.stats().device["full"].quarantined >= 2
    serving.engine.end()
    serving.engine.hold = set()
    serving.run()


def test_a_block_of_an_overdue_store_that_is_hit_serves_the_hit(make_serving):
    serving = make_serving(FULL, 16, 64, hold=[STORE], deadline_s=5.0)
    serving.add("A", prompt(0, 9), 12)
    serving.step()
    serving.engine.clock_s = 5.5
    serving.step()
    serving.add("B", prompt(0, 9), 3)
    serving.steps_until(lambda: "B" in serving.finished)
    assert serving.finished["B"].cached_tokens["device"] == 8
    serving.engine.release()
    serving.run()


# --- reset ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize("error", ["", "no link"])
def test_nothing_from_before_a_reset_is_ever_found(make_serving, direction, error):
    if direction is LOAD:
        serving = loading(make_serving, GROUPS)
    else:
        serving = make_serving(GROUPS, 24, 64, hold=[STORE])
        serving.add("again", prompt(0, LENGTH), 3)
        serving.step()
    serving.cache.reset()
    serving.audit()
    serving.engine.end(error=error)
    serving.engine.hold = set()
    serving.run()
    serving.cache.reset()
    assert sum(serving.serve("after", prompt(0, LENGTH), 1).cached_tokens.values()) == 0


def test_a_reset_between_schedule_and_commit_publishes_nothing_of_that_step(make_serving):
    serving = make_serving(GROUPS, 24, 64, hold=[])
    serving.add("A", prompt(0, LENGTH), 6)
    step, ids = serving.begin()
    serving.cache.reset()
    serving.end(step, ids)
    serving.run()
    assert sum(serving.serve("B", prompt(0, LENGTH), 1).cached_tokens.values()) == 0
    assert serving.finished["A"].finish_reason == "length"


def test_a_reset_drops_planned_stores_and_leaves_no_fence(make_serving, monkeypatch):
    monkeypatch.setattr(store_queue, "STORE_BYTES_IN_FLIGHT", 1)
    monkeypatch.setattr(store_queue, "STORE_BYTES_PER_TRANSFER", 128)
    serving = make_serving(FULL, 24, 64, hold=[STORE])
    serving.add("A", prompt(0, LENGTH), 6)
    serving.step()
    states = [t.state for t in inside.connector(serving.cache).ledger.live()]
    assert TransferState.PLANNED in states
    serving.cache.reset()
    serving.audit()
    assert TransferState.PLANNED not in [t.state for t in inside.connector(serving.cache).ledger.live()]
    serving.engine.release()
    serving.run()
    assert serving.cache.stats().host["full"].empty == 64
