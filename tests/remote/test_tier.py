"""The tier behind the host tier: what one cache has spilled, another one hits."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from core.driving import LOAD, prompt

from kvtier import CacheManager, ConfigError, FullAttention, KVCache, Request, SlidingWindow
from kvtier.coordinator.seek import UNKNOWN_S
from kvtier.geometry.options import STORE_MODES, StoreMode
from kvtier.testing import canary_spec
from remote.conftest import GROUPS, ID, store_of
from remote.fake_backend import FakeBackend

FULL = {"full": (FullAttention(), 4)}
NOTHING = {"device": 0, "host": 0, "remote": 0}


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


@pytest.mark.parametrize("on_load_error", ["recompute", "fail"])
def test_what_was_fetched_passes_the_checks_of_later_loads(shared_serving, on_load_error):
    shared_serving().serve("a", prompt(0, 50), 1)
    other = shared_serving(verify="full", on_load_error=on_load_error)
    done = other.serve("a", prompt(0, 50), 1)
    assert (done.cached_tokens["remote"], done.finish_reason) == (48, "length")
    assert other.cache.stats().transfers.corrupt_blocks == 0


def test_a_fetch_does_not_push_out_the_rest_of_its_hit(shared_serving):
    shared_serving(FULL, least=1).serve("a", prompt(0, 97), 1)
    other = shared_serving(FULL, host=24, least=1)
    other.serve("part", prompt(0, 49), 1)
    inside.pools(other.cache).forget_all()
    done = other.serve("a", prompt(0, 97), 1)
    assert done.cached_tokens == {"device": 0, "host": 48, "remote": 48}


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


def test_a_slow_fetch_does_not_keep_others_away_for_ever(shared_serving):
    one, other = shared_serving(), shared_serving()
    for k in range(3):
        one.serve(f"r{k}", prompt(k, 50), 1)
    other.cache.estimate_compute(lambda start, end: (end - start) * 1e-9)
    assert other.serve("r0", prompt(0, 50), 1).cached_tokens["remote"] == 48
    assert other.serve("r1", prompt(1, 50), 1).cached_tokens["remote"] == 0
    other.engine.clock_s += 61
    assert other.serve("r2", prompt(2, 50), 1).cached_tokens["remote"] == 48, "the remote may be quick again"


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


def test_a_store_mode_goes_with_a_remote_by_what_it_is_worth_there_and_not_by_its_moments(shared_serving, monkeypatch):
    monkeypatch.setitem(STORE_MODES, "eager", StoreMode(when_full=True, before_eviction=True))
    one, other = shared_serving(), shared_serving()
    one.serve("a", prompt(0, 50), 1)
    assert other.serve("a", prompt(0, 50), 1).cached_tokens["remote"] == 48
    monkeypatch.setitem(STORE_MODES, "eager", StoreMode(before_eviction=True))
    with pytest.raises(ConfigError, match="too late for remote_uri"):
        shared_serving()


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


def test_a_cache_that_stores_nothing_only_reads_a_store(shared_serving):
    one, other = shared_serving(), shared_serving(store_mode="off")
    one.serve("a", prompt(0, 50), 1)
    assert other.serve("a", prompt(0, 50), 1).cached_tokens["remote"] == 48
    other.serve("b", prompt(1, 50), 1)
    assert store_of(other).spilled_objects == store_of(other).dropped_objects == 0


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
