"""``explain``: each line of it against the cache's own books."""

from __future__ import annotations

from types import SimpleNamespace

import inside
import numpy as np
import pytest
from model.metrics import check_journal

from core.driving import LOAD, STORE, prompt
from kvtier import CacheManager, ConfigError, FullAttention, InvalidRequest, Request, SlidingWindow, explain
from kvtier.coordinator.boundaries import Boundaries, End
from kvtier.coordinator.eviction_watch import EvictionWatch
from kvtier.machine.journal import Copied, Journal, PushedOut, Runs, SentBack

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4)}


def told(serving, request_id, **options):
    return explain(serving.cache.journal.since(), request_id, **options)


def preempted_serving(make_serving):
    """ "story" hits in two tiers, waits for its load, decodes, gives way to an urgent request, and comes back."""
    serving = make_serving(GROUPS, {"full": 16, "win": 24}, 64, hold=[], journal_events=1000)
    serving.serve("before", prompt(0, 33), 1)
    pools = inside.pools(serving.cache)
    pools.forget_all()
    serving.serve("shorter", prompt(0, 17), 1)  # its full blocks are on the device now, the others' in the host tier
    serving.engine.hold = {LOAD}
    serving.add("story", prompt(0, 37), 24)
    serving.step()
    serving.step()
    serving.engine.release()
    serving.steps_until(lambda: serving.known("story") > 45)
    serving.add("urgent", prompt(7, 40), 2, priority=-1)
    serving.run()
    return serving


def test_a_request_that_was_preempted_waited_for_a_load_and_hit_in_two_tiers(make_serving):
    serving = preempted_serving(make_serving)
    stats, report, story = serving.cache.stats(), serving.finished["story"], told(serving, "story")
    first = story.hits[0]
    assert story.is_whole
    assert (story.state, story.finish_reason) == ("finished", report.finish_reason)
    assert (story.prompt_tokens, story.generated_tokens) == (37, len(report.token_ids))
    assert {"device": first.device_tokens, "host": first.host_tokens} == report.cached_tokens
    assert first.device_tokens > 0 < first.host_tokens
    assert first.tokens + first.computed_tokens == first.known_tokens == 37
    assert [(end - start) for start, end, tier in first.sources if tier == "computed"] == [first.computed_tokens]
    assert (first.limited_by, first.missing_from) == ("full", 32)
    [load] = [event.fact for event in serving.cache.journal.since() if isinstance(event.fact, Copied)][:1]
    assert first.load.blocks == load.blocks
    assert first.load.seconds == load.seconds
    assert sum(first.load.blocks.values()) <= stats.transfers.loaded_blocks
    assert [(back.why, back.group, back.by) for back in story.preemptions] == [("blocks", "full", "urgent")]
    assert stats.preempted_for == {"full": 1, "win": 0}
    assert report.preemptions == len(story.preemptions) == stats.requests["preemptions"]
    assert len(story.hits) == 2, "it came back"
    assert story.hits[1].known_tokens > 37
    assert all(wait.seconds is not None for wait in story.waits)
    assert story.queue_s <= story.first_token_s <= story.seconds
    check_journal(serving.cache)


def test_the_story_in_words_names_what_happened_in_its_order(make_serving):
    serving = preempted_serving(make_serving)
    lines = told(serving, "story", compute_s=lambda start, end: (end - start) * 0.5).lines()
    text = "\n".join(lines)
    parts = [
        "request story: finished, 24 generated tokens, 37 prompt tokens",
        "admitted: 32 of 37 tokens hit (16 on the device, 16 in the host tier)",
        "loaded ",
        "computing the 32 tokens would have taken about 16.00 s",
        "computed the other 5 tokens in",
        "preempted: request urgent needed blocks of full",
        "admitted: ",
        "ended with 'length'",
    ]
    at = 0
    for part in parts:
        assert part in text[at:], (part, text)
        at = text.index(part, at)


