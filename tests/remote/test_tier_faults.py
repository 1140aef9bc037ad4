"""Backends that are damaged, slow, full, failing or hanging cost misses, and a bounded wait."""

from __future__ import annotations

import inside
import pytest
from core.driving import prompt

from kvtier.coordinator.seek import LEAST_S, UNKNOWN_S
from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.breaker import Breaker, Tried
from kvtier.remote.tier import ANSWER_S
from remote.conftest import store_of
from remote.fake_backend import FakeBackend

NOTHING = {"device": 0, "host": 0, "remote": 0}


@pytest.mark.parametrize("fault", ["fail", "miss", "damage", "swap"])
def test_a_fetch_that_goes_wrong_is_a_miss(shared_serving, fault, caplog):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 3)
    other = shared_serving(store=FakeBackend(seed=3, **{fault: 1.0}) if fault != "fail" else FakeBackend())
    if fault == "fail":
        other.store.hold = True
        other.add("a", prompt(0, 50), 3)
        other.step()
        other.store.end("look")
        other.step()
        other.store.faults = {"fail": 1.0}
        other.store.end("get")
        other.store.faults, other.store.hold = {}, False
        done = other.run()["a"]
    else:
        done = other.serve("a", prompt(0, 50), 3)
    assert done.cached_tokens == NOTHING
    stats = store_of(other)
    assert (stats.missed_objects if fault == "miss" else stats.failed_fetches) > 0
    if fault in ("damage", "swap"):
        assert stats.damaged_objects > 0
        assert stats.reasons == {"damaged": stats.damaged_objects}
        assert sum(stats.damages.values()) == stats.damaged_objects
        (line,) = [record.getMessage() for record in caplog.records if record.name == "kvtier.remote"]
        assert line.startswith("the fetch of ") and "went wrong: damaged: " in line
        assert {kind for kind, n in stats.damages.items() if n} <= {
            "damage": {"checksum", "trailer", "torn", "name", "namespace", "format"},
            "swap": {"name", "other"},
        }[fault]
    assert (stats.found_names > 0) and sum(stats.look_latency.counts) == stats.looks


def test_a_damaged_object_is_deleted_and_stored_anew(shared_serving):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 3)
    name = next(iter(shared_serving.shared.objects))
    data = shared_serving.shared.objects[name]
    shared_serving.shared.objects[name] = bytes([data[0] ^ 1]) + data[1:]
    other = shared_serving()
    assert other.serve("a", prompt(0, 50), 3).cached_tokens["remote"] < 48
    assert shared_serving.shared.objects[name] == data, "it was computed, and spilled again"
    deleted = [names for what, names in other.store.made if what == "delete"]
    assert deleted == [(name,)], "some remotes keep what they have"


@pytest.mark.parametrize("least", [1, 300])
def test_torn_objects_of_a_writer_that_died_are_misses(shared_serving, least):
    one = shared_serving(store=FakeBackend(tear=0.5, seed=1), least=least)
    one.serve("a", prompt(0, 50), 3)
    other = shared_serving(least=least)
    other.serve("a", prompt(0, 50), 3)
    assert store_of(other).damaged_objects > 0


@pytest.mark.parametrize(
    ("a_token_s", "wait_s"),
    [(None, UNKNOWN_S), (0.1, 0.5 * 0.1 * 48), (1e-6, LEAST_S)],
    ids=["unknown", "half", "least"],
)
def test_a_question_that_is_not_answered_costs_a_share_of_the_prefill(shared_serving, a_token_s, wait_s):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 3)
    other = shared_serving()
    other.cache.estimate_compute(lambda start, end: a_token_s and (end - start) * a_token_s)
    other.store.hold = True
    other.add("a", prompt(0, 50), 3)
    other.step()
    assert "remote" in other.scheduler.why_waiting()["a"]
    other.add("b", prompt(1, 3), 1)
    other.steps_until(lambda: "b" in other.finished)
    assert "a" not in other.finished, "others have passed it"
    other.engine.clock_s += 0.9 * wait_s
    for _ in range(5):
        other.step()
    assert "a" not in other.finished
    other.engine.clock_s += 0.11 * wait_s
    other.steps_until(lambda: "a" in other.finished)
    assert other.finished["a"].cached_tokens == NOTHING
    assert store_of(other).late_looks == 1
    other.store.end()
    other.store.hold = False
    other.run()


