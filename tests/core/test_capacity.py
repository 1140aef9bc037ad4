"""Capacity against masks counted token by token, slabs filled one by one, and the books of a cache that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from core.driving import prompt, sees, visible_blocks
from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, KVCache, Request, Scheduler, SlidingWindow
from kvtier.geometry import capacity
from kvtier.geometry.kinds import Attention
from kvtier.geometry.layout import Layout

BT = 4


def group(name: str, attention: Attention, layers: int = 1, bt: int = BT) -> GroupSpec:
    return GroupSpec(name, attention, layers, 1, 8, block_tokens=bt)


SPANS = st.one_of(
    st.just(FullAttention()),
    st.integers(1, 30).map(SlidingWindow),
    st.integers(1, 5).map(lambda n: ChunkedLocal(8 * n)),
)
GROUPS = st.lists(st.tuples(SPANS, st.integers(1, 5), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=4)
SPECS = GROUPS.map(lambda found: CacheSpec([group(f"g{i}", *fields) for i, fields in enumerate(found)]))
HYBRID = CacheSpec(
    [group("full", FullAttention(), 2), group("win", SlidingWindow(11), 5), group("chunk", ChunkedLocal(16), 3)]
)


# --- one request, token by token ----------------------------------------------------------------------


def reachable(g: GroupSpec, n: int) -> set[int]:
    """Logical blocks with a written token that the next one sees, and the one that the next one goes to if begun."""
    seen = {j // g.block_tokens for j in range(n) if sees(g, n, j)}
    return seen | ({n // g.block_tokens} if n % g.block_tokens else set())


@given(SPECS, st.integers(0, 90))
def test_what_is_held_is_what_the_next_token_can_reach(spec: CacheSpec, n: int) -> None:
    assert capacity.held_blocks(spec, n) == tuple(len(reachable(g, n)) for g in spec.groups)
    running = capacity.running_blocks(spec, n)
    assert running == tuple(len(visible_blocks(g, n, n + 1)) for g in spec.groups)
    assert min(running) >= 1


@given(SPECS, st.integers(1, 60), st.integers(1, 40))
def test_the_peak_bounds_every_step_and_is_reached(spec: CacheSpec, n: int, step: int) -> None:
    peaks = capacity.peak_blocks(spec, n, step)
    for g, peak in zip(spec.groups, peaks, strict=True):
        assert peak >= max(len(visible_blocks(g, start, min(start + step, n))) for start in range(n))
        step_taken = min(step, n)
        longer = n + step + g.attention.span_tokens + g.block_tokens
        assert peak <= max(len(visible_blocks(g, s, min(s + step_taken, longer))) for s in range(longer))
    assert capacity.peak_blocks(spec, n) == tuple(g.peak_blocks(n) for g in spec.groups)
    assert all(a >= b for a, b in zip(peaks, capacity.peak_blocks(spec, n), strict=True))


@given(SPECS, st.integers(1, 90))
def test_the_host_keeps_what_hits_at_the_end_need(spec: CacheSpec, n: int) -> None:
    unit = spec.hit_tokens
    for g, stored, hit in zip(spec.groups, capacity.stored_blocks(spec, n), capacity.hit_blocks(spec, n), strict=True):
        needed = [
            {j // g.block_tokens for j in range(end) if sees(g, end, j)}
            for end in (n // unit * unit, (n - 1) // unit * unit)
        ]
        assert hit == len(needed[0])
        full = isinstance(g.attention, FullAttention)
        assert stored == (n // g.block_tokens if full else len(needed[0] | needed[1]))


def test_the_factor_is_that_of_bytes_not_of_blocks() -> None:
    held = {"full": 25, "win": 3, "chunk": 1}  # 100 tokens: all; 90..99; 96..99
    assert dict(zip(HYBRID.names, capacity.held_blocks(HYBRID, 100), strict=True)) == held
    assert capacity.saving_factor(HYBRID, 100) == 25 * (2 + 5 + 3) / (25 * 2 + 3 * 5 + 1 * 3)
    assert capacity.saving_factor(CacheSpec([group("chunk", ChunkedLocal(16))]), 32) == float("inf")


# --- slabs, filled one by one -------------------------------------------------------------------------


def sizes(spec: CacheSpec) -> list[int]:
    return [g.block_bytes for g in spec.groups]


def filled(layout: Layout, requests: Sequence[Sequence[int]]) -> int:
    """Slabs in use after these requests took their blocks one by one, each group a new slab when its last is full."""
    used, left = 0, [0] * len(layout.per_slab)
    for blocks in requests:
        for g, n in enumerate(blocks):
            for _ in range(n):
                if not left[g]:
                    used, left[g] = used + 1, int(layout.per_slab[g])
                left[g] -= 1
    return used


SHARED = st.tuples(SPECS, st.integers(2_000, 200_000)).map(lambda x: (x[0], Layout.of_slabs(sizes(x[0]), x[1])))


@given(SHARED, st.integers(1, 60))
def test_requests_that_fit_are_those_that_slabs_can_be_filled_with(found: Any, n: int) -> None:
    spec, layout = found
    assume(layout is not None)
    each, last = capacity.running_blocks(spec, n), capacity.peak_blocks(spec, n + 1)
    for one in (each, last):
        fit = capacity.requests(layout, each, one)
        assert not fit or filled(layout, [each] * (fit - 1) + [one]) <= layout.num_slabs
        assert filled(layout, [each] * fit + [one]) > layout.num_slabs


@given(SPECS, st.integers(1, 60), st.lists(st.integers(1, 40), min_size=4, max_size=4))
def test_requests_that_fit_into_pools_of_their_own_are_counted_group_by_group(spec, n, blocks) -> None:
    layout = Layout.fixed(sizes(spec), blocks[: len(spec.groups)])
    each, last = capacity.running_blocks(spec, n), capacity.peak_blocks(spec, n + 1)
    fit = capacity.requests(layout, each, last)
    for count in (fit, fit + 1):
        need = [(count - 1) * a + b for a, b in zip(each, last, strict=True)]
        assert (count == fit and count == 0) or all(want <= have for want, have in zip(need, blocks, strict=False)) == (
            count == fit
        )


@given(SPECS, st.integers(1, 16), st.integers(3_000, 200_000))
def test_the_longest_context_fits_and_one_more_token_does_not(spec: CacheSpec, step: int, num_bytes: int) -> None:
    layout = Layout.of_slabs(sizes(spec), num_bytes)
    assume(layout is not None)
    longest = capacity.longest(layout, spec, step)
    if longest is None:
        assert not any(isinstance(g.attention, FullAttention) for g in spec.groups)
        longest = 500
    else:
        assert filled(layout, [capacity.peak_blocks(spec, longest + 1, step)]) > layout.num_slabs
    assert filled(layout, [capacity.peak_blocks(spec, longest, step)]) <= layout.num_slabs


# --- the books of a cache that runs -------------------------------------------------------------------


def books(spec: CacheSpec, usable: Sequence[int], host: Sequence[int] | None = None) -> KVCache:
    sizes = [None if blocks is None else dict(zip(spec.names, blocks, strict=True)) for blocks in (usable, host)]
    return KVCache(spec, device="meta", device_blocks=sizes[0], host_blocks=sizes[1], key_secret=b"tests")


def serve(scheduler: Scheduler, look: Any = None) -> None:
    """To the end, with zeros; ``look(step, committed)`` before and after every commit."""
    while scheduler.has_work():
        step = scheduler.schedule()
        if look:
            look(step, False)
        scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
        if look:
            look(step, True)


def held_now(cache: KVCache) -> tuple[int, ...]:
    return tuple(pool.held for pool in cache.stats().device.values())


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 100])
def test_a_request_alone_holds_what_capacity_says_at_every_step(step_tokens: int) -> None:
    n, new = 45, 60
    with books(HYBRID, [40, 40, 40]) as cache:
        scheduler, seen = Scheduler(cache, max_batched_tokens=step_tokens), []
        scheduler.add(Request("a", prompt(0, n), new))

        def look(step: Any, committed: bool) -> None:
            end = int(step.seq_lens[0]) if len(step.seq_lens) else 0
            if not committed:
                assert all(
                    a <= b for a, b in zip(held_now(cache), capacity.peak_blocks(HYBRID, end, step_tokens), strict=True)
                )
                if end > n:
                    assert held_now(cache) == capacity.running_blocks(HYBRID, end - 1)
            elif end < n + new - 1:
                cache.core.coordinator.room.trim([0])  # what is kept for an anchor to come goes when blocks are short
                assert held_now(cache) == capacity.held_blocks(HYBRID, end)
                seen.append(end)

        serve(scheduler, look)
        assert seen[-(new - 1) :] == list(range(n, n + new - 1))


def preemptions(spec: CacheSpec, usable: Sequence[int], count: int, total: int) -> int:
    """Of ``count`` requests that grow in step from one block to ``total`` tokens; waiting is counted too."""
    with books(spec, usable) as cache:
        scheduler, waited = Scheduler(cache, max_batched_tokens=4 * count, max_running=count), [0]
        for r in range(count):
            scheduler.add(Request(f"{r}", prompt(r, 4), total - 3))
        serve(scheduler, lambda step, committed: waited.__setitem__(0, waited[0] + cache.stats().requests["waiting"]))
        assert cache.stats().requests["finished"] == count
        return cache.stats().requests["preemptions"] + waited[0]


@pytest.mark.parametrize(
    "usable",
    [(60, 1000, 1000), (1000, 20, 1000), (1000, 17, 1000), (1000, 1000, 18), (59, 16, 21), (12, 4, 4)],
    ids=["full", "window", "window uneven", "chunk", "all", "one"],
)
def test_as_many_requests_as_fit_at_worst_run_to_the_end_and_one_more_does_not(usable: Sequence[int]) -> None:
    total = 47
    fit = capacity.requests(Layout.fixed(sizes(HYBRID), usable), capacity.peak_blocks(HYBRID, total))
    assert fit >= 1
    assert preemptions(HYBRID, usable, fit, total) == 0
    assert preemptions(HYBRID, usable, fit + 1, total) > 0


WIDE = CacheSpec(
    [
        group("full", FullAttention(), bt=16),
        group("win", SlidingWindow(33), bt=16),
        group("chunk", ChunkedLocal(64), bt=16),
    ]
)


@pytest.mark.parametrize("usable", [(15, 99, 99), (19, 99, 99), (99, 11, 99), (99, 99, 4), (99, 99, 6), (19, 9, 5)])
def test_admission_lets_in_as_many_prompts_as_capacity_says(usable: Sequence[int]) -> None:
    """The prompts end early in a block, so that what others generate while one is computed takes no further one."""
    n, steps = 66, 13
    running, peak = capacity.running_blocks(WIDE, n), capacity.peak_blocks(WIDE, n)
    assert (running, peak) == ((5, 3, 1), (5, 3, 4))
    assert capacity.running_blocks(WIDE, n + steps) == running
    fit = capacity.requests(Layout.fixed(sizes(WIDE), usable), running, peak)
    with books(WIDE, usable) as cache:
        scheduler, most = Scheduler(cache, max_batched_tokens=4096), 0
        for r in range(fit + 2):
            scheduler.add(Request(f"{r}", prompt(r, n), 100))
        for _ in range(steps):
            step = scheduler.schedule()
            most = max(most, cache.stats().requests["running"])
            scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
        assert 1 <= most == fit
        assert cache.stats().requests["preemptions"] == 0


@pytest.mark.parametrize("n", [3, 4, 5, 31, 32, 33, 47, 48, 49, 50, 64])
def test_the_host_holds_what_capacity_says_of_a_request_that_ended(n: int) -> None:
    with books(HYBRID, [40, 40, 40], [40, 40, 40]) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=4096)
        scheduler.add(Request("a", prompt(0, n), 1))
        serve(scheduler)
        kept = tuple(pool.cached + pool.held for pool in cache.stats().host.values())
        assert kept == capacity.stored_blocks(HYBRID, n)
        assert cache.stats().transfers.stored_blocks == sum(kept)


@pytest.mark.parametrize("n", [33, 48, 50])
def test_a_hit_from_the_host_loads_what_capacity_says(n: int) -> None:
    with books(HYBRID, [40, 40, 40], [40, 40, 40]) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=4096)
        tokens = prompt(0, n + 9)
        scheduler.add(Request("a", tokens[:n], 1))
        serve(scheduler)
        cache.core.coordinator.pools.forget_all()
        scheduler.add(Request("b", tokens, 1))
        serve(scheduler)
        assert cache.stats().transfers.loaded_blocks == sum(capacity.hit_blocks(HYBRID, n))
