"""The audit can fail: planted damage to a tier's pools: places, counters, lists, references, the key index."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from core.damage import assert_seen, entry
from core.driving import Serving
from core.slabs import shared_serving
from kvtier import FullAttention, SlidingWindow
from kvtier.gpu_pool.block_pool import Col, Mark, Place, SlabCol
from kvtier.testing import canary_spec


def plant_counter(s: Serving) -> None:
    s.cache._pools.arrays.meta[1, Col.EMPTY] += 1


def plant_host_counter(s: Serving) -> None:
    s.cache._host.arrays.meta[2, Col.CACHED] -= 1


def plant_duplicate_in_the_free_list(s: Serving) -> None:
    a, base = s.cache._pools.arrays, int(s.cache._pools.arrays.meta[0, Col.BASE])
    a.empties[base + 1 + int(a.slabs[0, SlabCol.LISTED])] = entry(s, Place.EMPTY) - base
    a.slabs[0, SlabCol.LISTED] += 1


def plant_lost_block(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.place[entry(s, Place.EMPTY)] = Place.HELD


def plant_owner_of_the_null_block(s: Serving) -> None:
    s.cache._pools.arrays.refs[0] = 1


def plant_reference_too_many(s: Serving) -> None:
    s.cache._pools.arrays.refs[entry(s, Place.HELD)] += 1


def plant_reference_too_few(s: Serving) -> None:
    s.cache._pools.arrays.refs[entry(s, Place.HELD)] -= 1


def plant_host_pin_missing(s: Serving) -> None:
    s.cache._host.arrays.refs[entry(s, Place.HELD, "host")] -= 1


def plant_key_on_an_empty_block(s: Serving) -> None:
    s.cache._pools.arrays.mark[entry(s, Place.EMPTY)] = Mark.READY


def plant_cached_block_without_key(s: Serving) -> None:
    s.cache._pools.arrays.mark[entry(s, Place.CACHED)] = Mark.NONE


def plant_hole_in_the_index(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.slots[np.flatnonzero(a.slots)[0]] = 0


def plant_two_blocks_of_one_key(s: Serving) -> None:
    a, base = s.cache._pools.arrays, int(s.cache._pools.arrays.meta[0, Col.BASE])
    first, second = np.flatnonzero(a.mark[base : base + int(a.meta[0, Col.ROWS])])[:2]
    a.key[base + second] = a.key[base + first]


def plant_more_ids_than_memory(s: Serving) -> None:
    s.cache._arena.rows[0] -= 1


def plant_wrong_gauge(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.CACHED] += 1


def plant_block_quarantined_for_nothing(s: Serving) -> None:
    pools, group = s.cache._pools, np.zeros(1, np.int32)
    block = pools.take(group)
    pools.quarantine(group, block)
    pools.release(group, block)


def plant_host_block_quarantined_for_nothing(s: Serving) -> None:
    pools, group = s.cache._host, np.zeros(1, np.int32)
    block = pools.take(group)
    pools.quarantine(group, block)
    pools.release(group, block)


def plant_peak_below_what_is_held(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.PEAK_HELD] = 0


def plant_negative_number_of_evictions(s: Serving) -> None:
    s.cache._host.arrays.meta[2, Col.EVICTED] = -1


def plant_peak_above_what_there_is(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.PEAK_HELD] = 25


def plant_wrong_number_of_keys(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.KEYED] += 1


def plant_cached_block_under_another_key(s: Serving) -> None:
    s.cache._pools.arrays.key[entry(s, Place.CACHED), 1] ^= np.uint64(1 << 63)


def plant_unknown_mark(s: Serving) -> None:
    s.cache._pools.arrays.mark[entry(s, Place.CACHED)] = 3


def plant_unknown_place(s: Serving) -> None:
    s.cache._pools.arrays.place[entry(s, Place.HELD, g=2)] = 6


def plant_cached_block_twice_in_the_ring(s: Serving) -> None:
    a = s.cache._pools.arrays
    start, size, tail = (int(a.meta[0, c]) for c in (Col.RING_BASE, Col.RING_SIZE, Col.TAIL))
    a.ring[start + tail % size] = entry(s, Place.CACHED)
    a.meta[0, Col.TAIL] += 1


def plant_sweep_behind_the_head(s: Serving) -> None:
    meta = s.cache._pools.arrays.meta[0]
    meta[Col.CLOSED] = meta[Col.SWEEP] = meta[Col.HEAD] - 1


def plant_sweep_that_passed_a_block(s: Serving) -> None:
    meta = s.cache._pools.arrays.meta[0]
    meta[Col.CLOSED], meta[Col.SWEEP] = meta[Col.HEAD], meta[Col.TAIL]


def plant_empty_block_that_a_store_reads(s: Serving) -> None:
    """A FENCED block that was put among the empty ones, in order, but for its fence."""
    _unfence_wrongly(s, keyed=False)


def plant_cached_block_that_a_store_reads(s: Serving) -> None:
    _unfence_wrongly(s, keyed=True)


def _unfence_wrongly(s: Serving, keyed: bool) -> None:
    pools, i = s.cache._pools, entry(s, Place.FENCED)
    group, block = np.zeros(1, np.int32), np.array([i - int(pools.arrays.meta[0, Col.BASE])], np.int32)
    fence = int(pools.arrays.fence[i])
    if not keyed:
        pools.unpublish(group, block)
    pools.unfence(group, block, fence)
    assert pools.arrays.place[i] == (Place.CACHED if keyed else Place.EMPTY)
    pools.arrays.fence[i] = fence


def plant_slab_list_that_ends_early(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.OPEN] = -1


def plant_first_of_the_slab_list_after_another(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.slabs[int(a.meta[0, Col.OPEN]), SlabCol.PREVIOUS] = 0


def plant_wild_first_new_id_of_a_slab(s: Serving) -> None:
    """So wild that whoever lists what is between has no memory left."""
    a = s.cache._pools.arrays
    a.slabs[int(a.meta[0, Col.OPEN]), SlabCol.FRESH] = -(2**40)


def plant_wild_head_of_the_ring(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.HEAD] = -(2**60)


def plant_slab_list_in_a_circle(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.slabs[a.meta[0, Col.OPEN], SlabCol.NEXT] = a.meta[0, Col.OPEN]


def plant_slab_list_that_leads_nowhere(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.slabs[a.meta[0, Col.OPEN], SlabCol.NEXT] = 77


def plant_negative_list_of_empties(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.slabs[a.meta[0, Col.OPEN], SlabCol.LISTED] = -1


def plant_wild_index_mask(s: Serving) -> None:
    s.cache._host.arrays.meta[0, Col.INDEX_MASK] = -63


def plant_wild_ring_size(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.RING_SIZE] *= 2


def plant_pools_of_other_sizes(s: Serving) -> None:
    s.cache._pools.arrays.meta[0, Col.ROWS] += 1


def plant_wild_entry_of_the_index(s: Serving) -> None:
    a = s.cache._pools.arrays
    k = np.flatnonzero(a.slots)[0]
    a.slots[k] = a.slots[k] & np.uint64(0xFFFFFFFF00000000) | np.uint64(9_999)


def plant_wild_entry_of_the_ring(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.ring[int(a.meta[0, Col.RING_BASE]) + int(a.meta[0, Col.HEAD]) % int(a.meta[0, Col.RING_SIZE])] = -5


def plant_live_content_as_passed(s: Serving) -> None:
    a = s.cache._pools.arrays
    a.ring[int(a.meta[0, Col.RING_BASE]) + (int(a.meta[0, Col.TAIL]) - 1) % int(a.meta[0, Col.RING_SIZE])] *= -1


def plant_pool_that_begins_inside_another(s: Serving) -> None:
    s.cache._arena.origins[1] -= 16


def plant_host_pool_whose_blocks_are_too_far_apart(s: Serving) -> None:
    s.cache._host_arena.strides[0] += 16


PLANTED: dict[Callable[[Serving], None], str] = {
    plant_counter: "I1",
    plant_host_counter: "I1",
    plant_duplicate_in_the_free_list: "I1",
    plant_lost_block: "I1",
    plant_owner_of_the_null_block: "I1",
    plant_reference_too_many: "I2",
    plant_reference_too_few: "I2",
    plant_host_pin_missing: "I2",
    plant_key_on_an_empty_block: "I21",
    plant_cached_block_without_key: "I21",
    plant_hole_in_the_index: "I21",
    plant_two_blocks_of_one_key: "I21",
    plant_more_ids_than_memory: "I22",
    plant_wrong_gauge: "I25",
    plant_block_quarantined_for_nothing: "I1",
    plant_host_block_quarantined_for_nothing: "I1",
    plant_peak_below_what_is_held: "I25",
    plant_negative_number_of_evictions: "I25",
    plant_peak_above_what_there_is: "I25",
    plant_wrong_number_of_keys: "I21",
    plant_cached_block_under_another_key: "I21",
    plant_unknown_mark: "I1",
    plant_unknown_place: "I1",
    plant_cached_block_twice_in_the_ring: "I1",
    plant_sweep_behind_the_head: "I1",
    plant_sweep_that_passed_a_block: "I1",
    plant_empty_block_that_a_store_reads: "I17",
    plant_cached_block_that_a_store_reads: "I17",
    plant_slab_list_that_ends_early: "I1",
    plant_first_of_the_slab_list_after_another: "I1",
    plant_wild_first_new_id_of_a_slab: "I1",
    plant_wild_head_of_the_ring: "I1",
    plant_slab_list_in_a_circle: "I1",
    plant_slab_list_that_leads_nowhere: "I1",
    plant_negative_list_of_empties: "I1",
    plant_wild_index_mask: "I22",
    plant_wild_ring_size: "I22",
    plant_pools_of_other_sizes: "I22",
    plant_wild_entry_of_the_index: "I21",
    plant_live_content_as_passed: "I1",
    plant_wild_entry_of_the_ring: "I1",
    plant_pool_that_begins_inside_another: "I22",
    plant_host_pool_whose_blocks_are_too_far_apart: "I22",
}


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize(("plant", "invariant"), PLANTED.items(), ids=lambda x: getattr(x, "__name__", x))
def test_the_audit_sees_damage_to_pools(plant, invariant):
    assert_seen(plant, invariant)


@pytest.mark.parametrize("by", [-16, 16])
def test_the_audit_sees_blocks_outside_their_slabs(make_cache, by):
    """Pools that share an arena; the smaller blocks are moved."""
    spec = canary_spec({"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}, num_layers={"full": 2, "win": 3})
    cache = shared_serving(make_cache, spec, 12).cache
    assert cache.audit() == []
    cache._arena.origins[0] += by
    seen = {violation.invariant for violation in cache.audit()}
    cache._arena.origins[0] -= by
    assert "I22" in seen
