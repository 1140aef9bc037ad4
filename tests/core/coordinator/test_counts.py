"""What a cache counts on the way of requests: why they wait and come back, what they find, what copies cost."""

from __future__ import annotations

import threading
from itertools import accumulate

import inside
import pytest

from core.driving import LOAD, STORE, prompt
from kvtier import FullAttention, SlidingWindow, StepError

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4)}


def some(counts) -> dict:
    """Those that are not 0."""
    return {name: n for name, n in counts.items() if n}


def test_requests_that_wait_are_counted_by_why(make_serving):
    """One of each: its prefix is computed, loaded, too large for now, behind that one, and without a row."""
    serving = make_serving(FULL, 20, 64, hold=[LOAD], scheduler={"max_batched_tokens": 24, "max_running": 4})
    serving.serve("before", prompt(9, 21), 1)
    inside.pools(serving.cache).forget_all()
    serving.add("loads", prompt(9, 21), 1)
    serving.step()
    serving.add("same load", prompt(9, 21), 1)
    serving.add("runs", prompt(0, 33), 2)
    serving.step()
    serving.add("twin", prompt(0, 33), 1)
    serving.add("large", prompt(1, 40), 1)
    serving.add("behind", prompt(2, 5), 1)
    serving.step()
    stats = serving.cache.stats()
    assert some(stats.waiting) == {"transfer": 1, "twin": 1, "blocks": 1, "queue": 1}
    assert sum(stats.waiting.values()) == stats.requests["waiting"]
    assert some(stats.waits) == {"transfer": 1, "twin": 1, "blocks": 1}
    assert stats.shortages == {"admission": {"full": 1}, "running": {"full": 0}}
    serving.step()
    stats = serving.cache.stats()
    assert stats.waits["blocks"] == 1, "it waits on"
    assert stats.shortages["admission"] == {"full": 2}, "and was told so again"
    serving.engine.release()
    serving.run()
    assert serving.cache.stats().waiting == dict.fromkeys(stats.waiting, 0)


def test_who_waits_for_a_row_or_for_tokens_says_so(make_serving):
    serving = make_serving(FULL, 40, scheduler={"max_batched_tokens": 8, "max_running": 2})
    serving.add("A", prompt(0, 17), 8)
    serving.add("B", prompt(1, 5), 8)
    serving.step()
    assert some(serving.cache.stats().waiting) == {"tokens": 1}
    serving.steps_until(lambda: serving.scheduler.num_running == 2)
    serving.add("C", prompt(2, 5), 1)
    serving.step()
    assert some(serving.cache.stats().waiting) == {"rows": 1}
    assert "C" in serving.scheduler.why_waiting()
    serving.cancelled()
    assert some(serving.cache.stats().waiting) == {"queue": 2, "rows": 1}, "B has waited for tokens before"
    serving.run()


def test_preemptions_name_the_group_that_was_short(make_serving):
    """Two decode until the full group is short, while the window's pool has blocks to spare."""
    serving = make_serving(GROUPS, {"full": 8, "win": 20}, scheduler={"max_batched_tokens": 32})
    serving.add("A", prompt(0, 13), 16)
    serving.add("B", prompt(1, 13), 16)
    serving.run()
    stats = serving.cache.stats()
    assert stats.requests["preemptions"] == 1
    assert (stats.preempted_for, some(stats.sent_back)) == ({"full": 1, "win": 0}, {"blocks": 1})
    assert stats.shortages["running"] == {"full": 1, "win": 0}


def test_those_sent_back_are_counted_by_why(make_serving):
    serving = make_serving(FULL, 24, 64, hold=[], scheduler={"max_running": 1})
    serving.serve("before", prompt(0, 17), 1)
    serving.add("cancelled", prompt(1, 9), 4)
    serving.step()
    serving.cancelled()
    serving.step()
    serving.add("urgent", prompt(2, 9), 1, priority=-1)
    serving.run()
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    for how in ("fails", "is forgotten"):
        serving.add(how, prompt(0, 17), 1)
        serving.step()
        if how == "fails":
            serving.engine.end(error="no link", bad=[3])
        else:
            serving.cache.reset()
            serving.engine.end()
        serving.run()
        serving.serve(f"again {how}", [*prompt(0, 17), 1], 1)
        inside.pools(serving.cache).forget_all()
    stats = serving.cache.stats()
    assert some(stats.sent_back) == {"cancel": 1, "rows": 1, "load_failed": 1, "reset": 1}
    assert stats.requests["preemptions"] == 2
    assert stats.cancelled_steps == 1
    assert stats.finished == {**dict.fromkeys(stats.finished, 0), "length": stats.requests["finished"]}
    assert (stats.transfers.loads, stats.transfers.failed_loads, stats.transfers.failed_load_blocks) == (2, 1, 1)


