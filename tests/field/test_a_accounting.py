"""Section A of docs/FIELD-BUGS.md: free lists, references, double frees. Named after the tracker and its number."""

from __future__ import annotations

import itertools

import inside
import numpy as np
import pytest
from breadth import covering
from core.driving import LOAD, STORE, HeldEngine, assert_same, conserved, prompt, scheduled, snapshot
from core.slabs import shared_serving

from kvtier import ChunkedLocal, FullAttention, InvariantBroken, SlidingWindow
from kvtier.coordinator import extension
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.layout import Layout
from kvtier.pools.block_pool import BlockPools, Col, Place
from kvtier.testing import canary_spec, expected_tokens

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def free_list(pools: BlockPools, g: int = 0) -> list[int]:
    """Group g's empty and cached blocks, as they would be handed out."""
    return pools.empties(g) + pools.coldest(g, int(pools.usable[g]) + 1).tolist()


def check_free_lists(pools: BlockPools) -> None:
    """What the list holds is what the counter says, each block once."""
    for g in range(pools.num_groups):
        listed = free_list(pools, g)
        assert len(listed) == len(set(listed)) == pools.clean[g]


def row_blocks(serving, g: int, request_id: str) -> dict[int, int]:
    """Logical -> physical blocks that a running request holds in group g."""
    row = next(s.row for s in serving.scheduler.running if s.request.request_id == request_id)
    table = inside.coordinator(serving.cache).tables.table(g)[row]
    return {int(j): int(table[j]) for j in np.flatnonzero(table)}


def transfers(serving, direction) -> list:
    return [t for t in serving.engine.submitted if t.direction is direction]


def findable(serving, g: int, tokens: list[int]) -> list[int]:
    """Device blocks of the full blocks of these tokens in group g that can be found."""
    chain: KeyChain = inside.coordinator(serving.cache).chain
    keys = chain.extend(chain.root(None, None, ()), np.array(tokens, np.int32), np.empty((0, 2), np.uint64))
    return [int(b) for b in inside.pools(serving.cache).find(np.full(len(keys), g, np.int32), keys) if b]


def in_host_only(serving, seed: int, length: int) -> None:
    """Prompt ``seed`` was served once; nothing of it is left on the device."""
    serving.serve(f"original {seed}", prompt(seed, length), 1)
    inside.pools(serving.cache).forget_all()


# --- double frees ---------------------------------------------------------------------------------


def test_a1_vllm_42085_second_long_request(make_serving):
    """A window row that recycles blocks is stored; then a request wants all blocks but one."""
    groups = {**FULL, "win": (SlidingWindow(6), 4)}
    serving = make_serving(groups, {"full": 16, "win": 5}, 64, hold=[STORE], scheduler={"max_batched_tokens": 8})
    serving.add("A", prompt(0, 40), 8)
    places: dict[int, set[int]] = {}
    while "A" not in serving.finished:
        step, sampled = serving.begin()
        for j, b in row_blocks(serving, 1, "A").items():
            places.setdefault(b, set()).add(j)
        serving.end(step, sampled)
    assert max(len(at) for at in places.values()) > 1, "some window block was to serve two logical blocks"
    stores = transfers(serving, STORE)
    assert sum(len(t.groups) for t in stores) > 10
    for t in stores:
        for blocks in (t.device, t.host):
            assert len(set(zip(t.groups.tolist(), blocks.tolist(), strict=True))) == len(t.groups), "named twice"
    host_refs = inside.host(serving.cache).arrays.refs
    assert set(host_refs[host_refs > 0].tolist()) == {1}, "a store pins each destination once"
    serving.engine.release()
    serving.run()
    for pools in (inside.pools(serving.cache), inside.host(serving.cache)):
        assert not pools.arrays.refs.any()
        check_free_lists(pools)
    assert serving.serve("B", prompt(1, 15 * 4), 1).finish_reason == "length"
    assert serving.cache.stats().device["full"].peak_held == 15


@pytest.mark.parametrize("references", [2, 3])
def test_a2_vllm_42571_a_block_named_twice_loses_two_references(references):
    pools = BlockPools(Layout.fixed([64], [4]))
    b = int(pools.take(ids(0))[0])
    for _ in range(references - 1):
        pools.acquire(ids(0), ids(b))
    pools.release(ids(0, 0), ids(b, b))
    assert pools.arrays.refs[b] == references - 2
    assert (b in free_list(pools)) == (references == 2)
    check_free_lists(pools)


