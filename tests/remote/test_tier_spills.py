"""When blocks are spilled: at once or at evictions, which of them, and once."""

from __future__ import annotations

import inside
import pytest
from core.driving import STORE, prompt

from kvtier import FullAttention
from kvtier.coordinator.boundaries import Boundaries, End
from remote.conftest import store_of
from remote.fake_backend import FakeBackend

FULL = {"full": (FullAttention(), 4)}
NOTHING = {"device": 0, "host": 0, "remote": 0}


def test_what_is_stored_is_not_stored_again(shared_serving):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 3)
    puts = sum(what == "put" for what, _ in one.store.made)
    one.serve("b", prompt(0, 50), 3)
    assert sum(what == "put" for what, _ in one.store.made) == puts > 0


@pytest.mark.parametrize("fault", ["refuse", "fail"])
def test_what_was_not_stored_is_stored_later(shared_serving, fault):
    """A disk was full, say, and is not any more."""
    one = shared_serving(store=FakeBackend(**{fault: 1.0}))
    one.serve("a", prompt(0, 50), 1)
    assert not shared_serving.shared.objects
    one.store.faults = {}
    one.engine.clock_s += 1.1
    one.serve("b", prompt(0, 50), 1)
    one.engine.clock_s += 1.1
    one.serve("c", prompt(0, 50), 1)
    assert shared_serving().serve("a", prompt(0, 50), 1).cached_tokens["remote"] > 0


def test_host_blocks_that_have_changed_are_not_spilled(shared_serving):
    one = shared_serving(FULL, verify="full", hold=[STORE])
    one.add("a", prompt(0, 50), 1)
    one.steps_until(lambda: "a" in one.finished)
    store = next(iter(one.engine.live.values()))
    one.engine.end(store.ticket)
    one.engine.memory.flip_host_bit(0, int(store.host[0]))
    one.engine.release()
    one.run()
    assert store_of(one).failed_spills >= 1
    other = shared_serving(FULL, verify="full")
    other.serve("a", prompt(0, 50), 1)
    assert store_of(other).damaged_objects == 0


def test_what_the_store_has_lost_is_stored_again(shared_serving):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 1)
    stored = set(shared_serving.shared.objects)
    shared_serving.shared.objects.clear()
    inside.pools(one.cache).forget_all()
    inside.host(one.cache).forget_all()
    one.serve("again", prompt(0, 50), 1)
    assert set(shared_serving.shared.objects) == stored


def test_a_text_of_many_objects_is_spilled_in_small_turns(shared_serving):
    one = shared_serving(FULL, blocks=400, host=400, least=1)
    most, pump = [], one.remote.pump

    def watched(settled: int) -> None:
        before = len(one.store.made)
        pump(settled)
        most.append(sum(len(names) for what, names in one.store.made[before:] if what == "put"))

    one.remote.pump = watched
    one.serve("a", prompt(0, 1001), 1)
    assert sum(most) == 250
    assert max(most) <= 128


def test_a_compute_time_that_fails_keeps_nothing_in_the_store(shared_serving):
    """What it raised came out of ``schedule``."""
    one, other = shared_serving(), shared_serving()
    for k in range(2):
        one.serve(f"r{k}", prompt(k, 50), 1)
    other.cache.estimate_compute(lambda start, end: (end - start) / 0)
    for k in range(2):
        assert other.serve(f"r{k}", prompt(k, 50), 1).cached_tokens["remote"] == 48


def test_spills_wait_for_copies_into_the_host(shared_serving):
    one = shared_serving(hold=[STORE])
    one.add("a", prompt(0, 50), 1)
    one.steps_until(lambda: "a" in one.finished)
    assert not shared_serving.shared.objects
    one.engine.release()
    one.run()
    assert shared_serving.shared.objects


def at_eviction(serving):
    inside.spill_at_eviction(serving.cache)
    return serving


def conversation(serving, turns: int) -> list[int]:
    """Its text. Each turn knows all turns before."""
    text = prompt(0, 20)
    for k in range(turns):
        done = serving.serve(f"t{k}", text, 3)
        text = [*text, *done.token_ids, *prompt(10 + k, 5)]
    return text[:-5]


def test_texts_wait_for_evictions_from_the_host(shared_serving):
    one, other = at_eviction(shared_serving(host=200)), shared_serving(host=200)
    text = conversation(one, 4)
    assert not one.cache.core.coordinator.door.num_copies, "what waits is nothing to wait for"
    assert not shared_serving.shared.objects
    for k in range(20):
        one.serve(f"other{k}", prompt(100 + k, 40), 1)
    assert one.cache.stats().host["full"].evicted > 0
    assert store_of(one).dropped_objects == 0, "it was spilled before it was evicted"
    assert sum(other.serve("later", [*text, *prompt(5, 7)], 1).cached_tokens.values()) == len(text) // 4 * 4 - 4 * (
        len(text) % 4 == 0
    )


def test_only_the_last_end_of_a_conversation_is_spilled_at_evictions(shared_serving):
    ends = {}
    for name, prepare in (("landing", lambda serving: serving), ("eviction", at_eviction)):
        shared_serving.shared.objects.clear()
        serving = prepare(shared_serving(host=200, least=1))
        conversation(serving, 4)
        serving.cache.flush_remote()
        serving.run()
        stored = [key for key in shared_serving.shared.objects if "/b1/" in key]
        ends[name] = len(stored)
    assert ends["eviction"] == 3, "the windows at the ends of its last prompt and of its text, which share a block"
    assert ends["landing"] >= 4 * 2


