"""The tier behind the host tier: spills, fetches, and what goes wrong with them."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from core.driving import LOAD, STORE, prompt

from kvtier import CacheManager, ChunkedLocal, ConfigError, FullAttention, KVCache, Request, SlidingWindow
from kvtier.coordinator.seek import LEAST_S, UNKNOWN_S
from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.breaker import Breaker, Tried
from kvtier.remote.tier import ANSWER_S
from kvtier.testing import canary_spec
from remote.fake_backend import FakeBackend, Shared

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)}
FULL = {"full": (FullAttention(), 4)}
ID = {"model_id": "m", "key_secret": b"s"}
NOTHING = {"device": 0, "host": 0, "remote": 0}


@pytest.fixture
def shared_serving(make_serving, monkeypatch):
    """Makes servings whose caches share one remote, with objects of ``least`` bytes at least."""
    shared = Shared()

    def make(groups=GROUPS, blocks=40, host=60, hold=(), store=None, least=300, store_mode="eager", **options):
        monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", least)
        store = FakeBackend() if store is None else store
        store.shared = shared
        made = make_serving(groups, blocks, host, hold=hold, store=store_mode, remote_uri=store, **(ID | options))
        made.store, made.remote = store, made.cache.core.coordinator.door.remote
        return made

    make.shared = shared
    return make


def store_of(serving):
    return serving.cache.stats().remote


@pytest.mark.parametrize("least", [1, 300, 10**6])
@pytest.mark.parametrize("groups", [GROUPS, FULL, {"win": (SlidingWindow(6), 4)}])
def test_what_one_computes_another_has(shared_serving, groups, least):
    one, other = shared_serving(groups, least=least), shared_serving(groups, least=least)
    one.serve("a", prompt(0, 50), 3)
    done = other.serve("a", prompt(0, 50), 3)
    assert sum(done.cached_tokens.values()) == 48
    assert done.cached_tokens["remote"] == (48 if "full" in groups else 8), "a window needs nothing of what lies before"
    assert store_of(other).fetched_bytes > 0
    assert store_of(other).failed_fetches == 0
    assert other.cache.stats().prefix_tokens == {"queried": 50, **done.cached_tokens}
    assert other.cache.stats().prompt_tokens == {**done.cached_tokens, "computed": 2}


def test_the_next_turn_of_a_conversation_hits_what_another_engine_has_left(shared_serving):
    one, other = shared_serving(), shared_serving()
    first = one.serve("a", prompt(0, 30), 9)
    turn = [*prompt(0, 30), *first.token_ids, *prompt(5, 7)]
    assert other.serve("b", turn, 2).cached_tokens == NOTHING | {"remote": 36}


def test_prompts_that_part_share_up_to_where_a_hit_ends(shared_serving):
    one, other = shared_serving(FULL), shared_serving(FULL)
    one.serve("a", prompt(0, 50), 1)
    done = other.serve("b", [*prompt(0, 50)[:30], *prompt(7, 20)], 1)
    plan = other.remote.plan
    assert done.cached_tokens == NOTHING | {"remote": 30 // plan.tile_tokens * plan.tile_tokens}


def test_a_hit_takes_full_blocks_from_the_device_and_windows_from_the_store(shared_serving):
    one, other = shared_serving(least=1), shared_serving(least=1)
    one.serve("a", prompt(0, 50), 1)
    other.serve("b", [*prompt(0, 50)[:40], *prompt(3, 30)], 1)  # it has the full blocks of 40, and no windows there
    before = store_of(other).fetched_objects
    other.add("a", prompt(0, 50), 1)
    done = other.run()["a"]
    assert sum(done.cached_tokens.values()) == 48
    full = [name for what, names in other.store.made if what == "get" for name in names if "/b0/" in name]
    assert len(full) == len(set(full)), "no full block came twice"
    assert store_of(other).fetched_objects > before


def test_blocks_of_other_sizes_that_are_here_already_are_read_aside(shared_serving):
    groups = {"full": (FullAttention(), 8), "win": (SlidingWindow(6), 4)}
    one, other = shared_serving(groups, least=10**6), shared_serving(groups, least=10**6)
    for serving in (one, other):
        serving.serve("a", prompt(0, 50), 1)
    for pools in (inside.pools(other.cache), inside.host(other.cache)):
        full = np.flatnonzero(pools.arrays.mark[1 : int(pools.usable[0]) + 1]).astype(np.int32) + 1
        pools.unpublish(np.zeros(len(full), np.int32), full)
    assert sum(other.serve("again", prompt(0, 50), 1).cached_tokens.values()) == 48
    assert (store_of(other).fetched_objects, store_of(other).damaged_objects) == (2, 0), "one at each turn"


def test_what_is_stored_is_not_stored_again(shared_serving):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 3)
    puts = sum(what == "put" for what, _ in one.store.made)
    one.serve("b", prompt(0, 50), 3)
    assert sum(what == "put" for what, _ in one.store.made) == puts > 0


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


def test_what_takes_longer_to_fetch_than_to_compute_is_computed(shared_serving):
    one, other = shared_serving(), shared_serving()
    one.serve("a", prompt(0, 50), 1)
    one.serve("b", prompt(1, 50), 1)
    other.cache.estimate_compute(lambda start, end: (end - start) * 1e-9)
    assert other.serve("a", prompt(0, 50), 1).cached_tokens["remote"] == 48, "nothing is known of the remote yet"
    assert other.serve("b", prompt(1, 50), 1).cached_tokens["remote"] == 0
    assert store_of(other).not_worth == 1


def test_without_room_in_the_host_it_computes(shared_serving):
    one, other = shared_serving(), shared_serving(host=4)
    one.serve("a", prompt(0, 50), 1)
    assert other.serve("a", prompt(0, 50), 1).cached_tokens["remote"] == 0
    assert store_of(other).no_room == 1


@pytest.mark.parametrize("change", [{"model_id": "other"}, {"key_secret": b"other"}])
def test_other_weights_or_another_secret_share_nothing(shared_serving, change):
    one, other = shared_serving(), shared_serving(**change)
    one.serve("a", prompt(0, 50), 1)
    assert other.serve("a", prompt(0, 50), 1).cached_tokens == NOTHING


@pytest.mark.parametrize("options", [{"cache_salt": "x"}, {"adapter": "x"}, {"extra_keys": (1,)}])
def test_salts_and_adapters_are_kept_apart_in_the_store_too(shared_serving, options):
    one, other = shared_serving(), shared_serving()
    one.serve("a", prompt(0, 50), 1, **options)
    assert other.serve("a", prompt(0, 50), 1).cached_tokens == NOTHING
    assert other.serve("b", prompt(0, 50), 1, **options).cached_tokens["remote"] == 48


def test_two_engines_that_spill_the_same_blocks_at_once(shared_serving):
    one, other = shared_serving(), shared_serving()
    for serving in (one, other):
        serving.store.hold = True
        serving.add("a", prompt(0, 50), 3)
        serving.step()
        serving.engine.clock_s += UNKNOWN_S
        serving.steps_until(lambda serving=serving: "a" in serving.finished)
    for _ in range(20):
        for serving in (one, other):
            serving.store.end()
            serving.step()
    third = shared_serving()
    assert third.serve("a", prompt(0, 50), 3).cached_tokens["remote"] == 48
    for serving in (one, other):
        serving.store.hold = False
        serving.run()


def test_after_a_reset_the_store_is_left_alone(shared_serving):
    """The weights may have changed, and the names have not."""
    one, other = shared_serving(), shared_serving()
    one.serve("a", prompt(0, 50), 1)
    other.store.hold = True
    other.add("a", prompt(0, 50), 1)
    other.step()
    other.store.end("look")
    other.step()
    other.cache.reset_prefix_cache()
    other.store.end("get")
    other.store.hold = False
    assert other.run()["a"].cached_tokens == NOTHING
    assert not store_of(other).is_on
    calls = len(other.store.made)
    other.serve("b", prompt(0, 50), 1)
    assert len(other.store.made) == calls


def test_content_of_a_failed_request_is_deleted_from_the_store(shared_serving):
    one = shared_serving()
    one.add("bad", prompt(0, 50), 20)
    one.steps_until(lambda: shared_serving.shared.objects and one.is_running("bad"))
    one.scheduler.fail("bad")
    one.run()
    assert not shared_serving.shared.objects
    other = shared_serving()
    assert other.serve("a", prompt(0, 50), 1).cached_tokens == NOTHING


def test_a_request_that_fails_before_it_has_a_whole_block_leaves_nothing_to_delete(shared_serving):
    """It has a key, and no boundary of a hit: else the engine has work for ever."""
    one = shared_serving({"full": (FullAttention(), 8), "win": (SlidingWindow(6), 4)})
    one.add("bad", prompt(0, 5), 4)
    one.scheduler.fail("bad")
    one.run()
    assert one.remote.num_disowned == 0
    assert not any(what == "delete" for what, _ in one.store.made)


def test_a_spill_under_way_does_not_bring_back_what_was_disowned(shared_serving):
    one = shared_serving()
    one.store.hold = True
    one.add("bad", prompt(0, 50), 20)
    one.step()
    one.steps_until(lambda: one.store.end("look") or any(what == "put" for what, _ in one.store.calls.values()))
    one.scheduler.fail("bad")
    one.step()
    one.store.end("delete")
    one.step()
    one.store.end("put")
    one.store.hold = False
    one.run()
    assert not shared_serving.shared.objects


def test_what_is_disowned_is_not_fetched_before_it_is_deleted(shared_serving):
    shared_serving().serve("a", prompt(0, 50), 1)
    other = shared_serving()
    other.add("bad", prompt(0, 50), 20)
    other.steps_until(lambda: other.known("bad") > 52)
    other.store.hold = True
    other.scheduler.fail("bad")
    other.step()
    other.add("next", prompt(0, 50), 1)
    other.step()
    other.store.end("look")
    other.step()
    other.store.end("get")
    other.step()
    other.store.hold = False
    assert other.run()["next"].cached_tokens == NOTHING
    assert other.serve("again", prompt(0, 50), 1).cached_tokens["device"] > 0


def test_an_answer_of_before_a_delete_does_not_make_known_what_it_takes_away(shared_serving):
    """Else the text is not stored again for an hour, and routers are told that it is there."""
    shared_serving().serve("a", prompt(0, 50), 1)
    other = shared_serving()
    news = other.remote.listen()
    other.add("bad", prompt(0, 50), 20)
    other.store.hold = True
    other.cache.estimate_compute(lambda start, end: 0.0)
    other.step()
    other.engine.clock_s += 0.1
    other.steps_until(lambda: other.known("bad") > 52)
    other.scheduler.fail("bad")
    other.step()
    assert {what for what, _ in other.store.calls.values()} == {"look", "delete"}
    other.store.end("look")
    other.step()
    other.store.hold = False
    other.run()
    assert not shared_serving.shared.objects and news.take() == {}
    other.serve("again", prompt(0, 50), 1)
    assert shared_serving.shared.objects, "it is sound now"


def test_a_delete_that_fails_is_tried_again_and_keeps_the_names_until_then(shared_serving):
    one = shared_serving()
    one.add("bad", prompt(0, 50), 20)
    one.steps_until(lambda: shared_serving.shared.objects and one.known("bad") > 52)
    deletes = []
    delete = one.store.delete
    one.store.delete = lambda ticket, names, within_s: deletes.append((ticket, names))
    one.scheduler.fail("bad")
    one.step()
    assert len(deletes) == 1
    one.store._ended.append(Answer(deletes[0][0], (Outcome.FAILED,) * len(deletes[0][1])))
    one.step()
    assert one.remote.num_disowned == 1
    one.store.delete = delete
    one.engine.clock_s += 1.1
    one.run()
    assert one.remote.num_disowned == 0
    assert not shared_serving.shared.objects


def test_big_windows_of_a_prompts_end_are_deleted_with_their_text(shared_serving):
    one = shared_serving({"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}, least=1)
    one.add("bad", prompt(0, 50), 40)
    one.steps_until(lambda: one.known("bad") > 75)
    assert shared_serving.shared.objects
    one.scheduler.fail("bad")
    one.run()
    assert not shared_serving.shared.objects


def test_a_reset_is_final_for_requests_that_are_asking(shared_serving):
    shared_serving().serve("a", prompt(0, 50), 1)
    other = shared_serving()
    other.store.hold = True
    other.add("a", prompt(0, 50), 1)
    other.step()
    other.cache.reset_prefix_cache()
    other.store.end("look")
    other.store.hold = False
    assert other.run()["a"].cached_tokens == NOTHING


@pytest.mark.parametrize("on_load_error", ["recompute", "fail"])
def test_what_was_fetched_passes_the_checks_of_later_loads(shared_serving, on_load_error):
    shared_serving().serve("a", prompt(0, 50), 1)
    other = shared_serving(verify="full", on_load_error=on_load_error)
    done = other.serve("a", prompt(0, 50), 1)
    assert (done.cached_tokens["remote"], done.finish_reason) == (48, "length")
    assert other.cache.stats().transfers.corrupt_blocks == 0


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


def test_a_fetch_does_not_push_out_the_rest_of_its_hit(shared_serving):
    shared_serving(FULL, least=1).serve("a", prompt(0, 97), 1)
    other = shared_serving(FULL, host=24, least=1)
    other.serve("part", prompt(0, 49), 1)
    inside.pools(other.cache).forget_all()
    done = other.serve("a", prompt(0, 97), 1)
    assert done.cached_tokens == {"device": 0, "host": 48, "remote": 48}


def test_what_the_store_has_lost_is_stored_again(shared_serving):
    one = shared_serving()
    one.serve("a", prompt(0, 50), 1)
    stored = set(shared_serving.shared.objects)
    shared_serving.shared.objects.clear()
    inside.pools(one.cache).forget_all()
    inside.host(one.cache).forget_all()
    one.serve("again", prompt(0, 50), 1)
    assert set(shared_serving.shared.objects) == stored


def test_full_groups_of_unequal_blocks_agree_on_how_far_the_store_goes(shared_serving):
    groups = {"full": (FullAttention(), 4), "more": (FullAttention(), 8), "win": (SlidingWindow(6), 4)}
    one, other = shared_serving(groups, least=1), shared_serving(groups, least=1)
    one.serve("a", prompt(0, 47), 1)
    done = other.serve("b", [*prompt(0, 47)[:45], 9, 9, 9, 9], 1)
    assert done.cached_tokens["remote"] % 8 == 0


def test_long_prompts_are_asked_for_by_halves(shared_serving):
    one, other = (shared_serving(FULL, blocks=400, host=400, least=1) for _ in range(2))
    one.serve("a", prompt(0, 1001), 1)
    done = other.serve("b", [*prompt(0, 1001)[:777], *prompt(3, 200)], 1)
    assert done.cached_tokens["remote"] == 776
    looks = [names for what, names in other.store.made if what == "look"]
    assert max(map(len, looks)) <= 64 + 1
    assert len(looks) <= 3


def test_what_replaces_a_damaged_object_comes_after_its_delete(shared_serving):
    one = shared_serving(FULL)
    one.serve("a", prompt(0, 50), 1)
    name = next(iter(shared_serving.shared.objects))
    shared_serving.shared.objects[name] = b"damaged"
    other = shared_serving(FULL, store=FakeBackend(hold=True))
    other.add("a", prompt(0, 50), 1)
    other.steps_until(lambda: other.store.calls)
    for kind in ("look", "get"):
        other.store.end(kind)
        other.step()
    other.steps_until(lambda: "a" in other.finished)
    for _ in range(3):
        other.store.end("put")
        other.step()
    assert all(name not in names for what, names in other.store.made if what == "put"), "it is not deleted yet"
    other.store.end("delete")
    for _ in range(3):
        other.step()
    assert [names for what, names in other.store.made if what == "put"][-1] == (name,)
    other.store.end("put")
    other.step()
    assert len(shared_serving.shared.objects[name]) > 300


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


def test_a_slow_fetch_does_not_keep_others_away_for_ever(shared_serving):
    one, other = shared_serving(), shared_serving()
    for k in range(3):
        one.serve(f"r{k}", prompt(k, 50), 1)
    other.cache.estimate_compute(lambda start, end: (end - start) * 1e-9)
    assert other.serve("r0", prompt(0, 50), 1).cached_tokens["remote"] == 48
    assert other.serve("r1", prompt(1, 50), 1).cached_tokens["remote"] == 0
    other.engine.clock_s += 61
    assert other.serve("r2", prompt(2, 50), 1).cached_tokens["remote"] == 48, "the remote may be quick again"


def test_a_compute_time_that_fails_keeps_nothing_in_the_store(shared_serving):
    """What it raised came out of ``schedule``."""
    one, other = shared_serving(), shared_serving()
    for k in range(2):
        one.serve(f"r{k}", prompt(k, 50), 1)
    other.cache.estimate_compute(lambda start, end: (end - start) / 0)
    for k in range(2):
        assert other.serve(f"r{k}", prompt(k, 50), 1).cached_tokens["remote"] == 48


def test_a_manager_uses_the_store_too(shared_serving):
    shared_serving().serve("a", prompt(0, 50), 1)
    cache = shared_serving().cache
    manager = CacheManager(cache)
    sequence = manager.open(Request("a", prompt(0, 50), 1))
    for _ in range(20):
        if manager.start(sequence) is None:
            break
        manager.wait(0.01)
        manager.poll()
    assert sequence.tracked.hit[2] == 48
    for _ in range(20):
        manager.poll()
    step = manager.plan([(sequence, 2)])
    [done] = manager.commit(step, [5])
    assert done.cached_tokens["remote"] == 48
    for _ in range(50):
        if not manager.has_work():
            break
        manager.wait(0.01)
        manager.poll()
    assert not manager.has_work()


def test_spills_wait_for_copies_into_the_host(shared_serving):
    one = shared_serving(hold=[STORE])
    one.add("a", prompt(0, 50), 1)
    one.steps_until(lambda: "a" in one.finished)
    assert not shared_serving.shared.objects
    one.engine.release()
    one.run()
    assert shared_serving.shared.objects


def test_a_request_that_is_loaded_from_what_was_fetched_says_so_in_its_explanation(shared_serving):
    one, other = shared_serving(), shared_serving(journal_events=100, hold=[LOAD])
    one.serve("a", prompt(0, 50), 1)
    other.add("a", prompt(0, 50), 1)
    for _ in range(5):
        other.step()
    other.engine.release()
    other.run()
    from kvtier import explain

    story = explain(other.cache.journal.since(), "a")
    assert (story.hits[0].remote_tokens, story.hits[0].sources) == (48, [(0, 48, "remote"), (48, 50, "computed")])
    assert "48 in the remote tier" in str(story)
    asked, fetched = [wait.why for wait in story.waits if wait.reason == "transfer"]
    assert asked == "the remote tier is asked for its prefix"
    assert fetched.endswith("blocks of its prefix are being fetched from the remote tier")
    assert other.cache.stats().waits["transfer"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_id": ""}, "needs model_id and key_secret"),
        ({"key_secret": None}, "needs model_id and key_secret"),
        ({"host_blocks": None}, "needs a host tier"),
        ({"device": "meta", "copy_engine": "null"}, "needs a host tier with memory"),
        ({"remote_uri": "/var/kv"}, "must be such as file:///var/kv"),
        ({"store": "lazy"}, "use 'eager'"),
    ],
)
def test_a_store_without_names_or_room_is_refused(change, message):
    spec = canary_spec(FULL)
    given = {"device_blocks": {"full": 8}, "host_blocks": {"full": 8}, "remote_uri": FakeBackend(), **ID}
    with pytest.raises(ConfigError, match=message):
        KVCache(spec, **(given | change))


def test_memory_is_kept_while_the_store_may_write_there(shared_serving, monkeypatch):
    monkeypatch.setattr("kvtier.cpu_offload.memory_guard.CLOSE_TIMEOUT_S", 0.01)
    one = shared_serving()
    ends = iter([False, True])
    monkeypatch.setattr(one.store, "close", lambda timeout_s: next(ends))
    one.cache.close()
    arena = one.cache.core.arenas[1]
    assert len(arena.bytes) > 0
    one.cache.close()
    assert not arena.has_bytes


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
def test_what_others_want_is_spilled_although_its_request_went_on(shared_serving, prepare):
    """A system prompt: conversations part there."""
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


def test_a_cache_that_stores_nothing_only_reads_a_store(shared_serving):
    one, other = shared_serving(), shared_serving(store_mode="off")
    one.serve("a", prompt(0, 50), 1)
    assert other.serve("a", prompt(0, 50), 1).cached_tokens["remote"] == 48
    other.serve("b", prompt(1, 50), 1)
    assert store_of(other).spilled_objects == store_of(other).dropped_objects == 0


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


def test_objects_that_failed_puts_have_written_are_deleted_with_a_failed_request(shared_serving):
    """A bucket's answer is late, and the bytes are there."""
    one = shared_serving(store=FakeBackend(), least=10**6)
    answer = one.store._answer
    one.store._answer = lambda ticket, ends: answer(ticket, [(Outcome.FAILED, "late")] * len(ends))
    one.add("bad", prompt(0, 22), 40)
    one.steps_until(lambda: shared_serving.shared.objects and one.known("bad") > 52)
    one.scheduler.fail("bad")
    one.run()
    assert not shared_serving.shared.objects


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