def test_a_late_answer_still_counts_for_a_request_that_waits_for_something_else(shared_serving):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 3)
    other = shared_serving(scheduler={"max_running": 1})
    other.add("runs", prompt(2, 3), 12)
    other.steps_until(lambda: other.is_running("runs"))
    other.store.hold = True
    other.add("a", prompt(0, 50), 3)
    other.step()
    other.engine.clock_s += UNKNOWN_S
    other.step()
    other.store.hold = False
    assert other.run()["a"].cached_tokens == NOTHING | {"remote": 48}
    assert store_of(other).late_looks == 1


def test_a_wait_ends_when_the_answers_time_is_over(shared_serving):
    other = shared_serving()
    other.store.hold = True
    other.add("a", prompt(0, 50), 3)
    other.step()
    asked = []
    inside.connector(other.cache).wait = asked.append
    other.scheduler.wait(5.0)
    assert asked == [pytest.approx(UNKNOWN_S)]
    other.store.hold = False
    other.run()


def test_an_overdue_fetch_is_given_up_and_its_blocks_come_back_when_it_has_ended(shared_serving):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 3)
    other = shared_serving(deadline_s=5.0)
    other.store.hold = True
    other.add("a", prompt(0, 50), 3)
    other.step()
    other.store.end("look")
    other.step()
    assert "remote" in other.scheduler.why_waiting()["a"]
    other.engine.clock_s += 6
    other.steps_until(lambda: "a" in other.finished)
    assert other.finished["a"].cached_tokens == NOTHING
    host = other.cache.stats().host
    assert sum(pool.quarantined for pool in host.values()) > 0
    assert store_of(other).expired == 1
    other.store.hold = False
    other.run()
    assert sum(pool.quarantined for pool in other.cache.stats().host.values()) == 0


def test_a_store_that_fails_is_left_alone_but_for_a_try_a_second(shared_serving):
    other = shared_serving(store=FakeBackend(fail=1.0))
    for k in range(6):
        other.serve(f"r{k}", prompt(k, 20), 1)
    calls = len(other.store.made)
    assert store_of(other).breaker_open
    other.serve("more", prompt(8, 20), 1)
    assert len(other.store.made) == calls
    other.store.faults = {}
    other.engine.clock_s += 1.1
    other.serve("probe", prompt(9, 20), 1)
    assert not store_of(other).breaker_open
    assert other.serve("again", [*prompt(9, 20), 1, 2], 1).cached_tokens["device"] > 0


def fetch_that_hangs(serving, request_id, ids, well=("look", "put")):
    """The remote knows what it has, and does not bring it; the request computes when its time is over."""

    def is_over() -> bool:
        serving.store.end(*well)
        return request_id in serving.finished and not any(what in well for what, _ in serving.store.calls.values())

    serving.add(request_id, ids, 1)
    for _ in range(3):
        serving.step()
        serving.store.end(*well)
    serving.engine.clock_s += 6
    serving.steps_until(is_over)
    serving.step()
    assert serving.finished[request_id].cached_tokens == NOTHING


def spills_well(serving, request_id, ids):
    """Nobody has stored this text before."""
    before = store_of(serving).spilled_objects

    def is_stored() -> bool:
        serving.store.end("look", "put")
        return request_id in serving.finished and store_of(serving).spilled_objects > before

    serving.add(request_id, ids, 1)
    serving.steps_until(is_stored)


@pytest.fixture
def full_shelf(shared_serving):
    one = shared_serving()
    for k in range(9):
        one.serve(f"r{k}", prompt(k, 50), 1)
    other = shared_serving(deadline_s=5.0, host=300)
    other.store.hold = True
    return other


def test_a_breaker_counts_questions_and_moves_apart():
    breaker = Breaker()
    for _ in range(3):
        assert not breaker.is_open
        breaker.on_end(Tried.LOOK, True, 0.0)
        breaker.on_end(Tried.MOVE, False, 0.0)
    breaker.on_end(Tried.LOOK, True, 0.0)
    assert [breaker.allows(0.5, what) for what in Tried] == [False, False]
    assert [breaker.allows(1.1, what) for what in (*Tried, *Tried)] == [True, True, False, False], "a try each"
    breaker.on_end(Tried.MOVE, True, 1.2)
    assert breaker.allows(1.3)