def test_a10_trtllm_14937_more_releases_than_references_raise_and_link_nothing_twice():
    pools = BlockPools(Layout.fixed([64], [4]))
    b = int(pools.take(ids(0))[0])
    with pytest.raises(AssertionError, match="nobody holds"):
        pools.release(ids(0, 0), ids(b, b))
    assert pools.arrays.refs[b] == 0
    assert sorted(free_list(pools)) == [1, 2, 3, 4]
    check_free_lists(pools)


@pytest.mark.usefixtures("damaged", "unaudited")
def test_a10_trtllm_14937_a_row_that_holds_a_block_more_often_than_it_has_references_raises_when_it_ends(make_serving):
    serving = make_serving(FULL, 8)
    serving.add("A", prompt(0, 13), 4)
    serving.scheduler.commit(serving.scheduler.schedule(), [1])
    row = next(s.row for s in serving.scheduler.running)
    table = inside.coordinator(serving.cache).tables.table(0)[row]
    again, lost = int(table[0]), int(table[1])
    table[1] = again
    with pytest.raises(AssertionError, match="nobody holds"):
        serving.scheduler.abort("A")
        serving.scheduler.schedule()
    listed = free_list(inside.pools(serving.cache))
    assert len(listed) == len(set(listed))
    assert lost not in listed
    serving.cache.close()


@pytest.mark.parametrize("block", [0, 1, 3], ids=["null", "cached", "empty"])
def test_a11_ucm_1053_a_release_of_what_nobody_holds_says_so_and_changes_nothing(make_serving, block):
    """The other project skips and logs; here the caller's mistake is an error, and the pool stays whole."""
    serving = make_serving(FULL, 3)
    serving.serve("A", prompt(0, 8), 1)
    assert inside.pools(serving.cache).arrays.place[:4].tolist() == [
        Place.NULL,
        Place.CACHED,
        Place.CACHED,
        Place.EMPTY,
    ]
    before = snapshot(serving.cache)
    with pytest.raises(InvariantBroken):  # with KVTIER_AUDIT=2 before the loop is asked
        inside.pools(serving.cache).release(ids(0), ids(block))
    with pytest.raises(AssertionError, match="nobody holds"):
        BlockPools.release(inside.pools(serving.cache), ids(0), ids(block))
    assert_same(before, snapshot(serving.cache))
    check_free_lists(inside.pools(serving.cache))


@pytest.mark.parametrize("groups", [{"win": (SlidingWindow(6), 4)}, {**FULL, "win": (SlidingWindow(6), 4)}], ids=str)
def test_a12_vllm_1556_two_sequences_that_part_after_the_window_has_wrapped(make_serving, groups):
    serving = make_serving(groups, 40)
    stem = prompt(0, 24)
    serving.add("A", stem, 12)
    serving.steps_until(lambda: serving.known("A") == 25)
    serving.add("B", [*stem, 1, 2, 3], 12)
    serving.step()
    g = serving.spec.index("win")
    shared = set(row_blocks(serving, g, "A").values()) & set(row_blocks(serving, g, "B").values())
    assert shared, "both were to hold a block of the window at the fork"
    assert min(row_blocks(serving, g, "B")) > 0, "the window had wrapped"
    serving.run()
    serving.cache.reset()
    assert all(pool.empty == pool.usable == 40 for pool in serving.cache.stats().device.values())
    check_free_lists(inside.pools(serving.cache))


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


