"""The hit against brute force: random residency in both tiers, every kind of mask."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from breadth import sized
from hypothesis import given, settings, strategies as st

from core.driving import prompt, sees
from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, KVCache, SlidingWindow
from kvtier.pools.block_pool import Mark
from kvtier.testing import canary_spec

ATTENTION = st.one_of(
    st.just(FullAttention()), st.integers(1, 9).map(SlidingWindow), st.sampled_from([4, 8, 12]).map(ChunkedLocal)
)
KINDS = st.lists(st.tuples(ATTENTION, st.sampled_from([1, 2, 4])), min_size=1, max_size=3)
LENGTH = 26


def needed(group: GroupSpec, n: int) -> set[int]:
    """Logical blocks with a token before ``n`` that position ``n`` sees: what a hit of n tokens must have."""
    return {j // group.block_tokens for j in range(n) if sees(group, n, j)}


def best_hit(spec: CacheSpec, resident: list[set[int]], num_tokens: int) -> int:
    """The largest boundary at which every group has what it needs: an intersection, by trying them all."""
    unit = spec.hit_tokens
    boundaries = range((num_tokens - 1) // unit * unit, 0, -unit)
    fits = (n for n in boundaries if all(needed(g, n) <= have for g, have in zip(spec.groups, resident, strict=True)))
    return next(fits, 0)


def fill(cache: KVCache, g: int, blocks: dict[int, Mark], keys: np.ndarray, host: bool) -> dict[int, int]:
    """Publishes logical blocks of group g in one tier; logical -> physical."""
    pools = inside.host(cache) if host else inside.pools(cache)
    units = cache.spec.groups[g].block_tokens // cache.spec.hash_tokens
    out = {}
    for j, mark in blocks.items():
        b = pools.take(np.array([g], np.int32))
        pools.publish(np.array([g], np.int32), b, keys[(j + 1) * units - 1][None], mark)
        if mark is Mark.READY:
            pools.release(np.array([g], np.int32), b)
        out[j] = int(b[0])
    return out


@pytest.mark.usefixtures("damaged")
@settings(max_examples=250)
@given(
    kinds=KINDS,
    num_tokens=st.integers(1, LENGTH),
    density=st.sampled_from([0.3, 0.7, 0.95]),
    seed=st.integers(0, 2**32),
    use_host=st.booleans(),
)
def test_the_hit_is_the_largest_boundary_valid_in_every_group(kinds, num_tokens, density, seed, use_host):
    rng = np.random.default_rng(seed)
    spec = canary_spec({f"g{i}": kind for i, kind in enumerate(kinds)})
    sizes = dict.fromkeys(spec.names, LENGTH + 2)
    with KVCache(spec, device="meta", device_blocks=sizes, host_blocks=sizes, key_secret=b"x") as cache:
        chain = inside.coordinator(cache).chain
        keys = chain.extend(
            chain.root(None, None, ()), np.array(prompt(1, LENGTH), np.int32), np.empty((0, 2), np.uint64)
        )
        resident, device, host, pending = [], [], [], []
        for g, group in enumerate(spec.groups):
            places: list[dict[int, Mark]] = [{}, {}]
            for j in range(LENGTH // group.block_tokens):
                for tier in (0, 1):
                    if rng.random() < density / (1 + tier * 0.5):
                        places[tier][j] = Mark.PENDING if rng.random() < 0.08 else Mark.READY
            device.append(fill(cache, g, places[0], keys, host=False))
            host.append(fill(cache, g, places[1], keys, host=True) if use_host else {})
            seen = set(device[-1]) | set(host[-1])
            resident.append(seen)
            ready = {j for j, m in places[0].items() if m is Mark.READY}
            loadable = (
                {j for j, m in places[1].items() if m is Mark.READY and j not in places[0]} if use_host else set()
            )
            pending.append(seen - ready - loadable)
        coordinator = inside.coordinator(cache)
        match = inside.matcher(cache).match(coordinator.tables, keys, num_tokens, use_host)
        n = best_hit(spec, resident, num_tokens)
        assert match.num_tokens == n
        for g, group in enumerate(spec.groups):
            want = sorted(needed(group, n))
            on_device, in_host = match.of_group(g)
            assert match.at[match.groups == g].tolist() == want
            assert match.counts[g] == len(want)
            assert on_device.tolist() == [device[g].get(j, 0) for j in want]
            for j, found in zip(want, in_host.tolist(), strict=True):
                if j not in device[g]:
                    assert found == host[g][j]
        assert match.pending == any(needed(group, n) & pending[g] for g, group in enumerate(spec.groups))
        longest = (num_tokens - 1) // spec.hit_tokens * spec.hit_tokens
        assert (match.limited_by == "") == (n == longest)


def test_the_hit_is_an_intersection_and_not_a_minimum(make_cache):
    """Full attention has 1..3 units, the window only what a hit of 4 needs: nothing is valid in both but 0."""
    cache = make_cache({"full": (FullAttention(), 4), "win": (SlidingWindow(4), 4)}, 16)
    chain = inside.coordinator(cache).chain
    keys = chain.extend(chain.root(None, None, ()), np.array(prompt(1, 17), np.int32), np.empty((0, 2), np.uint64))
    resident = [{0, 1, 2}, {3}]
    for g, blocks in enumerate(resident):
        fill(cache, g, dict.fromkeys(sorted(blocks), Mark.READY), keys, host=False)
    coordinator = inside.coordinator(cache)
    match = inside.matcher(cache).match(coordinator.tables, keys, 17)
    assert match.num_tokens == best_hit(cache.spec, resident, 17) == 0


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((SlidingWindow(4), {0, 1, 2, 5, 6, 7, 8}), (SlidingWindow(4), {0, 1, 2, 3, 4, 5}), 6),
        ((SlidingWindow(4), {7, 8}), (ChunkedLocal(8), {0, 1, 2, 3, 4, 5}), 0),
        ((ChunkedLocal(8), {0, 1, 8}), (SlidingWindow(4), {0, 1, 4, 5, 6}), 4),
    ],
)
def test_a_boundary_that_one_local_group_lowers_is_asked_of_the_others_again(
    make_cache, first, second, expected, swapped
):
    """Either alone would allow more; the lower boundary of one is not valid in the other."""
    groups, resident = zip(*((second, first) if swapped else (first, second)), strict=True)
    cache = make_cache({f"g{i}": (attention, 2) for i, attention in enumerate(groups)}, 20)
    chain = inside.coordinator(cache).chain
    keys = chain.extend(chain.root(None, None, ()), np.array(prompt(1, 20), np.int32), np.empty((0, 2), np.uint64))
    blocks = [
        fill(cache, g, dict.fromkeys(sorted(there), Mark.READY), keys, host=False) for g, there in enumerate(resident)
    ]
    coordinator = inside.coordinator(cache)
    match = inside.matcher(cache).match(coordinator.tables, keys, 20)
    assert match.num_tokens == expected == best_hit(cache.spec, list(resident), 20)
    for g, group in enumerate(cache.spec.groups):
        assert match.of_group(g)[0].tolist() == [blocks[g][j] for j in sorted(needed(group, expected))]


@pytest.mark.parametrize(
    ("window", "blocks", "expected"), [(4, {2, 3}, 8), (4, {2}, 0), (3, {2, 3}, 8), (4, {0, 3}, 2)]
)
def test_a_window_needs_a_run_that_ends_at_the_hit(make_cache, window, blocks, expected):
    cache = make_cache({"win": (SlidingWindow(window), 2)}, 16)
    chain = inside.coordinator(cache).chain
    keys = chain.extend(chain.root(None, None, ()), np.array(prompt(1, 12), np.int32), np.empty((0, 2), np.uint64))
    fill(cache, 0, dict.fromkeys(sorted(blocks), Mark.READY), keys, host=False)
    coordinator = inside.coordinator(cache)
    match = inside.matcher(cache).match(coordinator.tables, keys, 12)
    assert match.num_tokens == expected == best_hit(cache.spec, [blocks], 12)


def test_a_hit_at_a_chunk_boundary_needs_no_chunk_block(make_serving):
    serving = make_serving({"full": (FullAttention(), 4), "chunk": (ChunkedLocal(8), 4)}, 32)
    serving.serve("first", prompt(1, 17), 1)
    pools = inside.pools(serving.cache)
    pools.unpublish(np.ones(32, np.int32), np.arange(1, 33, dtype=np.int32))
    assert serving.serve("again", prompt(1, 17), 1).cached_tokens["device"] == 16


def test_pending_content_beyond_a_gap_does_not_delay_a_ready_prefix(make_cache):
    """[hit, hit, miss, pending]: the first two are used now."""
    cache = make_cache({"full": (FullAttention(), 4)}, 16)
    chain = inside.coordinator(cache).chain
    keys = chain.extend(chain.root(None, None, ()), np.array(prompt(1, 20), np.int32), np.empty((0, 2), np.uint64))
    blocks = fill(cache, 0, {0: Mark.READY, 1: Mark.READY, 3: Mark.PENDING}, keys, host=False)
    match = inside.matcher(cache).match(inside.coordinator(cache).tables, keys, 20)
    assert (match.num_tokens, match.pending) == (8, False)
    inside.pools(cache).release(np.zeros(1, np.int32), np.array([blocks[3]], np.int32))
    inside.pools(cache).forget_all()


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 64])
def test_the_same_prompt_twice_recomputes_no_more_than_its_last_unit(make_serving, window):
    groups = {"full": (FullAttention(), 4), "win": (SlidingWindow(window), 4), "small": (SlidingWindow(3), 2)}
    serving = make_serving(groups, 120, scheduler={"max_batched_tokens": 64})
    for length in range(30, 42, sized(3, 1)):
        serving.serve(f"first {length}", prompt(length, length), 1)
        again = serving.serve(f"again {length}", prompt(length, length), 4)
        assert again.cached_tokens["device"] == (length - 1) // 4 * 4


def test_a_second_turn_hits_the_end_of_the_first_answer(make_serving):
    groups = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(16), 4)}
    serving = make_serving(groups, 120)
    for length in range(9, 26):
        turn = prompt(length, length)
        text = serving.serve(f"one {length}", turn, 7).token_ids
        done = serving.serve(f"two {length}", [*turn, *text, 1, 2, 3], 3)
        assert done.cached_tokens["device"] == (length + 6) // 4 * 4


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 5, 6, 10, 12])
def test_what_decodes_fill_is_found_whatever_the_number_of_tokens_in_a_block(make_serving, block_tokens):
    serving = make_serving({"full": (FullAttention(), block_tokens), "win": (SlidingWindow(7), block_tokens)}, 60)
    first = serving.serve("one", prompt(0, 4), 30)
    known = [*prompt(0, 4), *first.token_ids]
    second = serving.serve("two", [*known, 1])
    assert second.cached_tokens["device"] == (len(known) - 1) // block_tokens * block_tokens


def test_four_sessions_at_low_occupancy_all_hit_on_their_second_turn(make_serving):
    groups = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}
    serving = make_serving(groups, {"full": 100, "win": 20, "chunk": 20})
    turns = [prompt(k, 25) for k in range(4)]
    for k, turn in enumerate(turns):
        turns[k] = [*turn, *serving.serve(f"one {k}", turn, 4).token_ids]
    for k, turn in enumerate(turns):
        assert serving.serve(f"two {k}", [*turn, 1, 2], 2).cached_tokens["device"] == 28


def test_of_a_prompt_that_is_evicted_in_part_the_beginning_is_left(make_serving):
    serving = make_serving({"full": (FullAttention(), 4)}, 8)
    serving.serve("A", prompt(0, 25), 1)
    assert serving.cache.stats().device["full"].cached == 6
    serving.serve("B", prompt(1, 16), 1)
    assert serving.cache.stats().device["full"].evicted == 2
    assert serving.serve("A again", prompt(0, 25), 1).cached_tokens["device"] == 16


def test_a_match_changes_nothing(make_serving):
    from core.driving import assert_same, snapshot

    serving = make_serving({"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}, 16, 32, hold=[])
    serving.serve("first", prompt(1, 30), 2)
    coordinator, chain = inside.coordinator(serving.cache), inside.coordinator(serving.cache).chain
    keys = chain.extend(chain.root(None, None, ()), np.array(prompt(1, 30), np.int32), np.empty((0, 2), np.uint64))
    before = snapshot(serving.cache)
    assert inside.matcher(serving.cache).match(coordinator.tables, keys, 30).num_tokens == 28
    assert_same(before, snapshot(serving.cache))
