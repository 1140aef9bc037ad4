"""Pools of one arena exchange slabs: who gives one up to whom, and what never changes hands."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from core.slabs import (
    BLOCKED,
    A,
    B,
    cache,
    check_books,
    counts,
    found,
    free,
    keys_of,
    of,
    owners,
    pools_of,
    slab_of,
    take,
    whole_slab,
)
from kvtier.pools.block_pool import BlockPools, Col
from kvtier.pools.cached_ring import LOOK

# --- who gives a slab up ------------------------------------------------------------------------------


def test_an_unused_slab_goes_first_then_one_that_nobody_uses_then_cached_content():
    pools = pools_of(4)
    cached, left = whole_slab(pools, A), whole_slab(pools, A)
    assert (slab_of(pools, A, cached[0]), slab_of(pools, A, left[0])) == (0, 1)
    cache(pools, A, cached)
    free(pools, A, left)
    assert owners(pools) == [A, A, -1, -1]
    whole_slab(pools, B)
    assert owners(pools) == [A, A, B, -1]
    whole_slab(pools, B)
    assert owners(pools) == [A, A, B, B]
    whole_slab(pools, B)
    assert owners(pools) == [A, B, B, B], "cached content was given up for a slab that nobody used"
    assert all(found(pools, A, cached))
    whole_slab(pools, B)
    assert owners(pools) == [B, B, B, B]
    assert not any(found(pools, A, cached))
    assert pools.column(Col.EVICTED).tolist() == [3, 0]
    assert pools.column(Col.KEYED).tolist() == [0, 0]
    check_books(pools)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_coldest_slab_goes_first(order: tuple[int, ...]):
    pools = pools_of(3)
    slabs = [whole_slab(pools, A) for _ in range(3)]
    for s in order:
        cache(pools, A, slabs[s])
    for n, s in enumerate(order):
        assert slab_of(pools, B, whole_slab(pools, B)[0]) == s
        assert [all(found(pools, A, slabs[i])) for i in order] == [i > n for i in range(3)]


def test_own_cached_blocks_go_first_where_they_are_colder():
    pools = pools_of(2)
    mine, others = whole_slab(pools, B), whole_slab(pools, A)
    cache(pools, B, mine)
    cache(pools, A, others)
    assert take(pools, B, 2) == mine
    assert owners(pools) == [B, A]
    assert all(found(pools, A, others))
    check_books(pools)


def test_own_cached_blocks_are_compared_again_with_what_others_have_after_each_slab_of_them():
    pools = pools_of(3)
    old, others, hot = whole_slab(pools, B), whole_slab(pools, A), whole_slab(pools, B)
    for g, blocks in ((B, old), (A, others), (B, hot)):
        cache(pools, g, blocks)
    take(pools, B, 4)
    assert owners(pools) == [B, B, B]
    assert [any(found(pools, g, blocks)) for g, blocks in ((B, old), (A, others), (B, hot))] == [False, False, True]
    assert all(found(pools, B, hot))


def test_own_cached_blocks_stay_where_they_are_hotter():
    pools = pools_of(2)
    mine, others = whole_slab(pools, B), whole_slab(pools, A)
    cache(pools, A, others)
    cache(pools, B, mine)
    take(pools, B, 2)
    assert owners(pools) == [B, B]
    assert all(found(pools, B, mine))
    assert not any(found(pools, A, others))
    check_books(pools)


def test_content_that_was_cached_as_the_coldest_goes_first_whatever_its_age():
    pools = pools_of(2)
    (hot, cold), others = whole_slab(pools, B), whole_slab(pools, A)
    cache(pools, A, others)
    cache(pools, B, [hot])
    cache(pools, B, [cold], cold=True)  # in a slab that is younger than the other
    assert take(pools, B, 1) == [cold]
    assert owners(pools) == [B, A]
    assert all(found(pools, B, [hot]) + found(pools, A, others))


def test_with_the_coldest_blocks_no_hotter_ones_of_the_same_pool_go():
    pools = pools_of(3)
    (hot, cold), others, more = whole_slab(pools, B), whole_slab(pools, A), whole_slab(pools, A)
    cache(pools, A, others)
    cache(pools, B, [hot])
    cache(pools, B, [cold], cold=True)
    take(pools, B, 2)
    assert owners(pools) == [B, B, A]
    assert all(found(pools, B, [hot])), "it went since it stood behind a block that nobody wants"
    assert not any(found(pools, A, others))
    free(pools, A, more)
    check_books(pools)


def test_what_was_cached_behind_the_cold_region_is_compared_by_its_age():
    pools = pools_of(3)
    cold, hot, others = whole_slab(pools, B), whole_slab(pools, B), whole_slab(pools, A)
    cache(pools, A, others)
    cache(pools, B, hot)
    cache(pools, B, cold, cold=True)
    take(pools, B, 2)
    assert (found(pools, B, cold), found(pools, B, hot)) == ([False] * 2, [True] * 2)
    assert all(found(pools, A, others))
    take(pools, B, 2)
    assert all(found(pools, B, hot)), "the cold region has not ended with what was in it"
    assert not any(found(pools, A, others))
    check_books(pools)


def test_a_slab_whose_content_was_all_passed_goes_before_older_slabs():
    pools = pools_of(3)
    old, passed, mixed = (whole_slab(pools, A) for _ in range(3))
    for blocks in (old, passed, mixed):
        cache(pools, A, blocks)
    for blocks in (passed, mixed[:2]):  # a request finds them and goes on past them
        pools.acquire(*of(A, blocks))
        pools.release(*of(A, blocks), cold=True)
    assert pools.num_superseded(A) == 5
    take(pools, B, 2)
    assert [all(found(pools, A, blocks)) for blocks in (old, passed, mixed)] == [True, False, True]
    take(pools, B, 2)
    assert [all(found(pools, A, blocks)) for blocks in (old, mixed)] == [False, True], "one block of it is asked for"
    check_books(pools)


def test_a_slab_is_no_younger_for_what_was_passed_there():
    pools = pools_of(2)
    (*old, passed), young = whole_slab(pools, A), whole_slab(pools, A)
    cache(pools, A, old)
    cache(pools, A, young)
    cache(pools, A, [passed], cold=True)
    take(pools, B, 2)
    assert owners(pools) == [B, A]
    assert all(found(pools, A, young))


def test_passed_content_of_its_own_goes_before_passed_content_of_others():
    pools = pools_of(3)
    mine, others, left = whole_slab(pools, B), whole_slab(pools, A), whole_slab(pools, A)
    cache(pools, B, mine, cold=True)
    cache(pools, A, others, cold=True)
    take(pools, B, 1)
    assert owners(pools) == [B, A, A], "no slab changes hands for nothing"
    assert all(found(pools, A, others))
    free(pools, A, left)
    take(pools, B, 2)
    assert owners(pools) == [B, A, B], "a slab that caches nothing is better still"
    assert (found(pools, B, mine), all(found(pools, A, others))) == ([False, True], True)


def test_what_was_passed_is_still_known_when_the_ring_has_been_swept():
    pools = pools_of(2)
    kept, passed = whole_slab(pools, A), whole_slab(pools, A)
    cache(pools, A, kept)
    cache(pools, A, passed, cold=True)
    before = pools.coldest(A, 6).tolist()
    for _ in range(2 * int(pools.arrays.meta[A, Col.RING_SIZE])):  # holes, until they are closed
        pools.acquire(*of(A, kept))
        pools.release(*of(A, kept))
    assert pools.arrays.meta[A, Col.CLOSED] > 0
    assert pools.coldest(A, 6).tolist() == before
    assert set(before[:3]) == set(passed)
    assert pools.num_superseded(A) == 3
    assert take(pools, A, 1) == before[:1]
    assert pools.num_superseded(A) == 2
    check_books(pools)


def test_the_age_of_the_coldest_block_is_not_that_of_a_younger_one_in_its_slab():
    pools = pools_of(3)
    (first, late), second, others = whole_slab(pools, B), whole_slab(pools, B), whole_slab(pools, A)
    cache(pools, B, [first])
    cache(pools, B, second)
    cache(pools, A, others)
    cache(pools, B, [late])
    take(pools, B, 1)
    assert owners(pools).count(A) == 1
    assert found(pools, B, [first, *second, late]) == [False, True, True, True]


def half_old_slabs(pools: BlockPools, n: int) -> tuple[list[int], list[int]]:
    """(old, young): blocks of B that share n slabs of two; the old ones are cached, the young ones held."""
    slabs = [whole_slab(pools, B) for _ in range(n)]
    old, young = ([blocks[i] for blocks in slabs] for i in range(2))
    cache(pools, B, old)
    return old, young


def test_old_content_goes_before_others_however_many_slabs_it_shares_with_young_content():
    pools = pools_of(2 * LOOK + 1)
    old, young = half_old_slabs(pools, 2 * LOOK)
    others = whole_slab(pools, A)
    cache(pools, A, others)
    cache(pools, B, young)
    assert set(take(pools, B, LOOK)) <= set(old)
    assert all(found(pools, A, others))
    check_books(pools)


def test_content_is_as_old_as_it_was_when_the_ring_has_been_swept():
    pools = pools_of(2 * LOOK + 2)
    old, young = half_old_slabs(pools, 2 * LOOK)
    hits, others = whole_slab(pools, B), whole_slab(pools, A)
    cache(pools, A, others)
    pools.acquire(*of(B, old))
    cache(pools, B, hits)
    cache(pools, B, young)
    at = int(pools.arrays.blocks["link"][pools.entries(*of(B, young[:1]))][0])
    for _ in range(2 * int(pools.arrays.meta[B, Col.RING_SIZE])):  # holes, until they are closed
        pools.acquire(*of(B, hits))
        pools.release(*of(B, hits))
    assert pools.arrays.blocks["link"][pools.entries(*of(B, young[:1]))] != at, "the ring was not swept"
    take(pools, B, 1)
    assert owners(pools).count(A) == 0, "young content went first, since it lies in the ring where old content lay"
    assert all(found(pools, B, young))
    assert not any(found(pools, A, others))
    check_books(pools)


def test_content_keeps_its_age_however_often_the_ring_has_been_swept():
    """Each sweep closes one hole behind the head, so that all entries change places by one."""
    pools = pools_of(2 * LOOK + 1)
    old, hits = half_old_slabs(pools, 2 * LOOK)
    others, swept = whole_slab(pools, A), pools.arrays.meta[B]
    cache(pools, A, others)
    cache(pools, B, hits)
    first, *holes = pools.coldest(B, 25).tolist()
    for b in holes:
        before = swept[Col.SWEEPS]
        for hit in itertools.chain([b], itertools.cycle(hits)):
            pools.tick()
            pools.acquire(*of(B, [hit]))
            pools.release(*of(B, [hit]))
            if swept[Col.SWEEPS] > before and swept[Col.SWEEP] < 0:
                break
    assert pools.coldest(B, 1).tolist() == [first]
    assert set(take(pools, B, LOOK)) <= set(old) - set(holes)
    assert all(found(pools, A, others))
    check_books(pools)


def hit_until_swept(pools: BlockPools, hit: int) -> None:
    swept = pools.arrays.meta[B]
    before = swept[Col.SWEEPS]
    while swept[Col.SWEEPS] == before or swept[Col.SWEEP] >= 0:
        pools.acquire(*of(B, [hit]))
        pools.release(*of(B, [hit]))


def gives_up_content(pools: BlockPools, others: list[int]) -> bool:
    """Group B needs a slab's blocks. Whether it gives up content of its own; else it is A's ``others``."""
    assert pools.provide(counts(0, 2))
    pools.take(np.full(2, B, np.int32))
    check_books(pools)
    return all(found(pools, A, others))


@pytest.mark.parametrize("left", range(8))
def test_content_that_a_sweep_brings_to_the_head_is_not_as_old_as_what_stood_there(left: int):
    pools = pools_of(2 * LOOK + 3)
    blocks, others = take(pools, B, 4 * LOOK + 4), whole_slab(pools, A)
    old, young = blocks[:8], blocks[8:]
    cache(pools, B, old)
    cache(pools, A, others)
    cache(pools, B, young)
    again = set(old) - set(pools.take(np.full(left, B, np.int32)).tolist())
    pools.acquire(*of(B, sorted(again)))
    hit_until_swept(pools, young[-1])
    assert not gives_up_content(pools, others)


@pytest.mark.parametrize(("passed", "holes"), [(2, 1), (9, 3), (12, 8), (19, 5)])
def test_content_is_not_as_old_as_what_was_passed_next_to_it(passed: int, holes: int):
    pools = pools_of(2 * LOOK + 3)
    blocks, others = take(pools, B, 4 * LOOK + 4), whole_slab(pools, A)
    cache(pools, A, others)
    cache(pools, B, blocks[passed:])
    cache(pools, B, blocks[:passed], cold=True)
    pools.tick()
    hit = pools.coldest(B, passed)[1 : 1 + holes].tolist()
    pools.acquire(*of(B, hit))
    pools.release(*of(B, hit))
    hit_until_swept(pools, blocks[-1])
    pools.take(np.full(pools.num_superseded(B), B, np.int32))
    assert not gives_up_content(pools, others)


def test_a_slab_without_content_is_not_taken_from_a_pool_that_needs_it():
    pools = pools_of(2)
    whole_slab(pools, B)
    free(pools, A, whole_slab(pools, A))
    assert not pools.provide(counts(3, 1))
    assert owners(pools) == [B, A]
    assert pools.provide(counts(0, 1))
    assert owners(pools) == [B, B]


def test_a_slab_with_content_is_not_taken_from_a_pool_that_needs_its_blocks():
    pools = pools_of(2)
    whole_slab(pools, A)
    cache(pools, B, whole_slab(pools, B))
    assert not pools.provide(counts(1, 2))
    assert owners(pools) == [A, B]
    assert pools.provide(counts(1, 0))
    assert owners(pools) == [A, A]


def test_a_pool_is_not_made_to_give_up_content_of_its_own_for_a_slab_that_it_needs():
    pools = pools_of(3)
    mine, left, kept = whole_slab(pools, B), whole_slab(pools, A), whole_slab(pools, A)
    cache(pools, B, mine)  # the coldest of all
    cache(pools, A, kept)
    free(pools, A, left)
    assert pools.provide(counts(3, 2))
    assert owners(pools) == [B, A, A]
    pools.take(np.array([A, A, A, B, B], np.int32))
    assert all(found(pools, A, kept))
    assert not any(found(pools, B, mine))


def test_with_cached_content_spared_only_slabs_without_any_change_hands():
    pools = pools_of(2)
    cache(pools, A, whole_slab(pools, A))
    left = whole_slab(pools, A)
    assert not pools.provide(counts(0, 1), spare_cached=True) or owners(pools) == [A, A]
    assert owners(pools) == [A, A]
    free(pools, A, left)
    assert pools.provide(counts(0, 1), spare_cached=True)
    assert owners(pools) == [A, B]


def test_a_slab_that_comes_back_begins_anew():
    """Blocks that were listed as empty when the slab left are not listed twice when it returns."""
    pools = pools_of(2)
    whole_slab(pools, A)
    for _ in range(3):
        for g, n in ((A, 3), (B, 2)):
            blocks = take(pools, g, n)
            assert blocks == list(range(n + 1, 2 * n + 1))
            cache(pools, g, blocks[:1])
            free(pools, g, blocks[:0:-1])
            check_books(pools)


# --- what never changes hands -------------------------------------------------------------------------


@pytest.mark.parametrize("what", BLOCKED)
@pytest.mark.parametrize("at", range(3))
def test_a_slab_with_a_block_in_use_stays(what: str, at: int):
    pools = pools_of(3)
    whole_slab(pools, B)
    blocks, others = whole_slab(pools, A), whole_slab(pools, A)
    free(pools, A, others[1:])  # the pool has enough idle blocks to spare a slab, but no idle slab
    block = blocks.pop(at)
    block_it, unblock = BLOCKED[what]
    cache(pools, A, blocks[:1])
    free(pools, A, blocks[1:])
    block_it(pools, block)
    check_books(pools)
    assert not pools.provide(counts(0, 1))
    assert owners(pools) == [B, A, A]
    assert all(found(pools, A, blocks[:1]))
    unblock(pools, block)
    assert pools.provide(counts(0, 1))
    assert owners(pools) == [B, B, A]
    check_books(pools)


# --- states -------------------------------------------------------------------------------------------

STATES = np.array([0, 1], np.uint8)
"""B has states."""


class Mixed:
    """Two slabs of 16 blocks of A, 12 of each cached before B's slab of one state, and the others after it.

    ``gone``: the slab's worth of them that was cached first.
    """

    def __init__(self, num_old: int = 12) -> None:
        self.pools, self.moved = pools_of(3, (16, 256)), list[tuple[int, list[int], list[int]]]()
        first, second = whole_slab(self.pools, A), whole_slab(self.pools, A)
        self.state, old = whole_slab(self.pools, B), first[:num_old] + second[:num_old]
        cache(self.pools, A, old)
        cache(self.pools, B, self.state)
        self.young = first[num_old:] + second[num_old:]
        self.gone = self.pools.coldest(A, 16).tolist()
        self.rest = [b for b in old if b not in self.gone]

    def take_state(self, states: np.ndarray = STATES) -> int:
        assert self.pools.provide(counts(0, 1), False, states, self._move)
        check_books(self.pools)
        return self.pools.take(np.array([B], np.int32)).tolist()[0]

    def _move(self, g: int, sources: np.ndarray, targets: np.ndarray) -> None:
        self.moved.append((g, sources.tolist(), targets.tolist()))


def test_older_content_goes_for_a_state_although_younger_content_shares_its_slabs():
    mixed = Mixed()
    pools = mixed.pools
    cache(pools, A, mixed.young)
    order = pools.coldest(A, 32).tolist()[16:]
    slab = slab_of(pools, B, mixed.take_state())
    assert slab == max((0, 1), key=lambda s: [slab_of(pools, A, b) for b in mixed.gone].count(s)), "the fewest moves"
    moves = [b for b in mixed.young if slab_of(pools, A, b) == slab]
    ((g, sources, targets),) = mixed.moved
    assert (g, sorted(sources), len(moves)) == (A, moves, 4)
    assert set(targets) < set(mixed.gone), "in the place of what has gone"
    assert pools.find(*of(A, mixed.gone)[:1], keys_of(A, mixed.gone)).tolist() == [0] * 16
    assert all(found(pools, B, mixed.state)), "nothing but the oldest went"
    now = dict(zip(sources, targets, strict=True))
    stays = pools.find(np.full(16, A, np.int32), keys_of(A, order)).tolist()
    assert stays == [now.get(b, b) for b in order]
    assert pools.coldest(A, 16).tolist() == stays, "in their order"


@pytest.mark.parametrize("case", ["no states", "not old enough"])
def test_the_state_goes_if_nothing_may_move_or_less_than_a_slab_is_older(case: str):
    mixed = Mixed(num_old=4 if case == "not old enough" else 12)
    cache(mixed.pools, A, mixed.young)
    assert [mixed.take_state(STATES if case != "no states" else 0 * STATES)] == mixed.state
    assert mixed.moved == []


def test_for_a_slab_s_worth_of_empty_blocks_in_several_slabs_nothing_goes():
    mixed = Mixed(num_old=8)
    pools, old = mixed.pools, mixed.gone
    free(pools, A, mixed.young)
    mixed.take_state()
    assert all(pools.find(np.full(16, A, np.int32), keys_of(A, old)))
    assert all(found(pools, B, mixed.state))


def test_superseded_content_that_moves_stays_superseded():
    mixed = Mixed(num_old=0)
    pools, young = mixed.pools, mixed.young
    cold = [b for pair in zip(young[:10], young[16:26], strict=True) for b in pair]  # in turn from both slabs
    cache(pools, A, young[10:16] + young[26:])
    cache(pools, A, cold, cold=True)
    stays = pools.coldest(A, 32).tolist()[16:]
    mixed.take_state()
    ((_, sources, targets),) = mixed.moved
    now = dict(zip(sources, targets, strict=True))
    where = pools.find(np.full(16, A, np.int32), keys_of(A, stays))
    assert where.tolist() == [now.get(b, b) for b in stays]
    assert len(set(sources) & set(stays[:4])) == 2, "two of the superseded ones have moved"
    assert pools.is_superseded(np.full(16, A, np.int32), where).tolist() == [True] * 4 + [False] * 12
    assert pools.num_superseded(A) == 4