# --- all groups or none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups",
    [
        {**FULL, "full 2": (FullAttention(), 4)},
        {**FULL, "full 2": (FullAttention(), 4), "win": (SlidingWindow(6), 4)},
        {**FULL, "full 2": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)},
    ],
    ids=lambda groups: f"{len(groups)} groups",
)
def test_a5_vllm_43884_room_for_a_load_is_never_made_of_the_hit(make_serving, groups):
    """The device hit of every full group is what would be evicted next, and the load needs all other blocks."""
    blocks = {name: 9 if name.startswith("full") else 20 for name in groups}
    serving = make_serving(groups, blocks, 64, hold=[])
    serving.serve("A", prompt(0, 33), 1)
    serving.serve("B", prompt(1, 20), 1)  # evicts the second half of A's prefix
    pools, full = inside.pools(serving.cache), [g for g, name in enumerate(groups) if name.startswith("full")]
    hits = {g: pools.coldest(g, 4).tolist() for g in full}
    assert all(pools.clean[g] == 9 for g in full)
    bytes_before = {g: [x[hits[g]].copy() for pair in inside.views(serving.canary)[g] for x in pair] for g in full}
    serving.engine.submitted.clear()
    serving.add("A again", prompt(0, 33), 4)
    serving.step()
    (load,) = transfers(serving, LOAD)
    for g in full:
        blocks_of = row_blocks(serving, g, "A again")
        assert sorted(blocks_of) == list(range(9))
        assert sorted(blocks_of.values()) == list(range(1, 10)), "no block stands for two"
        assert {blocks_of[j] for j in range(4)} == set(hits[g])
        assert not set(load.device[load.groups == g].tolist()) & set(hits[g])
        now = [x[hits[g]] for pair in inside.views(serving.canary)[g] for x in pair]
        assert all(np.array_equal(x, y) for x, y in zip(bytes_before[g], now, strict=True))
    serving.run()
    assert serving.finished["A again"].cached_tokens == {"device": 16, "host": 16}


@pytest.mark.parametrize("slabs", [14, 16, 18])
def test_a5_vllm_50454_groups_that_share_memory_never_make_room_of_each_others_hits(make_cache, slabs):
    """Both groups' hits are what would be evicted next, and the loads of both want memory of the one arena."""
    spec = canary_spec({**FULL, "full 2": (FullAttention(), 4)})
    serving = shared_serving(make_cache, spec, slabs, host=200, copy_engine=lambda memory: HeldEngine(memory, []))
    serving.serve("A", prompt(0, 25), 1)
    pushes = itertools.count(1)
    while sum(len(findable(serving, g, prompt(0, 25))) for g in range(2)) > 6:
        serving.serve(f"push {(k := next(pushes))}", prompt(k, 9), 1)
    hits = [findable(serving, g, prompt(0, 25)) for g in range(2)]
    assert all(hits), "both groups were to have a hit on the device"
    arena = inside.arena(serving.cache)
    cells = {int(c) for g in range(2) for c in arena.cells(np.full(len(hits[g]), g, np.int32), ids(*hits[g]))[0]}
    serving.engine.submitted.clear()
    serving.add("A again", prompt(0, 25), 4)
    serving.step()
    (load,) = transfers(serving, LOAD)
    assert not cells & set(arena.cells(load.groups, load.device)[0].tolist())
    for g in range(2):
        assert set(hits[g]) <= set(row_blocks(serving, g, "A again").values())
    rows = [(g, b) for g in range(2) for b in row_blocks(serving, g, "A again").values()]
    taken = arena.cells(ids(*(g for g, _ in rows)), ids(*(b for _, b in rows)))[0].tolist()
    assert len(taken) == len(set(taken)), "no memory stands for two blocks"
    serving.run()
    assert serving.finished["A again"].cached_tokens["device"] > 0


def forecasts(serving, monkeypatch) -> list[np.ndarray]:
    """The blocks that each call asks for before it takes any, by group, int64 [groups]; for the caller to clear."""
    room, predicted = inside.coordinator(serving.cache).room, list[np.ndarray]()
    make_clean, planned = room.make_clean, extension.plan_running
    room.make_clean = lambda need, *pinned: (predicted.append(need.copy()), make_clean(need, *pinned))[1]

    def plan_running(*args):
        *found, taken = planned(*args)
        if taken:  # without asking for room first
            predicted.append(args[-3].copy())
        return *found, taken

    monkeypatch.setattr(extension, "plan_running", plan_running)
    return predicted


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 16, 64])
@pytest.mark.parametrize("kind", [SlidingWindow(6), SlidingWindow(8), ChunkedLocal(8)], ids=str)
def test_a6_vllm_45856_a_capped_group_never_takes_more_than_its_cap(make_serving, monkeypatch, kind, budget):
    """Uncapped, the prompt needs 15 blocks of the local group; it is admitted with exactly its cap free.

    Every chunk takes the blocks that were predicted for it.
    """
    groups = {**FULL, "local": (kind, 4)}
    cap = canary_spec(groups).group("local").peak_blocks(60)
    assert cap <= 3 < 15
    serving = make_serving(groups, {"full": 20, "local": cap}, scheduler={"max_batched_tokens": budget})
    serving.add("long", prompt(0, 60), 6)
    predicted, done, before = forecasts(serving, monkeypatch), 0, [dict[int, int]()] * 2
    while "long" not in serving.finished:
        predicted.clear()
        step, sampled = serving.begin()
        held = [row_blocks(serving, g, "long") for g in range(2)]
        taken = [len(now.keys() - then.keys()) for now, then in zip(held, before, strict=True)]
        assert taken == sum(predicted, np.zeros(2, np.int64)).tolist()
        before = held
        (start, end) = int(step.positions[0]), int(step.seq_lens[0])
        assert start == done
        for group, pool in zip(serving.spec.groups, serving.cache.stats().device.values(), strict=True):
            assert pool.held >= group.blocks_needed(start, end)
            assert pool.held <= pool.usable
        serving.end(step, sampled)
        done = end
    assert serving.finished["long"].finish_reason == "length"
    assert serving.finished["long"].preemptions == 0