def test_the_group_that_limits_a_hit_is_named_with_its_token(make_serving):
    """A window's blocks in the middle of a text are not kept: full attention would have allowed more."""
    serving = make_serving(GROUPS, 40, journal_events=1000)
    inside.pass_nothing(serving.cache)
    serving.serve("long", prompt(0, 41), 1)
    serving.serve("part", [*prompt(0, 23), 9, 9, 9, 9, 9], 1)
    hit = told(serving, "part").hits[0]
    assert (hit.tokens, hit.full_tokens, hit.limited_by) == (0, 20, "win")
    assert 12 <= hit.missing_from < 20, "one of the blocks that a hit of 20 tokens needs"
    assert any("limited by win, which lacked the block from token" in line for line in told(serving, "part").lines())


@pytest.mark.parametrize("shared", ["full", "none"])
def test_a_full_group_that_limits_a_hit_names_the_first_missing_block(make_serving, shared):
    serving = make_serving(FULL, 40, journal_events=1000)
    serving.serve("before", prompt(0, 13), 1)
    serving.serve("after", [*(prompt(0, 13) if shared == "full" else []), *prompt(5, 20)], 1)
    hit = told(serving, "after").hits[0]
    assert (hit.limited_by, hit.missing_from) == ("full", 12 if shared == "full" else 0)


def test_waits_say_why_and_how_long(make_serving):
    serving = make_serving(FULL, 20, scheduler={"max_batched_tokens": 64}, journal_events=1000)
    serving.add("large", prompt(0, 60), 8)
    serving.step()
    serving.add("blocked", prompt(1, 40), 1)
    serving.add("behind it", prompt(2, 4), 1)
    serving.step()
    now = told(serving, "blocked")
    assert (now.state, now.waits[-1].reason, now.waits[-1].seconds) == ("waiting", "blocks", None)
    assert now.waits[-1].lacking == {"full": (10, 4)}
    assert "needs 10, has 4" in now.lines()[-1]
    serving.run()
    later = told(serving, "blocked")
    assert later.waits[-1].seconds > 0
    assert later.pushed_out, "the other one's blocks are cached no longer"
    check_journal(serving.cache)


def test_a_request_behind_a_twin_names_it(make_serving):
    serving = make_serving(FULL, 40, scheduler={"max_batched_tokens": 8}, journal_events=1000)
    serving.add("first", prompt(0, 30), 1)
    serving.step()
    serving.add("second", prompt(0, 30), 1)
    serving.step()
    assert told(serving, "second").waits[-1].behind == "first"
    serving.run()
    assert told(serving, "second").hits[0].tokens == 28


def test_what_a_request_pushed_out_adds_up_to_the_pools_counters(make_serving):
    serving = make_serving(FULL, 20, 10, hold=[], journal_events=1000)
    for k in range(6):
        serving.serve(f"r{k}", prompt(k, 30), 9)
    stats = serving.cache.stats()
    for tier, pool in (("device", stats.device["full"]), ("host", stats.host["full"])):
        mine = [e for k in range(6) for e in told(serving, f"r{k}").pushed_out if e.tier == tier]
        assert sum(e.blocks["full"] for e in mine) == pool.evicted > 0
        assert {e.beside for e in mine} == {1}
    assert "pushed out of the device tier, for it alone" in str(told(serving, "r5"))