def test_answers_do_not_hide_that_nothing_moves(full_shelf):
    """The breaker opens though every question is answered. One that is answered does not close it."""
    for k in range(3):
        assert not store_of(full_shelf).breaker_open
        fetch_that_hangs(full_shelf, f"r{k}", prompt(k, 50), well=["look"])
    assert store_of(full_shelf).breaker_open
    looks = store_of(full_shelf).looks
    for name in ("left alone", "too"):
        full_shelf.add(name, prompt(4, 50), 1)
        full_shelf.steps_until(lambda name=name: name in full_shelf.finished)
    assert store_of(full_shelf).looks == looks
    full_shelf.store.hold = False
    full_shelf.step()
    full_shelf.run()
    full_shelf.engine.clock_s += 1.1
    assert full_shelf.serve("try", prompt(5, 50), 1).cached_tokens["remote"] == 48
    assert not store_of(full_shelf).breaker_open


def test_moves_that_hang_are_few_even_if_others_end_well(full_shelf):
    """Four fetches that were given up and have not ended: the host misses their blocks. So there is no fifth."""
    for k in range(4):
        assert not store_of(full_shelf).breaker_open
        spills_well(full_shelf, f"new{k}", prompt(20 + k, 20))
        fetch_that_hangs(full_shelf, f"r{k}", prompt(k, 50))
    looks = store_of(full_shelf).looks
    full_shelf.engine.clock_s += 100
    full_shelf.add("left alone", prompt(4, 50), 1)
    full_shelf.steps_until(lambda: "left alone" in full_shelf.finished)
    assert (store_of(full_shelf).looks, store_of(full_shelf).breaker_open) == (looks, True)
    full_shelf.store.hold = False
    full_shelf.step()
    full_shelf.run()
    assert full_shelf.serve("again", prompt(5, 50), 1).cached_tokens["remote"] == 48


def test_a_full_store_refuses_and_nothing_else_happens(shared_serving):
    one = shared_serving(store=FakeBackend(refuse=1.0))
    for k in range(5):
        one.serve(f"r{k}", prompt(k, 30), 2)
    stats = store_of(one)
    assert stats.refused_objects > 0 == stats.spilled_objects
    assert not stats.breaker_open, "it answers"


def test_a_second_question_has_a_time_of_its_own(shared_serving):
    """On an engine whose steps take 0.1 s. A conversation's next turn needs two."""
    one, other = shared_serving(), shared_serving(store=FakeBackend(hold=True))
    other.cache.estimate_compute(lambda start, end: 1e-6)
    first = one.serve("a", prompt(0, 30), 9)
    other.add("b", [*prompt(0, 30), *first.token_ids, *prompt(5, 7)], 2)
    for _ in range(12):
        other.step()
        other.store.end()  # at once
        other.engine.clock_s += 0.1
    other.store.hold = False
    assert other.run()["b"].cached_tokens == NOTHING | {"remote": 36}
    assert store_of(other).late_looks == 0


def test_a_store_that_refuses_deletes_does_not_keep_the_engine_at_work(shared_serving):
    one = shared_serving()
    one.store.delete = lambda ticket, names, deadline_s: one.store._call(
        "delete", ticket, names, lambda: Answer(ticket, (Outcome.REFUSED,) * len(names), {0: "403"})
    )
    one.add("bad", prompt(0, 30), 30)
    one.steps_until(lambda: one.known("bad") > 35)
    one.scheduler.fail("bad")
    for _ in range(200):
        one.step()
        one.engine.clock_s += 0.5
    assert not one.scheduler.has_work()
    assert one.remote.num_disowned == 1, "its names are not used"
    assert 4 < sum(what == "delete" for what, _ in one.store.made) < 20


def test_questions_without_answers_do_not_stop_spills(shared_serving):
    one = shared_serving(store=FakeBackend(hold=True))
    for k in range(4):
        one.add(f"r{k}", prompt(k, 30), 1)
        one.step()
        one.engine.clock_s += UNKNOWN_S
        one.steps_until(lambda: len(one.finished) > k)  # noqa: B023
    assert store_of(one).late_looks == 1, "nobody waits in vain after the first"
    one.engine.clock_s += ANSWER_S
    one.step()
    assert store_of(one).breaker_open and store_of(one).dropped_texts == 0
    one.steps_until(lambda: any(what == "put" for what, _ in one.store.calls.values()))