PLANS = [
    (local, host, new) for local in (0, 8, 16) for host in (0, 8, 24) if host == 0 or host > local for new in (1, 7)
]


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize(
    ("local", "host", "new", "names"), covering(PLANS, [["full", "win", "chunk"], ["full"], ["win"]]), ids=str
)
def test_a7_vllm_46892_blocks_predicted_are_the_blocks_taken(
    make_serving, monkeypatch, names, local, host, new, budget
):
    """For each kind of group and each mix of device hit, host hit and new tokens, at each call and in each group."""
    serving = make_serving({n: GROUPS[n] for n in names}, 40, 64, hold=[], scheduler={"max_batched_tokens": budget})
    stem = prompt(0, 32)
    if host:
        serving.serve("in the host", stem[:host], 1)
        inside.pools(serving.cache).forget_all()
    if local:
        serving.serve("on the device", stem[:local], 1)
    serving.add("plan", [*stem[: max(local, host)], *prompt(5, new)], 3)
    predicted, pools = forecasts(serving, monkeypatch), inside.pools(serving.cache)
    while serving.scheduler.has_work():
        predicted.clear()
        before = pools.column(Col.EVICTED) - pools.column(Col.EMPTY)
        step, sampled = serving.begin()
        taken = pools.column(Col.EVICTED) - pools.column(Col.EMPTY) - before
        assert np.array_equal(taken, sum(predicted, np.zeros(len(names), np.int64)))
        assert all(np.all(need >= 0) for need in predicted)
        serving.end(step, sampled)
    serving.run()


