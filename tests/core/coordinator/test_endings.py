"""A request has one ending, the first that somebody was told; what has failed is never found again."""

from __future__ import annotations

import threading
from collections import Counter

import inside
import numpy as np
import pytest

from core.coordinator.test_lifecycle import GROUPS, LENGTH, STATES, in_state
from core.driving import LOAD, STORE, prompt
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Request, Scheduler


def endings(requests: int, threads: int) -> Counter[tuple[str, str]]:
    """Ends ``requests`` short requests from so many threads while they run: (told first, reported)."""
    spec = CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 4)])
    found: Counter[tuple[str, str]] = Counter()
    with KVCache(spec, device="meta", device_blocks={"full": 4096}) as cache:
        scheduler = Scheduler(cache, max_running=64)
        told: list[list[tuple[str, str]]] = [[] for _ in range(threads)]
        over, names = threading.Event(), [f"{i}" for i in range(64)]

        def end_all(mine: list[tuple[str, str]], offset: int) -> None:
            how = [(scheduler.abort, "abort"), (scheduler.finish, "stop"), (scheduler.fail, "error")][offset % 3]
            while not over.is_set() and len(mine) <= requests:  # more were told twice
                mine += [(name, how[1]) for name in names[offset * 7 :] + names[: offset * 7] if how[0](name)]

        workers = [threading.Thread(target=end_all, args=(mine, k)) for k, mine in enumerate(told)]
        for worker in workers:
            worker.start()
        reported: list[tuple[str, str]] = []
        try:
            for start in range(0, requests, 64):
                names[:] = [f"{start + i}" for i in range(64)]
                for name in names:
                    scheduler.add(Request(name, [1, 2, 3], 2))
                while scheduler.has_work():
                    step = scheduler.schedule()
                    done = scheduler.commit(step, np.full(len(step.sample_rows), 5))
                    reported += [(each.request_id, each.finish_reason) for each in done]
        finally:
            over.set()
            for worker in workers:
                worker.join()
    asked = Counter(name for mine in told for name, _ in mine)
    assert max(asked.values(), default=0) <= 1, "two endings of one request were told True"
    first = {name: how for mine in told for name, how in mine}
    assert len(reported) == len(dict(reported)) == -(-requests // 64) * 64
    for name, reason in reported:
        found[first.get(name, "nobody"), reason] += 1
    return found


def test_the_ending_that_was_told_true_is_the_one_that_is_reported(unaudited):
    """Both abort and finish said True for one request; an abort that fell into commit was reported as "length"."""
    found = endings(640, threads=4)
    assert {pair for pair in found if pair[0] != pair[1]} <= {("nobody", "length")}
    assert len(found) > 1, "nobody was in time"


@pytest.mark.parametrize("how", ["abort", "finish"])
def test_an_ending_that_falls_into_commit_is_kept(make_serving, monkeypatch, how):
    serving = make_serving(blocks=16)
    serving.add("A", prompt(0, 9), 1)
    told, advance = [], inside.running(serving.scheduler).advance

    def late(*args):
        told.append(getattr(serving.scheduler, how)("A"))
        yield from advance(*args)
        told.append(getattr(serving.scheduler, how)("A"))

    monkeypatch.setattr(inside.running(serving.scheduler), "advance", late)
    serving.step()
    assert told == [True, False]
    assert serving.finished["A"].finish_reason == {"abort": "abort", "finish": "stop"}[how]
    serving.run()


def test_ids_of_unreported_requests_are_told_in_order(make_serving):
    serving = make_serving(blocks=16)
    for name in "BAC":
        serving.add(name, prompt(0, 9), 1)
    serving.scheduler.abort("A")
    assert serving.scheduler.request_ids == ["B", "A", "C"]
    serving.run()
    assert serving.scheduler.request_ids == []


# --- fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_what_has_failed_is_not_found_again(make_serving, state):
    """Neither what it has computed nor the prefix that it was computed from, in whichever tier."""
    serving = in_state(make_serving, state)
    assert serving.scheduler.fail("A") is True
    assert serving.scheduler.abort("A") is False, "it is ending already"
    serving.step()
    assert serving.finished["A"].finish_reason == "error"
    serving.engine.release()
    serving.run()
    again = serving.serve("again", list(serving.requests["A"].prompt_token_ids), 1)
    if state not in ("waiting for a load", "waiting for a twin"):  # others compute the same prompt anew beside it
        assert sum(again.cached_tokens.values()) == 0


@pytest.mark.parametrize("hold", [[], [STORE]], ids=["stored", "being stored"])
@pytest.mark.parametrize("tokens", [25, 32])
def test_the_step_that_went_wrong_and_those_before_it_are_forgotten(make_serving, hold, tokens):
    serving = make_serving(GROUPS, 32, 64, hold=hold, scheduler={"max_batched_tokens": 16})
    serving.add("A", prompt(0, tokens), 4)
    serving.step()  # half of the prompt is computed and findable
    step, ids = serving.begin()
    serving.scheduler.fail("A")
    serving.end(step, ids)
    assert serving.finished["A"].finish_reason == "error"
    assert serving.finished["A"].token_ids == []
    serving.engine.release()
    serving.run()
    assert serving.serve("again", prompt(0, tokens), 1).cached_tokens == {"device": 0, "host": 0}


def test_whoever_loads_what_has_failed_computes_it(make_serving):
    serving = make_serving(GROUPS, 32, 64, hold=[])
    serving.serve("before", prompt(0, LENGTH), 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {LOAD}
    serving.add("B", prompt(0, LENGTH), 3)
    serving.step()
    assert [s.state.value for s in serving.scheduler.running] == ["loading"]
    serving.add("A", prompt(0, LENGTH), 3)
    serving.scheduler.fail("A")
    serving.step()
    serving.engine.release()
    done = serving.run()
    assert (done["B"].finish_reason, len(done["B"].token_ids)) == ("length", 3)


def test_others_that_run_keep_their_blocks(make_serving):
    """B shares A's prompt and goes on when A has failed; what it has shared is not found by C."""
    serving = make_serving(GROUPS, 48, 64, hold=[])
    serving.add("A", prompt(0, 33), 9)
    serving.step()
    serving.add("B", prompt(0, 33), 9)
    serving.step()
    step, ids = serving.begin()
    assert step.request_ids == ["A", "B"]
    serving.scheduler.fail("A")
    serving.end(step, ids)
    serving.add("C", prompt(0, 33), 2)
    done = serving.run()
    assert [done[name].finish_reason for name in "ABC"] == ["error", "length", "length"]
    assert done["C"].cached_tokens == {"device": 0, "host": 0}


def test_failures_leave_nothing_behind_under_load(make_serving):
    """Every third request fails somewhere; texts, blocks and audits stay right, and no failed text is ever a hit."""
    serving = make_serving(GROUPS, 24, 40, scheduler={"max_batched_tokens": 16, "max_running": 4})
    for i in range(24):
        serving.add(f"{i}", prompt(i % 4, 20 + i % 7), 1 + i % 5)
    while serving.scheduler.has_work():
        step, ids = serving.begin()
        for name in step.request_ids[:1]:
            if int(name) % 3 == 0:
                serving.scheduler.fail(name)
        serving.end(step, ids)
        if not step.num_tokens:
            serving.scheduler.wait(0.05)
    assert {done.finish_reason for done in serving.finished.values()} == {"error", "length"}
    serving.check_quiet()