def test_decodes_of_one_batch_share_what_they_push_out(make_serving):
    serving = make_serving(FULL, 12, journal_events=1000)
    serving.serve("before", prompt(0, 33), 1)
    serving.add("a", prompt(1, 7), 8)
    serving.add("b", prompt(2, 7), 8)
    serving.run()
    shared = [event.fact for event in serving.cache.journal.since() if isinstance(event.fact, PushedOut)]
    assert ("a", "b") in {fact.by for fact in shared}
    assert "for it and others in its steps" in str(told(serving, "a"))


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_fails_says_why_in_the_log_and_in_the_journal(make_serving, caplog, direction):
    serving = make_serving(FULL, 20, 20, hold=[STORE], journal_events=1000)
    serving.add("a", prompt(0, 17), 1)
    serving.steps_until(lambda: serving.engine.live)
    if direction == "store":
        serving.engine.end(error="host memory is gone")
        serving.run()
    else:
        serving.engine.release()
        serving.run()
        inside.pools(serving.cache).forget_all()
        serving.engine.hold = {LOAD}
        serving.add("again", prompt(0, 17), 1)
        serving.step()
        serving.engine.end(error="the link is down")
        serving.run()
        again = told(serving, "again")
        assert (again.hits[0].load.error, again.preemptions[0].why) == ("the link is down", "load_failed")
        assert any("failed after" in line and "the link is down" in line for line in again.lines())
    error = "host memory is gone" if direction == "store" else "the link is down"
    [line] = [record.getMessage() for record in caplog.records if record.name == "kvtier.transfers"]
    assert line == f"a {direction} lost 4 of 4 blocks: {error}"
    [copied] = [event.fact for event in serving.cache.journal.since() if getattr(event.fact, "error", "")]
    assert (copied.direction, copied.error, copied.bad_blocks) == (direction, error, 4)


def test_a_link_that_fails_all_the_time_writes_a_line_a_second(make_serving, caplog):
    serving = make_serving(FULL, 40, 40, hold=[STORE])
    for k in range(5):
        serving.add(f"r{k}", prompt(k, 9), 1)
        serving.steps_until(lambda: serving.engine.live)
        serving.engine.clock_s += 0.3
        serving.engine.end(error="no")
        serving.step()
    texts = [record.getMessage() for record in caplog.records if record.name == "kvtier.transfers"]
    assert texts == ["a store lost 2 of 2 blocks: no", "a store lost 2 of 2 blocks: no (3 more since the last line)"]


def test_an_overdue_copy_is_told(make_serving, caplog):
    serving = make_serving(FULL, 40, 40, hold=[STORE], deadline_s=5.0, journal_events=100)
    serving.add("a", prompt(0, 9), 1)
    serving.steps_until(lambda: serving.engine.live)
    serving.engine.clock_s += 6
    serving.step()
    assert "not ended after 5 s" in caplog.text
    serving.engine.end()
    serving.run()


def test_a_journal_forgets_the_oldest_and_says_so(make_serving):
    serving = make_serving(FULL, 40, journal_events=4)
    serving.serve("old", prompt(0, 9), 1)
    serving.serve("new", prompt(1, 9), 1)
    journal = serving.cache.journal
    assert [event.number for event in journal.since()] == list(range(journal.count - 4, journal.count))
    assert told(serving, "old") is None
    part = told(serving, "new")
    assert not part.is_whole
    assert (part.state, part.prompt_tokens, part.queue_s) == ("finished", None, None)
    assert "its first events are forgotten" in str(part)


def test_an_id_that_comes_again_is_explained_anew(make_serving):
    serving = make_serving(FULL, 40, journal_events=1000)
    serving.serve("a", prompt(0, 9), 3)
    del serving.finished["a"]
    serving.add("a", prompt(0, 30), 9)
    serving.step()
    now = told(serving, "a")
    assert (now.state, now.prompt_tokens, now.finish_reason, len(now.hits)) == ("running", 30, None, 1)
    serving.run()


def test_batches_that_push_out_content_step_after_step_share_an_event(make_serving):
    serving = make_serving(FULL, 60, journal_events=1000)
    serving.serve("before", prompt(0, 200), 1)
    for k in range(5):
        serving.add(f"r{k}", prompt(k + 1, 3), 30)
    serving.run()
    shared = [e.fact for e in serving.cache.journal.since() if isinstance(e.fact, PushedOut) and len(e.fact.by) > 1]
    assert 1 <= len(shared) <= 4
    check_journal(serving.cache)


def test_without_a_journal_nothing_is_kept(make_serving):
    serving = make_serving(FULL, 40)
    serving.serve("a", prompt(0, 9), 1)
    assert not serving.cache.journal.is_on
    assert serving.cache.journal.since() == []
    assert told(serving, "a") is None


