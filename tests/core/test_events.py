"""KV events: replayed from the beginning they leave what can be found, whatever happened between two polls."""

from __future__ import annotations

import random

import inside
import numpy as np
import pytest
from breadth import sample
from model.metrics import Listener

from core.driving import LOAD, STORE, prompt
from core.slabs import A, counts, free, keys_of, of, pools_of, take
from kvtier import (
    CacheClosed,
    ChunkedLocal,
    ConfigError,
    EventKind,
    FullAttention,
    InvalidRequest,
    KVCache,
    KVEvents,
    Request,
    SlidingWindow,
)
from kvtier.cache.events import _Seen
from kvtier.geometry.layout import Layout
from kvtier.pools import exchange
from kvtier.pools.block_pool import BlockPools, Col, Mark
from kvtier.testing import Faults, SimulatedEngine

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 8)}


def findable(cache) -> set[tuple[str, str, bytes]]:
    """Block by block, those whose key leads to them."""
    coordinator, host = cache.core.coordinator, cache.core.host
    found = set()
    for tier, pools in (("device", coordinator.pools), ("host", host)):
        for g, group in enumerate(cache.spec.groups if pools is not None else ()):
            base = int(pools.arrays.meta[g, Col.BASE])
            for b in range(1, int(pools.usable[g]) + 1):
                key = pools.arrays.key[base + b].copy()
                if pools.arrays.mark[base + b] == Mark.READY:
                    assert pools.find(np.array([g], np.int32), key[None])[0] == b
                    found.add((tier, group.name, key.tobytes()))
    return found


@pytest.mark.parametrize("memory", ["fixed", "shared"])
@pytest.mark.parametrize("seed", sample(range(3), [0]))
def test_events_leave_what_can_be_found_through_shortage_failed_copies_and_resets(make_serving, seed, memory):
    rnd = random.Random(seed)
    sizes = {"device_bytes": 9000, "host_bytes": 20000} if memory == "shared" else {}
    serving = make_serving(
        GROUPS,
        None if sizes else {"full": 12, "win": 8, "chunk": 6},
        None if sizes else 40,
        copy_engine=lambda m: SimulatedEngine(m, seed=seed, faults=Faults(fail=0.2, corrupt=0.1)),
        verify="full",
        **sizes,
    )
    often, seldom = Listener(serving.cache), Listener(serving.cache)
    for k in range(120):
        if rnd.random() < 0.4:
            serving.add(f"{k}", prompt(rnd.randrange(4), rnd.randrange(1, 30)), rnd.randrange(1, 9))
        if rnd.random() < 0.03:
            serving.cache.reset()
        serving.step()
        often.poll()
        assert often.found == findable(serving.cache)
        if rnd.random() < 0.1:
            seldom.poll()
            assert seldom.found == often.found
    serving.run()
    late = Listener(serving.cache)
    for listener in (often, seldom, late):
        listener.poll()
        assert listener.found == findable(serving.cache)
        assert listener.events.poll() == []
    assert {tier for tier, _, _ in late.found} == {"device", "host"}


def test_keys_of_a_request_are_those_under_which_its_prompt_is_found(make_serving):
    serving = make_serving(GROUPS, 32, 64, hold=[])
    listener = Listener(serving.cache)
    request = serving.add("A", prompt(0, 27), 1)
    serving.run()
    listener.poll()
    keys = listener.events.keys_of(request)
    assert {name: len(found) for name, found in keys.items()} == {"full": 6, "win": 6, "chunk": 3}
    stored = {key for tier, group, key in listener.found if (tier, group) == ("device", "full")}
    assert stored == {key.tobytes() for key in keys["full"]}
    assert keys["chunk"][0].tobytes() == keys["full"][1].tobytes(), "both end at token 8"
    for other in ({"cache_salt": "s"}, {"adapter": "a"}, {"extra_keys": (1,)}):
        foreign = listener.events.keys_of(Request("B", prompt(0, 27), 1, **other))["full"]
        assert not stored & {key.tobytes() for key in foreign}
    assert all(len(found) == 0 for found in listener.events.keys_of(Request("C", [1, 2, 3], 1)).values())


def test_a_block_is_stored_once_it_can_be_found_and_not_before(make_serving):
    serving = make_serving(FULL, 32, 64, hold=[STORE, LOAD])
    listener = Listener(serving.cache)
    serving.add("A", prompt(0, 8), 1)
    serving.scheduler.schedule()
    listener.poll()
    assert listener.found == set(), "nothing is computed yet"
    step = serving.scheduler.step
    serving.scheduler.commit(step, serving.canary.forward(step))
    listener.poll()
    assert {tier for tier, _, _ in listener.found} == {"device"}, "the stores are under way"
    serving.engine.release()
    serving.scheduler.commit(serving.scheduler.schedule(), [])
    listener.poll()
    assert sorted(tier for tier, _, _ in listener.found) == ["device", "device", "host", "host"]


