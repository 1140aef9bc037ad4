"""Section A of docs/FIELD-BUGS.md: all groups or none. Named after the tracker and its number."""

from __future__ import annotations

import itertools

import inside
import numpy as np
import pytest
from accounts import ids, row_blocks, transfers
from breadth import covering
from core.driving import LOAD, HeldEngine, prompt, scheduled
from core.slabs import shared_serving

from kvtier import ChunkedLocal, FullAttention, SlidingWindow
from kvtier.coordinator import extension
from kvtier.geometry.keys import KeyChain
from kvtier.pools.block_pool import Col
from kvtier.testing import canary_spec

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}


def findable(serving, g: int, tokens: list[int]) -> list[int]:
    """Device blocks of the full blocks of these tokens in group g that can be found."""
    chain: KeyChain = inside.coordinator(serving.cache).chain
    keys = chain.extend(chain.root(None, None, ()), np.array(tokens, np.int32), np.empty((0, 2), np.uint64))
    return [int(b) for b in inside.pools(serving.cache).find(np.full(len(keys), g, np.int32), keys) if b]


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