@pytest.mark.parametrize("prepare", [lambda serving: serving, at_eviction], ids=["landing", "eviction"])
def test_what_others_want_is_spilled_although_its_request_went_on(shared_serving, prepare, monkeypatch):
    """A system prompt: conversations part there."""
    monkeypatch.setattr(Boundaries, "pays", lambda self, end, app=b"": end is not End.LEFT)
    one, other = prepare(shared_serving(host=200)), shared_serving(host=200)
    begin = prompt(0, 24)
    for k in range(3):
        done = one.serve(f"r{k}", [*begin, *prompt(10 + k, 9)], 6)
    one.serve("goes on", [*begin, *prompt(12, 9), *done.token_ids, *prompt(20, 9)], 6)
    one.cache.flush_remote()
    one.run()
    assert other.serve("new", [*begin, *prompt(50, 9)], 1).cached_tokens == NOTHING | {"remote": 24}


@pytest.mark.parametrize("prepare", [lambda serving: serving, at_eviction], ids=["landing", "eviction"])
def test_the_same_prompt_again_is_a_hit_although_its_request_went_on(shared_serving, prepare):
    """Even if its copies in the host land only after its end."""
    one, other = prepare(shared_serving(hold=[STORE])), shared_serving()
    one.add("a", prompt(0, 33), 30)
    one.steps_until(lambda: "a" in one.finished)
    one.engine.release()
    one.cache.flush_remote()
    one.run()
    assert other.serve("a", prompt(0, 33), 1).cached_tokens == NOTHING | {"remote": 32}


def test_a_conversation_that_goes_on_before_its_copies_have_landed(shared_serving):
    one, other = shared_serving(hold=[STORE]), shared_serving()
    text = prompt(0, 30)
    for k in range(2):
        one.add(f"t{k}", text, 12)
        one.steps_until(lambda: len(one.finished) > k)  # noqa: B023
        text = [*text, *one.finished[f"t{k}"].token_ids, *prompt(20 + k, 6)]
    assert store_of(one).superseded_texts > 0
    one.engine.release()
    one.run()
    assert store_of(one).dropped_texts == store_of(one).dropped_objects == 0
    assert other.serve("c", text, 1).cached_tokens == NOTHING | {"remote": 56}


def test_a_text_that_becomes_the_coldest_by_others_use_is_spilled_before_it_is_evicted(shared_serving):
    one, other = at_eviction(shared_serving(FULL, blocks=200, host=72)), shared_serving(FULL, blocks=200, host=72)
    for k in range(1, 6):
        one.serve(f"colder{k}", prompt(k, 41), 1)
    one.cache.flush_remote()
    one.serve("mine", prompt(0, 41), 1)
    for k in range(1, 6):
        one.serve(f"again{k}", prompt(k, 41), 1)
    for k in range(10, 14):
        one.serve(f"new{k}", prompt(k, 41), 1)
    assert one.cache.stats().host["full"].evicted > 10
    assert store_of(one).dropped_objects == 0
    assert other.serve("mine", prompt(0, 41), 1).cached_tokens["remote"] == 40


def test_what_the_host_lacked_is_stored_by_a_later_request(shared_serving):
    one, other = shared_serving(hold=[STORE]), shared_serving()
    one.add("a", prompt(0, 50), 1)
    one.steps_until(lambda: one.engine.live)
    one.engine.end(min(one.engine.live), error="flaky", bad=[0, 1])
    one.engine.release()
    one.run()
    assert store_of(one).dropped_objects > 0
    one.serve("again", prompt(0, 50), 1)
    assert other.serve("b", prompt(0, 50), 1).cached_tokens["remote"] == 48


def test_a_text_waits_once(shared_serving):
    one = at_eviction(shared_serving(FULL))
    for k in range(20):
        one.serve(f"r{k}", prompt(0, 33), 1)
    assert len(inside.waiting_to_be_spilled(one.cache)) == 1


def test_what_is_used_for_hours_is_stored_again(shared_serving):
    """A keeper has removed it as the oldest: hits on the device and in the host did not tell."""
    one, other = shared_serving(), shared_serving()
    one.serve("a", prompt(0, 50), 1)
    shared_serving.shared.objects.clear()
    one.serve("b", prompt(0, 50), 1)
    assert not shared_serving.shared.objects
    one.engine.clock_s += 3601
    one.serve("c", prompt(0, 50), 1)
    assert other.serve("d", prompt(0, 50), 1).cached_tokens["remote"] == 48


def test_what_was_spilled_before_its_eviction_goes_out_first(shared_serving):
    one = at_eviction(shared_serving(FULL, blocks=200, host=72))
    for k in range(9):  # the last ones need room: the oldest are spilled, and evicted
        one.serve(f"r{k}", prompt(k, 41), 1)
    assert store_of(one).spilled_objects > 0 and one.cache.stats().host["full"].evicted > 0
    inside.pools(one.cache).forget_all()
    assert one.serve("spilled", prompt(3, 41), 1).cached_tokens["host"] < 40
