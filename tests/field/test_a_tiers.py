"""Section A of docs/FIELD-BUGS.md: stores, lookups and pins, and two tiers. Named after the tracker and its number."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from accounts import check_free_lists, transfers
from core.driving import LOAD, STORE, conserved, prompt, scheduled

from kvtier import FullAttention
from kvtier.pools.block_pool import Col, Place

FULL = {"full": (FullAttention(), 4)}


def in_host_only(serving, seed: int, length: int) -> None:
    """Prompt ``seed`` was served once; nothing of it is left on the device."""
    serving.serve(f"original {seed}", prompt(seed, length), 1)
    inside.pools(serving.cache).forget_all()


# --- stores, lookups and pins ---------------------------------------------------------------------


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a3_vllm_41289_a_block_is_not_offloaded_again_while_its_store_is_in_flight(make_serving, store):
    serving = make_serving(FULL, 12, 64, hold=[STORE], store=store, scheduler={"max_batched_tokens": 24})
    serving.add("A", prompt(0, 25), 1)
    serving.steps_until(lambda: "A" in serving.finished)
    serving.step()  # lazy stores begin here, of a device that nobody asks anything of
    serving.add("B", prompt(0, 25), 1)
    serving.steps_until(lambda: "B" in serving.finished)
    stores = transfers(serving, STORE)
    keys = [k.tobytes() for t in stores for k in t.keys]
    assert keys
    assert len(keys) == len(set(keys)), "a second transfer for the same key"
    host = inside.host(serving.cache)
    for t in stores:
        assert np.array_equal(host.find(t.groups, t.keys), t.host), "the key is there, and pending"
    assert serving.cache.stats().host["full"].cached == 0
    assert serving.finished["B"].cached_tokens["device"] == 24
    serving.engine.release()
    serving.run()


@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("end", ["lands", "aborted"])
def test_a4_vllm_39702_expected_18_hit_blocks_got_18(make_serving, store, end):
    """A host tier of exactly the 18 blocks that A is matched with.

    Lazy: making room on the device for A's load wants host blocks, between the lookup and the load.
    """
    serving = make_serving(FULL, 40, 18, hold=[], store=store)
    serving.serve("A", prompt(0, 73), 1)
    if store == "lazy":
        serving.serve("pushes A out", prompt(1, 160), 1)
    else:
        inside.pools(serving.cache).forget_all()
    host = inside.host(serving.cache)
    before = host.arrays.refs.copy()
    assert serving.cache.stats().host["full"].cached == 18
    serving.engine.hold = {LOAD, STORE}
    serving.engine.submitted.clear()
    serving.add("A again", prompt(0, 73), 1)
    serving.step()
    (load,) = transfers(serving, LOAD)
    assert sorted(load.host.tolist()) == list(range(1, 19)), "the load moves the 18 blocks that were matched"
    serving.add("other", prompt(2, 41), 1)
    serving.step()
    assert transfers(serving, STORE) == [], "there is no host block that a store could take"
    assert np.all(host.arrays.refs[host.entries(load.groups, load.host)] == 1)
    if end == "aborted":
        serving.scheduler.abort("A again")
        serving.step()
    serving.engine.release()
    serving.run()
    assert np.array_equal(host.arrays.refs, before), "pins are back where they were"
    if end == "lands":
        assert serving.finished["A again"].cached_tokens == {"device": 0, "host": 72}


@pytest.mark.parametrize("when", ["lookup without admission", "abort during load", "second lookup before the load"])
def test_a14_lmcache_2954_pins_return_to_where_they_were(make_serving, when):
    """References are audited at every step, so none is ever below zero or above its owners."""
    serving = make_serving(FULL, 16, 64, hold=[], deadline_s=5.0)
    in_host_only(serving, 0, 25)
    host = inside.host(serving.cache)
    start = host.arrays.refs.copy()
    mine = np.flatnonzero(host.arrays.place[:65] == Place.CACHED)
    assert len(mine) == 6
    serving.engine.hold = {LOAD, STORE}
    if when == "lookup without admission":  # stores that never end read the blocks that it needs
        serving.engine.can_order = False
        serving.add("fences", prompt(1, 61), 1)
        serving.step()
        serving.add("again", prompt(0, 25), 1)
        serving.step()
        assert not serving.is_running("again")
        assert transfers(serving, LOAD) == []
        assert not host.arrays.refs[mine].any(), "the match's pins have ended with the call"
    else:
        serving.add("again", prompt(0, 25), 1)
        serving.step()
        assert np.all(host.arrays.refs[mine] == 1)
        if when == "abort during load":
            serving.scheduler.abort("again")
        else:
            serving.add("second", prompt(0, 25), 1)
        serving.step()
        assert np.all(host.arrays.refs[mine] == 1), "one load, one pin"
        assert len(transfers(serving, LOAD)) == 1
    serving.engine.release()
    serving.run()
    assert np.array_equal(host.arrays.refs, start)
    check_free_lists(host)


def test_a15_lmcache_3884_a_host_block_outlives_its_reader_and_is_reclaimed_after(make_serving):
    serving = make_serving(FULL, 40, 6, hold=[])
    in_host_only(serving, 0, 25)
    serving.engine.hold = {LOAD}
    serving.engine.submitted.clear()
    serving.add("reader", prompt(0, 25), 1)
    serving.step()
    (load,) = transfers(serving, LOAD)
    for k in range(3):
        serving.add(f"wants room {k}", prompt(1 + k, 25), 1)
        serving.step()
    assert transfers(serving, STORE) == []
    assert np.array_equal(inside.host(serving.cache).find(load.groups, load.keys), load.host), "still there"
    serving.engine.release()
    serving.run()
    serving.serve("wants room after", prompt(9, 25), 1)
    assert not inside.host(serving.cache).find(load.groups, load.keys).any(), "reclaimed once nobody reads them"
    assert serving.cache.stats().host["full"].cached == 6


def test_a13_lmcache_987_the_hit_rate_does_not_decay(make_serving):
    """50 times the host tier's blocks pass through it; then a prompt that is sent twice still hits."""
    m = 4
    serving = make_serving(FULL, 6, m)
    for k in range(50):
        serving.serve(f"distinct {k}", prompt(k, 17), 1)
    pool = serving.cache.stats().host["full"]
    assert pool.empty + pool.cached == m
    assert pool.evicted >= 49 * m
    serving.serve("once", prompt(99, 17), 1)
    inside.pools(serving.cache).forget_all()
    assert serving.serve("twice", prompt(99, 17), 1).cached_tokens == {"device": 0, "host": 16}


