"""Pools of one arena: what fits together, for pools and for requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import inside
import numpy as np
import pytest
from breadth import sample

from core.driving import LOAD, STORE, HeldEngine, prompt, scheduled
from core.slabs import (
    BLOCKED,
    SIZES,
    A,
    B,
    check_books,
    counts,
    free,
    keys_of,
    of,
    owners,
    pools_of,
    shared_serving,
    whole_slab,
)
from kvtier import FullAttention, Request, RequestTooLarge, Scheduler, SlidingWindow
from kvtier.geometry.layout import Layout
from kvtier.pools.block_pool import BlockPools, Col, Mark, Place, SlabCol
from kvtier.testing import canary_spec

SPEC = canary_spec({"full": (FullAttention(), 4), "win": (SlidingWindow(8), 4)}, num_layers={"full": 2, "win": 3})
"""Three blocks of "full" in a slab, or two of "win"."""


# --- what fits together -------------------------------------------------------------------------------


def slabs_that_do(per_slab: int, used: int, stuck: int) -> Iterator[int]:
    """Numbers of slabs with which a pool can have ``used`` blocks, if ``stuck`` slabs of it cannot be emptied."""
    return (n for n in range(7) if n * per_slab >= used and n >= stuck)


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_is_what_some_distribution_of_the_slabs_allows(seed: int):
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(2, 4))
    pools = pools_of(int(rng.integers(groups, 6)), [16 * int(n) for n in rng.integers(1, 4, groups)])
    meta, num_slabs = pools.arrays.meta, len(pools.arrays.slabs)
    per_slab, seen = meta[:, Col.PER_SLAB], set()
    for _ in range(100):
        used = rng.integers(0, 2 + per_slab * num_slabs)
        meta[:, Col.STUCK] = stuck = rng.integers(0, 3, groups)
        ways = list(itertools.product(*map(slabs_that_do, per_slab.tolist(), used.tolist(), stuck.tolist())))
        fits = any(sum(way) <= num_slabs for way in ways)
        assert pools.fits(used) == fits
        seen.add(fits)
        room = pools.room(used)
        for g in range(groups):
            others = [h for h in range(groups) if h != g]
            least = [min(slabs_that_do(int(per_slab[h]), int(used[h]), int(stuck[h])), default=99) for h in others]
            if max(least) <= num_slabs:
                assert room[g] == per_slab[g] * max(0, num_slabs - sum(least))
    assert seen == {True, False}


def test_pools_of_their_own_have_nothing_of_each_others_memory():
    pools = BlockPools(Layout.fixed(SIZES, [5, 3]))
    for used in itertools.product(range(12), range(8)):
        assert pools.fits(counts(*used)) == (used[A] <= 5 and used[B] <= 3)
        assert pools.room(counts(*used)).tolist() == [5, 3]


def test_a_slab_is_stuck_while_a_copy_may_write_one_of_its_blocks():
    pools = pools_of(3)
    blocks = whole_slab(pools, A) + whole_slab(pools, A)
    stuck = lambda: int(pools.column(Col.STUCK)[A])  # noqa: E731
    pools.publish(*of(A, blocks[:4]), keys_of(A, blocks[:4]), Mark.PENDING)
    assert stuck() == 2
    assert not pools.fits(counts(1, 4)), "blocks of two slabs cannot be moved together"
    assert pools.fits(counts(1, 2))
    pools.make_ready(*of(A, blocks[3:4]))
    assert stuck() == 1
    assert pools.fits(counts(1, 4))
    pools.quarantine(*of(A, blocks[4:]))
    assert stuck() == 2
    pools.unpublish(*of(A, blocks[:3]))
    assert stuck() == 1
    free(pools, A, blocks)
    pools.restore(*of(A, blocks[4:5]))
    assert stuck() == 1, "another block of the slab is quarantined still"
    pools.restore(*of(A, blocks[5:]))
    assert stuck() == 0
    assert pools.provide(counts(0, 6))
    check_books(pools)


# --- requests -----------------------------------------------------------------------------------------


@pytest.fixture
def shared(make_cache: Any) -> Any:
    """``shared_serving`` of caches that are audited and closed."""
    return partial(shared_serving, make_cache)


def test_a_prompt_that_cannot_fit_beside_its_own_other_groups_is_refused_with_the_numbers(shared):
    serving = shared(SPEC, 4)
    with pytest.raises(RequestTooLarge) as refused:
        serving.add("A", prompt(0, 40))
    assert refused.value.needs == {"full": 10, "win": 3}
    assert refused.value.have == {"full": 6, "win": 0}  # three blocks of the window leave two slabs, ten leave none
    serving.serve("B", prompt(0, 24))
    with pytest.raises(RequestTooLarge):
        serving.add("C", prompt(0, 25))


def test_a_shortage_says_what_there_is_beside_what_others_use(shared):
    serving = shared(SPEC, 6)
    serving.add("A", prompt(0, 12), 20)
    serving.step()
    serving.add("B", prompt(1, 36))
    step = serving.begin()
    coordinator = serving.cache.core.coordinator
    assert coordinator.pools.live.tolist() == [4, 4]  # two slabs each: B's window leaves the other group a third less
    assert serving.scheduler.why_waiting() == {"B": "full: needs 9, has 2, win: needs 3, has 0"}
    serving.end(*step)
    assert coordinator.room.shortage(counts(9, 3), counts(3, 3)).groups == {"full": (9, 6), "win": (3, 1)}
    serving.run()


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_after_all_has_ended_any_group_can_have_every_slab(shared, store: str):
    for g in (A, B):
        serving = shared(SPEC, 12, host=30, store=store)
        for k in range(6):
            serving.add(str(k), prompt(k, 5 + 3 * k), 4)
        serving.run()
        pools = serving.cache.core.coordinator.pools
        assert {A, B} <= set(owners(pools))
        longest = serving.cache.stats().device_capacity_tokens
        assert longest == 4 * 3 * 10, "all but the two slabs of its window"
        assert sum(serving.serve("long", prompt(99, longest)).cached_tokens.values()) == 0
        pools.forget_all()
        assert pools.provide(np.where(np.arange(2) == g, pools.usable, 0))
        assert owners(pools) == [g] * 12
        check_books(pools)


def test_in_lazy_mode_no_slab_changes_hands_before_its_content_has_a_copy(shared):
    serving = shared(SPEC, 6, host=120, store="lazy")
    pools, seen = serving.cache.core.coordinator.pools, set()
    prompts = {str(k): prompt(k, (9, 40, 17)[k % 3]) for k in range(9)}
    for name, tokens in prompts.items():
        serving.serve(name, tokens)
        seen.add(tuple(owners(pools)))
    assert len(seen) > 3, "slabs have changed hands"
    assert serving.cache.stats().transfers.dropped_blocks == 0
    for name, tokens in prompts.items():
        hit = serving.serve(f"{name} again", tokens).cached_tokens
        assert sum(hit.values()) == (len(tokens) - 1) // 4 * 4, name
    assert serving.cache.stats().transfers.dropped_blocks == 0


def test_where_slabs_are_shared_a_fence_is_in_the_way_of_moving_even_a_block_that_is_held(shared):
    serving = shared(SPEC, 12, host=40, copy_engine=lambda memory: HeldEngine(memory, hold=[STORE]))
    serving.add("A", prompt(0, 9), 4)
    serving.step()
    blocks, connector = serving.cache.core.coordinator.pools.arrays, inside.connector(serving.cache)
    assert (set(blocks.place[blocks.fence > 0]), set(serving.engine.live)) == ({Place.HELD}, {1})
    assert not connector.clear_fences(counts(1, 0)), "in pools of their own nobody gains anything by it"
    assert connector.clear_until(lambda: True)
    assert serving.engine.ordered == [1]
    assert not blocks.fence.any()
    serving.engine.release()
    serving.run()


@pytest.mark.parametrize(("slabs", "length"), sample([(24, 10), (30, 30), (40, 20)], [(24, 10)]))
def test_stores_are_cleared_until_a_slab_can_be_had_and_none_is_looked_at_in_vain(shared, slabs: int, length: int):
    """Each slab waits for several stores. Everything is not tried again after each of them, and as many are waited for
    as if it were."""

    def ordered(ask_after_each: bool) -> tuple[list[int], int]:
        serving = shared(SPEC, slabs, host=160, copy_engine=lambda memory: HeldEngine(memory, hold=[STORE]))
        for k in range(12):
            serving.add(str(k), prompt(k, 5), length)
            serving.steps_until(lambda k=k: str(k) in serving.finished, 60)
        coordinator, connector = serving.cache.core.coordinator, inside.connector(serving.cache)
        provide, clear_until = coordinator.pools.provide, connector.clear_until
        rounds, looked_at, before = [], [], len(serving.engine.ordered)
        coordinator.pools.provide = lambda *need: (rounds.append(need), provide(*need))[1]
        inside.around_movable(
            coordinator.compactor, lambda movable: lambda *slab: (looked_at.append(movable(*slab)), looked_at[-1])[1]
        )
        if ask_after_each:
            connector.clear_until = lambda enough: clear_until(lambda: True)
        serving.add("long", prompt(99, 33), 2)
        serving.steps_until(lambda: "long" in serving.finished, 9)
        assert None not in looked_at
        tickets = serving.engine.ordered[before:]
        serving.engine.release()
        serving.run()
        return tickets, len(rounds)

    (tickets, rounds), (one_by_one, rounds_of_one) = ordered(False), ordered(True)
    assert tickets == one_by_one == sorted(tickets)
    assert rounds_of_one >= len(tickets) > 9
    assert rounds < len(tickets) // 2


@pytest.mark.parametrize("what", ["fenced", "quarantined", "pending"])
def test_a_slab_that_a_copy_uses_is_none_that_can_be_had(what: str):
    pools, (block, use, end) = pools_of(2), (1, *BLOCKED[what])
    assert [whole_slab(pools, A) for _ in range(2)] == [[1, 2, 3], [4, 5, 6]]
    free(pools, A, [2, 3])
    assert not pools.is_enough(counts(0, 1)), "no room for what would be moved"
    free(pools, A, [4])
    assert pools.is_enough(counts(0, 1))
    assert not pools.is_enough(counts(1, 1)), "the room is needed"
    use(pools, block)
    assert pools.is_enough(counts(0, 1)), "the other one"
    pools.publish(*of(A, [5]), keys_of(A, [5]), Mark.READY)
    pools.fence(*of(A, [5]), 2)
    assert not pools.is_enough(counts(0, 1))
    assert pools.is_enough(counts(3, 0)), "it has them"
    assert not pools.is_enough(counts(4, 0)), "it has all slabs"
    end(pools, block)
    assert pools.is_enough(counts(0, 1))
    check_books(pools)


def test_whoever_lacks_blocks_that_a_copy_holds_fast_sits_out_from_the_end_of_the_order(shared):
    """A load that a reset has outdated keeps two blocks of "full" in two slabs: they would fit in one, but cannot move.
    A slab holds seven blocks of "full" or one of "win"."""
    layers = {"full": 1, "win": 28}
    spec = canary_spec({"full": (FullAttention(), 16), "win": (SlidingWindow(17), 4)}, num_layers=layers)
    serving = shared(spec, 19, host=40, copy_engine=lambda memory: HeldEngine(memory, hold=[]))
    serving.serve("before", prompt(9, 33), 1)
    pools = serving.cache.core.coordinator.pools
    pools.forget_all()
    assert pools.provide(counts(14, 0))  # six requests leave one block of a slab, where the load's first one goes
    serving.engine.hold = {LOAD}
    for name, tokens in (("A", 13), ("B", 13), *((f"between {k}", 3) for k in range(4))):
        serving.add(name, prompt(ord(name[-1]), tokens), 8)
    serving.step()
    serving.add("loading", prompt(9, 33))
    serving.step()
    for name in ("loading", *(f"between {k}" for k in range(4))):
        serving.scheduler.abort(name)
    serving.cache.reset()
    serving.add("beside", prompt(8, 13), 8)
    serving.steps_until(lambda: serving.known("B") == 17)
    assert scheduled(serving.step()) == {"A": 1, "beside": 1}
    serving.engine.release()
    serving.run()


def test_what_a_later_step_caches_is_younger_in_every_group(shared):
    """The clock by which pools compare what they cache goes on with every step."""
    serving = shared(SPEC, 12)
    slabs, newest = serving.cache.core.coordinator.pools.arrays.slabs, [0, 0]
    for k in range(3):
        serving.serve(str(k), prompt(k, 13))
        now = [int(slabs[slabs[:, SlabCol.OWNER] == g, SlabCol.STAMP].max()) for g in (A, B)]
        assert now[A] == now[B] > max(newest)
        newest = now


# --- what is decided by the layout alone ----------------------------------------------------------


def test_a_prompt_that_fits_is_taken_while_copies_hold_slabs(make_cache):
    """How many slabs copies hold now says nothing of what can never fit."""
    spec = canary_spec({"full": (FullAttention(), 4), "win": (SlidingWindow(8), 4)}, num_layers={"full": 1, "win": 6})
    serving = shared_serving(make_cache, spec, 40, 160, copy_engine=lambda memory: HeldEngine(memory, hold=[LOAD]))
    longest = serving.cache.stats().device_capacity_tokens
    prompts = [prompt(n, 40) for n in range(6)]
    for n, tokens in enumerate(prompts):
        serving.serve(f"before {n}", tokens, 1)
    for n in range(2):
        serving.serve(f"between {n}", prompt(10 + n, longest), 1)
    for n, tokens in enumerate(prompts):
        serving.add(f"again {n}", tokens, 1)
    serving.step()
    assert inside.pools(serving.cache).column(Col.STUCK).sum() > 1
    assert serving.cache.stats().device_capacity_tokens == longest
    serving.add("long", prompt(20, longest), 1)
    serving.engine.release()
    serving.run()
    assert serving.finished["long"].finish_reason == "length"


def test_a_host_makes_no_room_for_blocks_that_it_has(make_cache):
    """Lazy mode asks for copies of whole margins of blocks, most of which have one."""
    spec = canary_spec({"full": (FullAttention(), 4), "win": (SlidingWindow(8), 4)}, num_layers={"full": 1, "win": 2})
    cache = make_cache(spec, None, None, device="meta", device_bytes=60_000, host_bytes=84_000, store="lazy")
    assert cache.core.host.shared
    scheduler = Scheduler(cache, 256, 4)
    for turn in range(4):
        for n in range(12):
            scheduler.add(Request(f"{turn} {n}", prompt(n, 400), 1))
            while scheduler.has_work():
                step = scheduler.schedule()
                for done in scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64)):
                    assert sum(done.cached_tokens.values()) == (396 if turn else 0)
    assert [pool.evicted for pool in cache.stats().host.values()] == [0, 0]


def test_asking_what_fits_touches_nothing_that_another_thread_may_be_using():
    """``stats`` asks from any thread, in the midst of a step."""
    pools = pools_of(4)
    inside.scratch(pools)[:] = 7
    pools.fits(counts(1, 1))
    pools.room(counts(1, 1))
    assert inside.scratch(pools).tolist() == [7, 7]