@pytest.mark.parametrize("size", [-1, 1.5, "many", 2**40, None, True])
def test_a_size_that_no_journal_can_have_is_refused(make_cache, size):
    with pytest.raises(ConfigError, match="journal_events must be an integer"):
        make_cache(FULL, 8, journal_events=size)


def test_sequences_of_a_manager_are_explained_too(make_cache):
    cache = make_cache(FULL, 12, journal_events=100)
    manager = CacheManager(cache)
    sequence = manager.open(Request("mine", prompt(0, 9), 1))
    assert manager.start(sequence) is None
    manager.stop(sequence)
    assert manager.start(sequence) is None
    step = manager.plan([(sequence, 9)])
    manager.commit(step, [5])
    story = explain(cache.journal.since(), "mine")
    assert (story.state, story.finish_reason, len(story.hits)) == ("finished", "length", 2)
    assert [back.why for back in story.preemptions] == ["stopped"]
    names = [type(event.fact).__name__ for event in cache.journal.since()]
    assert names == ["Arrived", "Admitted", "Runs", "SentBack", "Admitted", "Runs", "Prefilled", "Ended"]


def test_braces_in_an_engines_words_are_told_as_they_stand():
    """They were taken for fields of a template, and the story could not be told."""
    journal, why = Journal(4), "load failed: driver said {'code': 700}, {by}, {}"
    journal.add("mine", Runs())
    journal.add("mine", SentBack(why, "full", "{other}"))
    story = explain(journal.since(), "mine")
    assert f"sent back: {why}" in str(story)
    assert story.to_dict()["lines"] == story.lines()


@pytest.mark.parametrize("bad", [[], {}, None, 5, b"mine", np.array(["mine"])], ids=lambda bad: type(bad).__name__)
def test_what_is_no_request_id_is_not_explained(bad):
    with pytest.raises(InvalidRequest, match="request_id must be str"):
        explain([], bad)


def test_events_are_plain_values_when_asked():
    journal = Journal(2)
    journal.add("a", Runs())
    [event] = journal.since()
    assert event.to_dict() == {"number": 0, "at_s": event.at_s, "request_id": "a", "fact": {"what": "Runs"}}


# --- what was not found -------------------------------------------------------------------------------


def missed(serving, name):
    return [(of.start, of.end, of.why, of.group, of.ended) for of in told(serving, name).hits[0].missed]


def test_a_new_prompt_goes_on_as_none_did(make_serving):
    serving = make_serving(GROUPS, 40, journal_events=1000)
    serving.serve("first", prompt(0, 21), 1)
    serving.serve("on", [*prompt(0, 21), *prompt(1, 12)], 1)
    assert missed(serving, "first") == [(0, 20, "parted", "", "")]
    assert missed(serving, "on") == [(20, 32, "parted", "", "")]
    assert "tokens 20 to 32: no text that is remembered goes on like this" in str(told(serving, "on"))
    serving.serve("again", prompt(0, 21), 1)
    assert missed(serving, "again") == []


def test_what_was_pushed_out_names_the_requests_that_got_its_blocks(make_serving):
    serving = make_serving(FULL, 12, journal_events=1000)
    serving.serve("long ago", prompt(9, 40), 1)
    serving.serve("before", prompt(0, 33), 1)  # it has taken blocks itself, but none of its own
    serving.serve("taker", prompt(1, 20), 1)
    serving.serve("other", prompt(2, 16), 1)
    serving.serve("again", prompt(0, 33), 1)
    gone = told(serving, "again").hits[0].missed[0]
    pushed = [event for event in serving.cache.journal.since() if isinstance(event.fact, PushedOut)]
    assert missed(serving, "again")[0][2:] == ("pushed_out", "full", "prompt")
    assert gone.pushed_for == ["other", "taker"] and gone.pushed_s > 0
    assert {name for event in pushed for name in event.fact.by} >= {"other", "taker"}
    assert "were pushed out: blocks of full went to request other, taker, the last" in str(told(serving, "again"))
    serving.serve("later", prompt(3, 40), 1)
    late = explain(serving.cache.journal.since(), "again", name_of=lambda name: f"<{name}>").hits[0].missed[0]
    assert late.pushed_for == ["<other>", "<taker>"], "what came later has no part in it"


