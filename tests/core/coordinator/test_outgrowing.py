"""What can never fit: prompts that are refused, and texts that outgrow pools or tables."""

from __future__ import annotations

import pytest

from core.driving import STORE, Serving, prompt, scheduled
from kvtier import (
    ChunkedLocal,
    FullAttention,
    RequestTooLarge,
    SlidingWindow,
)

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


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


# --- steps in order -------------------------------------------------------------------------------


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


def test_who_runs_alone_and_lacks_blocks_that_a_hanging_copy_keeps_ends_with_capacity(make_serving):
    """Empty pools have room for it. Nothing is under way that will end, so it would wait for ever."""
    serving = make_serving(FULL, 12, 64, hold=[STORE], deadline_s=5.0)
    serving.add("stored", prompt(0, 21), 1)
    serving.step()
    serving.engine.clock_s = 5.5
    serving.step()
    assert serving.cache.stats().device["full"].quarantined == 5
    serving.add("grows", prompt(1, 25), 20)
    serving.steps_until(lambda: "grows" in serving.finished, limit=25)
    done = serving.finished["grows"]
    assert (done.finish_reason, len(done.token_ids)) == ("capacity", 4), "29 tokens, of which 28 are in 7 blocks"
    serving.engine.release()
    serving.run()


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