# --- two tiers ------------------------------------------------------------------------------------


def test_a9_trtllm_12834_an_eviction_to_the_host_moves_one_count_in_each_tier(make_serving):
    """The device is full of clean blocks; the copy of one goes to the host. Nothing changes tier but content."""
    serving = make_serving(FULL, 4, 8, hold=[STORE], store="lazy", scheduler={"max_batched_tokens": 1})
    serving.add("A", prompt(0, 16), 1)
    serving.steps_until(lambda: "A" in serving.finished)
    device, host = inside.pools(serving.cache), inside.host(serving.cache)
    assert (device.clean[0], host.clean[0]) == (4, 8)
    serving.add("B", prompt(1, 3), 1)
    step, sampled = serving.begin()
    stores = transfers(serving, STORE)
    moved = sum(len(t.groups) for t in stores)
    assert moved >= 1
    assert device.free[0] == 3, "one block went to B; those whose copies are under way are still free"
    assert host.clean[0] == 8 - moved
    pairs = [(int(d), int(h)) for t in stores for d, h in zip(t.device, t.host, strict=True)]
    assert len({d for d, _ in pairs}) == len({h for _, h in pairs}) == moved
    serving.end(step, sampled)
    serving.engine.release()
    serving.run()
    for pools in (device, host):
        assert conserved(pools)
        assert np.all(pools.arrays.meta[:, : Col.SWEEP] >= 0)
        check_free_lists(pools)


def test_a20_trtllm_1687_a_host_hit_without_a_free_device_block_waits(make_serving):
    serving = make_serving(FULL, 8, 64, hold=[])
    in_host_only(serving, 0, 25)
    serving.add("running", prompt(1, 29), 3)
    serving.step()
    assert inside.pools(serving.cache).free[0] == 0
    serving.add("again", prompt(0, 25), 2)
    assert scheduled(serving.step()) == {"running": 1}
    assert "full" in serving.scheduler.why_waiting()["again"]
    done = serving.run()
    assert done["running"].preemptions == 0
    assert done["again"].cached_tokens == {"device": 0, "host": 24}


def test_a21_trtllm_18868_an_emptied_host_block_goes_out_before_a_live_one(make_serving):
    """A bad block of a load is forgotten; what is stored next takes its place, and no other key is lost.

    A load that succeeds empties nothing here: the host keeps its copy.
    """
    serving = make_serving(FULL, 16, 6, hold=[])
    in_host_only(serving, 0, 25)
    serving.engine.hold = {LOAD}
    serving.add("again", prompt(0, 25), 1)
    serving.step()
    (load,) = transfers(serving, LOAD)
    serving.engine.end(error="torn", bad=[5])
    serving.engine.hold = set()
    serving.run()
    host = serving.cache.stats().host["full"]
    assert (host.cached, host.evicted) == (6, 0)
    assert np.all(inside.host(serving.cache).find(load.groups, load.keys) > 0)