def test_what_is_gone_otherwise_names_nobody(make_serving):
    serving = make_serving(FULL, 40, journal_events=1000)
    serving.serve("before", prompt(0, 33), 1)
    inside.pools(serving.cache).forget_all()
    serving.serve("again", prompt(0, 33), 1)
    gone = told(serving, "again").hits[0].missed[0]
    assert (gone.why, gone.pushed_for, gone.pushed_s) == ("pushed_out", [], None)
    assert "nobody remembers" in str(told(serving, "again"))
    serving.cache.reset_prefix_cache()
    serving.serve("later", prompt(0, 33), 1)
    assert missed(serving, "later") == [(0, 32, "parted", "", "")], "a reset forgets all"


def test_an_end_that_does_not_pay_is_told_from_what_was_pushed_out(make_serving, monkeypatch):
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is End.PROMPT)
    serving = make_serving(GROUPS, 60, journal_events=1000)
    said = [*prompt(0, 21), *serving.serve("before", prompt(0, 21), 24).token_ids]
    serving.serve("on", [*said, *prompt(1, 9)], 1)
    [not_kept, parted] = missed(serving, "on")
    assert not_kept == (20, 44, "not_kept", "win", "answer") and parted[2] == "parted"
    assert "win had nothing for a hit that ends there, at an answer's end: such ends did not pay" in str(
        told(serving, "on")
    )


def test_where_prompts_part_for_the_first_time_nothing_was_kept(make_serving):
    serving = make_serving(GROUPS, 60, journal_events=1000)
    inside.pass_nothing(serving.cache)
    for n in range(3):
        serving.serve(f"{n}", [*prompt(0, 20), *prompt(n + 1, 13)], 1)
    assert missed(serving, "1")[0] == (0, 20, "not_kept", "win", "")
    assert "win had nothing for a hit that ends there; no text had ended there" in str(told(serving, "1"))
    assert missed(serving, "2") == [(20, 32, "parted", "", "")]
    serving.serve("large", prompt(9, 237), 1)
    serving.serve("3", [*prompt(0, 20), *prompt(7, 13)], 1)
    gone, parted = missed(serving, "3")
    assert gone == (0, 20, "pushed_out", "full", "parting") and parted == (20, 32, "parted", "", "")


def test_a_cache_without_a_journal_marks_nothing(make_serving):
    serving = make_serving(FULL, 40)
    serving.serve("before", prompt(0, 33), 1)
    assert inside.num_marks(serving.cache) == 0


def test_a_request_that_comes_back_in_another_row_is_named_once():
    """The names of an event are added to, and nobody's is looked at again."""
    journal, evicted, numbers = Journal(10), np.zeros(1, np.int64), np.array([1, 2, 3])
    pools = SimpleNamespace(column=lambda which: evicted)
    watch = EvictionWatch(journal, SimpleNamespace(spec=SimpleNamespace(names=["full"]), pools=pools), None)
    roster = SimpleNamespace(numbers=numbers, ids=lambda rows: [f"r{numbers[row]}" for row in rows], entered=3)
    for rows, held_by in (([0, 1], [1, 2, 3]), ([1, 2], [1, 2, 3]), ([0, 1], [4, 1, 3]), ([0, 1, 2], [4, 1, 3])):
        roster.entered += held_by != numbers.tolist()
        numbers[:] = held_by
        evicted += len(rows)
        watch.note_rows(np.array(rows, np.int32), roster)
    (event,) = journal.since()
    assert event.fact == PushedOut("device", {"full": 9}, ("r1", "r2", "r3", "r4"))