@pytest.mark.parametrize(("hit_a", "hit_b", "common"), [(96, 80, 64), (64, 80, 64), (96, 16, 0), (32, 96, 32)])
def test_a8_ascend_14283_every_group_is_cut_to_the_common_hit(make_serving, hit_a, hit_b, common):
    """Two full-attention groups with blocks of 32 and of 16 tokens that have different prefixes."""
    serving = make_serving({"a": (FullAttention(), 32), "b": (FullAttention(), 16)}, {"a": 8, "b": 16})
    serving.serve("before", prompt(0, 97), 1)
    cache = serving.cache
    chain: KeyChain = inside.coordinator(cache).chain
    tokens = np.array(prompt(0, 97), np.int32)
    keys = chain.extend(chain.root(None, None, ()), tokens, np.empty((0, 2), np.uint64))
    for g, bt, hit in ((0, 32, hit_a), (1, 16, hit_b)):
        for j in range(hit // bt, 96 // bt):
            at = np.array([g], np.int32)
            inside.pools(cache).unpublish(at, inside.pools(cache).find(at, keys[(j + 1) * bt // 16 - 1][None]))
    serving.add("again", prompt(0, 97), 1)
    match = inside.matcher(cache).match(inside.coordinator(cache).tables, keys, 97)
    assert match.num_tokens == common
    assert match.counts.tolist() == [common // 32, common // 16]
    assert np.all(match.device > 0)
    held_before = inside.pools(cache).free.copy()
    step, sampled = serving.begin()
    assert scheduled(step) == {"again": min(64, 97 - common)}
    assert np.all(inside.pools(cache).free <= held_before)
    serving.end(step, sampled)
    assert serving.run()["again"].cached_tokens == {"device": common, "host": 0}


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


# --- twins ----------------------------------------------------------------------------------------


def test_a16_kvcached_401_one_copy_evicted_the_other_is_found_and_then_none(make_serving):
    """Same prompt twice in one step: one block a key and tier, so the sibling of a device block is its host copy."""
    serving = make_serving(FULL, 6, 11, hold=[])
    for name in ("first", "second"):
        serving.add(name, prompt(0, 21), 1)
    serving.run()
    assert int((inside.pools(serving.cache).arrays.mark > 0).sum()) == 5, "no second block of the same content"
    serving.serve("evicts the device's copies", prompt(1, 24), 1)
    assert serving.serve("the host's are found", prompt(0, 21), 1).cached_tokens == {"device": 0, "host": 20}
    for k in range(2, 5):
        serving.serve(f"evicts both {k}", prompt(k, 24), 1)
    assert sum(serving.serve("none is found", prompt(0, 21), 1).cached_tokens.values()) == 0


class Twins:
    """B generates what A's prompt says already; both compute the same blocks, and B's give way to A's.

    ``running``: A goes on; else it has ended when B gets there, and A's blocks are on the free list.
    """

    def __init__(self, make_serving, running: bool) -> None:
        self.serving = serving = make_serving(GROUPS, {"full": 16, "win": 16, "chunk": 16})
        start = prompt(0, 6)
        text = expected_tokens(serving.spec, start, 14)
        serving.add("B", start, 30)
        serving.steps_until(lambda: serving.known("B") == 8)
        serving.add("A", [*start, *text], 16 if running else 1)
        step, sampled = serving.begin()
        self.canonical = row_blocks(serving, 0, "A")
        self.duplicates = set(row_blocks(serving, 0, "B").values()) - set(self.canonical.values())
        serving.end(step, sampled)
        assert ("A" in serving.finished) is not running

    def step(self) -> None:
        self.duplicates |= set(row_blocks(self.serving, 0, "B").values()) - set(self.canonical.values())
        self.serving.step()

    def place_and_refs(self, block: int) -> tuple[int, int]:
        a = inside.pools(self.serving.cache).arrays
        return int(a.place[int(a.meta[0, Col.BASE]) + block]), int(a.refs[int(a.meta[0, Col.BASE]) + block])


@pytest.mark.parametrize("running", [False, True], ids=["on the free list", "held"])
def test_a17_nano_vllm_219_243_a_late_merge_acquires_the_block_that_it_merges_into(make_serving, running):
    twins = Twins(make_serving, running)
    last = twins.canonical[4]
    assert twins.place_and_refs(last) == ((Place.HELD, 1) if running else (Place.CACHED, 0))
    twins.serving.steps_until(lambda: twins.serving.known("B") == 20)
    twins.step()
    assert row_blocks(twins.serving, 0, "B") | twins.canonical == row_blocks(twins.serving, 0, "B")
    assert twins.place_and_refs(last) == (Place.HELD, 1 + running)
    check_free_lists(inside.pools(twins.serving.cache))
    twins.serving.run()


@pytest.mark.parametrize("running", [False, True], ids=["on the free list", "held"])
def test_a18_mini_sglang_142_pages_freed_by_a_merge_are_read_by_nobody(make_serving, running):
    """A third request takes the freed duplicates at once; B's text is compared when it ends."""
    twins = Twins(make_serving, running)
    serving, taken = twins.serving, set()
    serving.add("C", prompt(7, 1), 30, priority=-1)  # takes its blocks before B takes its next
    while "B" not in serving.finished:
        twins.step()
        if serving.is_running("C") and serving.is_running("B"):
            mine, others = set(row_blocks(serving, 0, "B").values()), set(row_blocks(serving, 0, "C").values())
            assert not mine & others
            taken |= others & twins.duplicates
    assert taken, "C was to get blocks that B had"
    serving.run()


# --- every step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_a19_sglang_35270_the_books_balance_after_every_step(make_serving, store):
    """usable = empty + cached + fenced + held + quarantined, in each pool and tier, while windows and copies come
    and go; ``core/test_fuzz.py`` does the same at random."""
    serving = make_serving(GROUPS, {"full": 12, "win": 6, "chunk": 6}, 9, hold=[STORE], store=store)
    for k in range(6):
        serving.add(str(k), prompt(k % 3, 9 + 3 * k), 7)
    n = 0
    while serving.scheduler.has_work():
        serving.step()
        n += 1
        if n % 3 == 0:
            serving.engine.end(error="torn" if n % 2 else "", bad=[0] if n % 2 else None)
        for pools in (inside.pools(serving.cache), inside.host(serving.cache)):
            assert conserved(pools)
            check_free_lists(pools)
    assert n > 10
