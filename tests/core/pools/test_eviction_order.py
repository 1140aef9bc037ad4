"""In which order cached blocks go: coldest first, whatever stores, fences and hits did to the ring in between."""

from __future__ import annotations

import numpy as np
import pytest

from core.pools.blocks import INT32, USABLE, arr, key_of
from kvtier.geometry.layout import Layout
from kvtier.pools.block_pool import BlockPools, Mark


def test_empty_blocks_go_out_before_cached_ones_and_those_coldest_first():
    pools = BlockPools(Layout.fixed([64], [4]))
    blocks = pools.take(arr(0, 0, 0))
    pools.publish(arr(0, 0, 0), blocks, np.concatenate([key_of(n) for n in range(3)]), Mark.READY)
    for b in blocks:
        pools.release(arr(0), arr(b))
    pools.acquire(arr(0), blocks[:1])  # a hit makes it the hottest
    pools.release(arr(0), blocks[:1])
    taken = [int(pools.take(arr(0))[0]) for _ in range(4)]
    assert taken == [4, int(blocks[1]), int(blocks[2]), int(blocks[0])]


def test_a_prefix_is_evicted_from_its_end():
    pools = BlockPools(Layout.fixed([64], [3]))
    blocks = pools.take(arr(0, 0, 0))
    pools.publish(arr(0, 0, 0), blocks, np.concatenate([key_of(n) for n in range(3)]), Mark.READY)
    pools.release(arr(0, 0, 0), blocks)
    assert pools.take(arr(0)).tolist() == [int(blocks[2])]


@pytest.mark.parametrize("cold", [False, True])
def test_a_prefix_whose_store_has_ended_is_evicted_in_the_order_in_which_it_would_have_been(cold):
    """Hot: from its end. Cold: as ``coldest`` gave it out to be stored."""
    pools = BlockPools(Layout.fixed([64], [3]))
    blocks = pools.take(arr(0, 0, 0))
    pools.publish(arr(0, 0, 0), blocks, np.concatenate([key_of(n) for n in range(3)]), Mark.READY)
    pools.fence(arr(0, 0, 0), blocks, 1)
    pools.release(arr(0, 0, 0), blocks)
    pools.unfence(arr(0, 0, 0), blocks, 1, cold)
    order = blocks.tolist() if cold else blocks[::-1].tolist()
    assert pools.coldest(0, 3).tolist() == order
    assert [int(pools.take(arr(0))[0]) for _ in range(3)] == order


def test_what_is_superseded_when_it_is_released_still_is_when_its_store_ends():
    pools = BlockPools(Layout.fixed([64], [3]))
    blocks = pools.take(arr(0, 0, 0))
    pools.publish(arr(0, 0, 0), blocks, np.concatenate([key_of(n) for n in range(3)]), Mark.READY)
    pools.release(arr(0), blocks[:1])
    pools.fence(arr(0), blocks[1:2], 1)
    pools.release(arr(0), blocks[1:2], cold=True)
    pools.release(arr(0), blocks[2:], cold=True)
    pools.fence(arr(0), blocks[2:], 2)  # the other way round: it was cached when its store began
    pools.unfence(arr(0), blocks[1:2], 1)
    pools.unfence(arr(0), blocks[2:], 2)
    assert pools.coldest(0, 3).tolist() == blocks[[2, 1, 0]].tolist()
    assert pools.is_superseded(arr(0, 0, 0), blocks).tolist() == [False, True, True]
    pools.acquire(arr(0), blocks[1:2])
    pools.fence(arr(0), blocks[1:2], 3)
    pools.release(arr(0), blocks[1:2])
    pools.unfence(arr(0), blocks[1:2], 3)
    assert pools.coldest(0, 3).tolist() == blocks[[2, 0, 1]].tolist(), "it was wanted again"


def test_a_cached_block_that_a_store_begins_to_read_is_in_no_ones_way_and_comes_back_once():
    pools = BlockPools(Layout.fixed([64] * len(USABLE), USABLE))
    blocks = pools.take(arr(0, 0, 0))
    pools.publish(arr(0, 0, 0), blocks, np.concatenate([key_of(n) for n in range(3)]), Mark.READY)
    for b in blocks.tolist():
        pools.release(arr(0), arr(b))
    pools.fence(arr(0), blocks[:1], 1)
    assert pools.coldest(0, 9).tolist() == blocks[1:].tolist()
    pools.unfence(arr(0), blocks[:1], 1)
    assert pools.coldest(0, 9).tolist() == [*blocks[1:].tolist(), blocks[0]]


def test_the_colder_half_is_told_group_by_group_and_never_too_late():
    pools, order = BlockPools(Layout.fixed([64, 64], [9, 4])), {}
    for g, n in ((0, 6), (1, 3)):
        blocks = pools.take(np.full(n + 1, g, INT32))  # one of them stays held
        pools.publish(np.full(n, g, INT32), blocks[:n], np.concatenate([key_of(i) for i in range(n)]), Mark.READY)
        for b in blocks[:n].tolist():
            pools.release(arr(g), arr(b))
        order[g] = blocks[:n].tolist()
    groups = np.repeat(arr(0, 1), 8)
    told = [*order[0], 7, 0], [*order[1], 4, 0, 0, 0, 0]
    cold = pools.in_colder_half(groups, np.concatenate([arr(*of) for of in told]))
    assert cold.tolist() == [True] * 4 + [False] * 4 + [True, True] + [False] * 6
    pools.acquire(arr(0, 0), arr(*order[0][4:]))  # three of the four that are left are it, holes or none
    assert pools.in_colder_half(arr(0, 0, 0, 0), arr(*order[0][:4]))[:3].all()
    pools.acquire(arr(0), arr(order[0][0]))
    assert pools.in_colder_half(arr(0, 0), arr(*order[0][:2])).tolist() == [False, True]