def test_a_hit_is_counted_once_its_request_runs(make_serving):
    """Not while its load is under way, and not again when it comes back after a preemption."""
    serving = make_serving(GROUPS, 24, 64, hold=[])
    serving.serve("before", prompt(0, 25), 1)
    inside.pools(serving.cache).forget_all()
    assert serving.cache.stats().prefix_tokens == {"queried": 25, "device": 0, "host": 0}
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, 25), 4)
    serving.step()
    assert serving.cache.stats().prefix_tokens["queried"] == 25
    serving.engine.release()
    serving.step()
    assert serving.cache.stats().prefix_tokens == {"queried": 50, "device": 0, "host": 24}
    serving.cancelled()
    done = serving.run()["again"]
    stats = serving.cache.stats()
    assert stats.prefix_tokens == {"queried": 50, "device": 0, "host": 24}
    assert stats.prompt_tokens == {"device": 0, "host": 24, "computed": 26}
    assert 0 < done.queue_s < 60


def test_tokens_of_steps_and_texts_add_up(make_serving):
    """What was sampled for a request that somebody had ended is not of its text."""
    serving = make_serving(FULL, 40, scheduler={"max_batched_tokens": 16})
    serving.add("A", prompt(0, 33), 5)
    serving.add("B", prompt(1, 3), 9)
    computed, sizes = 0, []
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        if "B" in step.request_ids and len(sizes) == 3:
            assert serving.scheduler.abort("B")
        serving.end(step, ids)
        computed += step.num_tokens
        sizes += [step.num_tokens] if step.num_tokens else []
    stats = serving.cache.stats()
    assert stats.computed_tokens == computed == sum(sizes)
    assert list(accumulate(stats.step_sizes)) == [sum(n <= 2**i for n in sizes) for i in range(len(stats.step_sizes))]
    assert stats.generated_tokens == sum(len(done.token_ids) for done in serving.finished.values())
    assert some(stats.finished) == {"length": 1, "abort": 1}


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_transfers_are_timed_from_submission_to_end(make_serving, direction):
    serving = make_serving(FULL, 24, 64, hold=[direction], verify="full")
    serving.add("before", prompt(0, 25), 1)
    serving.step()
    if direction is LOAD:
        serving.run()
        inside.pools(serving.cache).forget_all()
        serving.add("again", prompt(0, 25), 1)
        serving.step()
    serving.engine.clock_s += 0.3
    serving.engine.end()
    serving.run()
    stats = serving.cache.stats()
    took = {STORE: stats.store_latency, LOAD: stats.load_latency}[direction]
    assert took.sum_s == pytest.approx(0.3)
    assert {took.bounds_s[i]: n for i, n in enumerate(took.counts) if n} == {0.5: 1}
    assert stats.transfers.verified_blocks == stats.transfers.loaded_blocks == (6 if direction is LOAD else 0)


def test_copies_that_fail_are_not_timed_and_their_blocks_are_counted(make_serving):
    serving = make_serving(FULL, 24, 64, hold=[STORE])
    serving.add("before", prompt(0, 25), 1)
    serving.step()
    serving.engine.end(error="no link", bad=[1, 4])
    serving.run()
    stats = serving.cache.stats()
    assert sum(stats.store_latency.counts) == 0
    assert (stats.transfers.stores, stats.transfers.stored_blocks, stats.transfers.failed_store_blocks) == (1, 4, 2)


def test_a_reset_prefix_cache_is_empty_for_others_and_those_who_run_go_on(make_serving):
    serving = make_serving(GROUPS, 24, 64, hold=[])
    serving.serve("before", prompt(0, 25), 1)
    serving.add("runs", prompt(1, 17), 8)
    step, ids = serving.begin()
    with pytest.raises(StepError, match="commit or cancel it"):
        serving.scheduler.reset_prefix_cache()
    serving.end(step, ids)
    held = serving.cache.stats().device["full"].held
    assert serving.scheduler.reset_prefix_cache() is True
    stats = serving.cache.stats()
    assert stats.device["full"].held == held > 0
    assert [pool.cached for pools in (stats.device, stats.host) for pool in pools.values()] == [0] * 4
    serving.run()
    assert serving.finished["runs"].preemptions == 0
    for name, tokens in (("before", prompt(0, 25)), ("runs", [*prompt(1, 17), *serving.finished["runs"].token_ids])):
        assert serving.serve(f"{name} again", tokens, 1).cached_tokens == {"device": 0, "host": 0}


def test_another_thread_reads_numbers_that_add_up_while_requests_are_served(make_serving, unaudited):
    serving = make_serving(GROUPS, {"full": 30, "win": 20}, 60, hold=[], scheduler={"max_running": 4})
    problems: list[str] = []
    stop = threading.Event()

    def scrape() -> None:
        last = serving.cache.stats()
        while not stop.is_set():
            now = serving.cache.stats()
            sums = sum(now.prompt_tokens.values()), now.prefix_tokens["queried"]
            if any(n % 25 for n in sums):
                problems.append(f"of whole prompts: {sums}")
            if any(now.sent_back[why] < n for why, n in last.sent_back.items()) or any(
                now.waits[why] < n for why, n in last.waits.items()
            ):
                problems.append("a counter fell")
            pools = (*now.device.values(), *now.host.values())
            if any(p.usable != p.empty + p.cached + p.fenced + p.held + p.quarantined + p.lent for p in pools):
                problems.append("places do not add up")
            last = now

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for k in range(30):
            serving.add(str(k), prompt(k % 7, 25), 3)
        serving.run()
    except BaseException as problem:
        problems.append(repr(problem))
    stop.set()
    thread.join()
    assert problems == []