def test_what_comes_and_goes_or_moves_between_two_polls_is_no_event(make_serving):
    serving = make_serving(FULL, 8)
    listener = Listener(serving.cache)
    serving.serve("A", prompt(0, 17), 1)
    listener.poll()
    kept, blocks = set(listener.found), inside.pools(serving.cache).coldest(0, 8).tolist()
    serving.serve("B", prompt(1, 29), 1)
    inside.pools(serving.cache).forget_all()
    serving.add("holds a block", [1, 2], 1)
    serving.add("A again", prompt(0, 17), 1)
    serving.run()
    assert inside.pools(serving.cache).coldest(0, 8).tolist() != blocks, "the same content lies elsewhere"
    assert listener.events.poll() == []
    assert kept == findable(serving.cache)
    serving.cache.reset()
    (event,) = listener.events.poll()
    assert (event.kind, event.tier, event.group, len(event.keys)) == (EventKind.REMOVED, "device", "full", 4)


@pytest.mark.parametrize("more", [0, 1])
def test_more_changes_than_the_log_holds_are_told_as_well(more):
    """The log's last entries would be right; what was written before them is no longer there."""
    pools = BlockPools(Layout.fixed([1], [400]))
    room, seen = int(pools.arrays.meta[0, Col.LOG_MASK]) + 1, _Seen("device", ("full",), pools)
    first, *rest = take(pools, A, room + more)
    pools.publish(*of(A, [first]), keys_of(A, [first]), Mark.READY)
    assert [event.kind for event in seen.poll()] == [EventKind.STORED]
    pools.unpublish(*of(A, [first]))
    pools.publish(*of(A, rest), keys_of(A, rest), Mark.READY)
    assert int(pools.arrays.meta[0, Col.CHANGES]) - seen._since[0] == room + more
    gone, come = seen.poll()
    assert (gone.kind, gone.keys.tolist()) == (EventKind.REMOVED, keys_of(A, [first]).tolist())
    assert (come.kind, sorted(come.keys.tolist())) == (EventKind.STORED, sorted(keys_of(A, rest).tolist()))


def test_content_that_moved_is_still_there_when_its_old_block_is_used_anew():
    pools = pools_of(2)
    seen = _Seen("device", ("a", "b"), pools)
    (moved, *rest) = take(pools, A, 3)
    free(pools, A, rest)
    assert pools.provide(counts(5, 0))
    held = take(pools, A, 2)
    pools.publish(*of(A, [moved]), keys_of(A, [moved]), Mark.READY)
    assert [event.kind for event in seen.poll()] == [EventKind.STORED]
    target = np.empty(1, np.int32)
    exchange.move_blocks(*pools.arrays, 0, np.array([moved], np.int32), target, False)
    assert list(seen.poll()) == [] and int(target[0]) not in (moved, *held)
    pools.publish(*of(A, [moved]), keys_of(A, [99]), Mark.READY)
    (event,) = seen.poll()
    assert event.kind is EventKind.STORED and event.keys.tolist() == keys_of(A, [99]).tolist()


def test_a_closed_cache_has_no_events(make_cache):
    cache = make_cache(FULL, 8)
    events = KVEvents(cache)
    assert events.poll() == []
    cache.close()
    with pytest.raises(CacheClosed):
        events.poll()
    with pytest.raises(CacheClosed):
        KVEvents(cache)


@pytest.mark.parametrize("bad", [None, "cache", KVCache, Request("r", [1], 1)], ids=lambda bad: type(bad).__name__)
def test_what_is_no_cache_has_no_events(bad):
    with pytest.raises(ConfigError, match=r"cache must be a kvtier.KVCache, got"):
        KVEvents(bad)


@pytest.mark.parametrize("bad", [None, "r", [1, 2, 3], Request], ids=lambda bad: type(bad).__name__)
def test_what_is_no_request_has_no_keys(make_serving, bad):
    with pytest.raises(InvalidRequest, match=r"takes a kvtier.Request, not"):
        KVEvents(make_serving().cache).keys_of(bad)


def test_events_are_told_apart_by_which_they_are(make_serving):
    """Comparing two of several keys, or putting one into a set, raised what NumPy raises for arrays."""
    serving = make_serving(FULL, 8)
    serving.serve("r", prompt(0, 12), 1)
    (first,), (again,) = (KVEvents(serving.cache).poll() for _ in range(2))
    assert len(first.keys) > 1
    assert first != again
    assert len({first, again, first}) == 2