def test_who_waits_for_a_fetch_of_its_beginning_asks_for_the_rest_then(shared_serving):
    one, other = shared_serving(FULL, blocks=200, host=200), shared_serving(FULL, blocks=200, host=200)
    begin = prompt(0, 40)
    texts = [[*begin, *prompt(k, 40)] for k in range(1, 4)]
    for k, text in enumerate(texts):
        one.serve(f"a{k}", text, 1)
    other.store.hold = True
    other.add("new", [*begin, *prompt(9, 8)], 1)
    other.steps_until(lambda: any(what == "get" for what, _ in other.store.calls.values()) or other.store.end("look"))
    for k, text in enumerate(texts):
        other.add(f"b{k}", text, 1)
    other.step()
    other.store.hold = False
    done = other.run()
    assert [sum(done[f"b{k}"].cached_tokens.values()) for k in range(3)] == [76, 76, 76]


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


def test_what_was_spilled_before_its_eviction_goes_out_first(shared_serving):
    one = at_eviction(shared_serving(FULL, blocks=200, host=72))
    for k in range(9):  # the last ones need room: the oldest are spilled, and evicted
        one.serve(f"r{k}", prompt(k, 41), 1)
    assert store_of(one).spilled_objects > 0 and one.cache.stats().host["full"].evicted > 0
    inside.pools(one.cache).forget_all()
    assert one.serve("spilled", prompt(3, 41), 1).cached_tokens["host"] < 40
