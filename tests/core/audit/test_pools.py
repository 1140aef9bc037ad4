"""The audit can fail: planted damage to a tier's pools: places, counters, lists, references, the key index."""

from __future__ import annotations

from collections.abc import Callable

import inside
import numpy as np
import pytest

from core.audit.damage import assert_reported, assert_seen, entry
from core.driving import Serving
from core.slabs import shared_serving
from kvtier import FullAttention, SlidingWindow
from kvtier.pools.block_pool import Col, Mark, Place, SlabCol
from kvtier.testing import canary_spec


def plant_counter(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[1, Col.EMPTY] += 1


def plant_host_counter(s: Serving) -> None:
    inside.host(s.cache).arrays.meta[2, Col.CACHED] -= 1


def plant_duplicate_in_the_free_list(s: Serving) -> None:
    a, base = inside.pools(s.cache).arrays, int(inside.pools(s.cache).arrays.meta[0, Col.BASE])
    a.empties[base + 1 + int(a.slabs[0, SlabCol.LISTED])] = entry(s, Place.EMPTY) - base
    a.slabs[0, SlabCol.LISTED] += 1


def plant_lost_block(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    a.place[entry(s, Place.EMPTY)] = Place.HELD


def plant_owner_of_the_null_block(s: Serving) -> None:
    inside.pools(s.cache).arrays.refs[0] = 1


def plant_reference_too_many(s: Serving) -> None:
    inside.pools(s.cache).arrays.refs[entry(s, Place.HELD)] += 1


def plant_reference_too_few(s: Serving) -> None:
    inside.pools(s.cache).arrays.refs[entry(s, Place.HELD)] -= 1


def plant_host_pin_missing(s: Serving) -> None:
    inside.host(s.cache).arrays.refs[entry(s, Place.HELD, "host")] -= 1


def plant_key_on_an_empty_block(s: Serving) -> None:
    inside.pools(s.cache).arrays.mark[entry(s, Place.EMPTY)] = Mark.READY


def plant_cached_block_without_key(s: Serving) -> None:
    inside.pools(s.cache).arrays.mark[entry(s, Place.CACHED)] = Mark.NONE


def plant_hole_in_the_index(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    a.slots[np.flatnonzero(a.slots)[0]] = 0


def plant_two_blocks_of_one_key(s: Serving) -> None:
    a, base = inside.pools(s.cache).arrays, int(inside.pools(s.cache).arrays.meta[0, Col.BASE])
    first, second = np.flatnonzero(a.mark[base : base + int(a.meta[0, Col.ROWS])])[:2]
    a.key[base + second] = a.key[base + first]


def plant_more_ids_than_memory(s: Serving) -> None:
    inside.arena(s.cache).rows[0] -= 1


def plant_wrong_gauge(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.CACHED] += 1


def plant_block_quarantined_for_nothing(s: Serving) -> None:
    pools, group = inside.pools(s.cache), np.zeros(1, np.int32)
    block = pools.take(group)
    pools.quarantine(group, block)
    pools.release(group, block)


def plant_host_block_quarantined_for_nothing(s: Serving) -> None:
    pools, group = inside.host(s.cache), np.zeros(1, np.int32)
    block = pools.take(group)
    pools.quarantine(group, block)
    pools.release(group, block)


def plant_peak_below_what_is_held(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.PEAK_HELD] = 0


def plant_negative_number_of_evictions(s: Serving) -> None:
    inside.host(s.cache).arrays.meta[2, Col.EVICTED] = -1


def plant_peak_above_what_there_is(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.PEAK_HELD] = 25


def plant_wrong_number_of_keys(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.KEYED] += 1


def plant_cached_block_under_another_key(s: Serving) -> None:
    inside.pools(s.cache).arrays.key[entry(s, Place.CACHED), 1] ^= np.uint64(1 << 63)


def plant_unknown_mark(s: Serving) -> None:
    inside.pools(s.cache).arrays.mark[entry(s, Place.CACHED)] = 3


def plant_unknown_place(s: Serving) -> None:
    inside.pools(s.cache).arrays.place[entry(s, Place.HELD, g=2)] = 6


def plant_cached_block_twice_in_the_ring(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    start, size, tail = (int(a.meta[0, c]) for c in (Col.RING_BASE, Col.RING_SIZE, Col.TAIL))
    a.ring[start + tail % size] = entry(s, Place.CACHED)
    a.meta[0, Col.TAIL] += 1


def plant_sweep_behind_the_head(s: Serving) -> None:
    meta = inside.pools(s.cache).arrays.meta[0]
    meta[Col.CLOSED] = meta[Col.SWEEP] = meta[Col.HEAD] - 1


def plant_sweep_that_passed_a_block(s: Serving) -> None:
    meta = inside.pools(s.cache).arrays.meta[0]
    meta[Col.CLOSED], meta[Col.SWEEP] = meta[Col.HEAD], meta[Col.TAIL]


def plant_empty_block_that_a_store_reads(s: Serving) -> None:
    """A FENCED block that was put among the empty ones, in order, but for its fence."""
    _unfence_wrongly(s, keyed=False)


def plant_cached_block_that_a_store_reads(s: Serving) -> None:
    _unfence_wrongly(s, keyed=True)


def _unfence_wrongly(s: Serving, keyed: bool) -> None:
    pools, i = inside.pools(s.cache), entry(s, Place.FENCED)
    group, block = np.zeros(1, np.int32), np.array([i - int(pools.arrays.meta[0, Col.BASE])], np.int32)
    fence = int(pools.arrays.fence[i])
    if not keyed:
        pools.unpublish(group, block)
    pools.unfence(group, block, fence)
    assert pools.arrays.place[i] == (Place.CACHED if keyed else Place.EMPTY)
    pools.arrays.fence[i] = fence


def plant_slab_list_that_ends_early(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.OPEN] = -1


def plant_first_of_the_slab_list_after_another(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    a.slabs[int(a.meta[0, Col.OPEN]), SlabCol.PREVIOUS] = 0


def plant_wild_first_new_id_of_a_slab(s: Serving) -> None:
    """So wild that whoever lists what is between has no memory left."""
    a = inside.pools(s.cache).arrays
    a.slabs[int(a.meta[0, Col.OPEN]), SlabCol.FRESH] = -(2**40)


def plant_wild_head_of_the_ring(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.HEAD] = -(2**60)


def plant_slab_list_in_a_circle(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    a.slabs[a.meta[0, Col.OPEN], SlabCol.NEXT] = a.meta[0, Col.OPEN]


def plant_slab_list_that_leads_nowhere(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    a.slabs[a.meta[0, Col.OPEN], SlabCol.NEXT] = 77


def plant_negative_list_of_empties(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    a.slabs[a.meta[0, Col.OPEN], SlabCol.LISTED] = -1


def plant_wild_index_mask(s: Serving) -> None:
    inside.host(s.cache).arrays.meta[0, Col.INDEX_MASK] = -63


def plant_wild_ring_size(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.RING_SIZE] *= 2


def plant_pools_of_other_sizes(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.ROWS] += 1


def plant_wild_entry_of_the_index(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    k = np.flatnonzero(a.slots)[0]
    a.slots[k] = a.slots[k] & np.uint64(0xFFFFFFFF00000000) | np.uint64(9_999)


def plant_log_among_the_stamps(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[-1, Col.LOG_BASE] -= 1


def plant_wild_entry_of_the_ring(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    a.ring[int(a.meta[0, Col.RING_BASE]) + int(a.meta[0, Col.HEAD]) % int(a.meta[0, Col.RING_SIZE])] = -5


def plant_live_content_as_superseded(s: Serving) -> None:
    a = inside.pools(s.cache).arrays
    a.ring[int(a.meta[0, Col.RING_BASE]) + (int(a.meta[0, Col.TAIL]) - 1) % int(a.meta[0, Col.RING_SIZE])] *= -1


def plant_pool_that_begins_inside_another(s: Serving) -> None:
    inside.arena(s.cache).origins[1] -= 16


def plant_host_pool_whose_blocks_are_too_far_apart(s: Serving) -> None:
    inside.host_arena(s.cache).strides[0] += 16


def plant_slab_that_no_pool_has(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.UNUSED] -= 1


def plant_more_slabs_than_there_are(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, [Col.SLABS, Col.UNUSED]] += 1


def plant_stuck_slab_too_many(s: Serving) -> None:
    inside.pools(s.cache).arrays.meta[0, Col.STUCK] += 1


def plant_fence_that_its_slab_does_not_count(s: Serving) -> None:
    inside.pools(s.cache).arrays.slabs[0, SlabCol.FENCES] += 1


def plant_fewer_keys_than_cached_blocks(s: Serving) -> None:
    meta = inside.pools(s.cache).arrays.meta[0]
    meta[Col.KEYED] = meta[Col.CACHED] - 1


def plant_lists_of_another_size(s: Serving) -> None:
    pools = inside.pools(s.cache)
    pools.arrays = pools.arrays._replace(empties=pools.arrays.empties[:-1])


def plant_block_that_names_another_slab(s: Serving) -> None:
    inside.pools(s.cache).arrays.blocks["slab"][entry(s, Place.HELD)] += 1


def plant_slab_with_a_cached_block_too_many(s: Serving) -> None:
    inside.pools(s.cache).arrays.slabs[0, SlabCol.CACHED] += 1


def plant_pool_that_begins_before_its_memory(s: Serving) -> None:
    inside.arena(s.cache).origins[0] = -16


PLANTED: dict[Callable[[Serving], None], list[str]] = {
    plant_counter: ["I1 do not make"],
    plant_host_counter: ["I1 blocks are CACHED, the counter says", "I25 lent"],
    plant_duplicate_in_the_free_list: ["I1 the EMPTY list holds a block twice"],
    plant_lost_block: ["I1 the EMPTY list is not the set of such blocks", "I1 are counted as EMPTY"],
    plant_owner_of_the_null_block: ["I1 the null block is owned"],
    plant_reference_too_many: ["I2 references do not equal owners and pins"],
    plant_reference_too_few: ["I2 references and place disagree"],
    plant_host_pin_missing: ["I2 references do not equal owners and pins"],
    plant_key_on_an_empty_block: [
        "I21 findable, but empty or quarantined",
        "I21 the key index and the keyed blocks differ",
    ],
    plant_cached_block_without_key: ["I21 CACHED without a key"],
    plant_hole_in_the_index: ["I21 keys, the counter says"],
    plant_two_blocks_of_one_key: ["I21 a key does not lead to its block"],
    plant_more_ids_than_memory: ["I22 ids, but memory for"],
    plant_wrong_gauge: ["I25 stats count"],
    plant_block_quarantined_for_nothing: ["I1 QUARANTINED for no reason"],
    plant_host_block_quarantined_for_nothing: ["I1 QUARANTINED for no reason"],
    plant_peak_below_what_is_held: ["I25 blocks are held"],
    plant_negative_number_of_evictions: ["I25 blocks were evicted"],
    plant_peak_above_what_there_is: ["I25 blocks are held"],
    plant_wrong_number_of_keys: ["I21 keys, the counter says"],
    plant_cached_block_under_another_key: ["I21 a key does not lead to its block"],
    plant_unknown_mark: ["I1 there is no place"],
    plant_unknown_place: ["I1 there is no place"],
    plant_cached_block_twice_in_the_ring: [
        "I1 the CACHED list holds a block twice",
        "I1 a cached block does not know its place in the ring",
    ],
    plant_sweep_behind_the_head: ["I1 is swept from"],
    plant_sweep_that_passed_a_block: ["I1 the sweep of the ring has left blocks behind"],
    plant_empty_block_that_a_store_reads: ["I17 could be handed out while a store reads it"],
    plant_cached_block_that_a_store_reads: ["I17 could be handed out while a store reads it"],
    plant_slab_list_that_ends_early: ["I1 are listed as having empty blocks"],
    plant_first_of_the_slab_list_after_another: ["I1 and does not say so"],
    plant_wild_first_new_id_of_a_slab: ["I1 its list and its new ids do not make its empty blocks"],
    plant_wild_head_of_the_ring: ["I1 is swept from"],
    plant_slab_list_in_a_circle: ["I1 and does not say so"],
    plant_slab_list_that_leads_nowhere: ["I1 the state cannot be followed"],
    plant_negative_list_of_empties: ["I1 its list and its new ids do not make its empty blocks"],
    plant_wild_index_mask: ["I22 and sizes do not divide up the"],
    plant_log_among_the_stamps: ["I22 logs of changes are not behind the ring's stamps"],
    plant_wild_ring_size: ["I22 stamps of the ring are not behind its entries"],
    plant_pools_of_other_sizes: ["I22 its layout says"],
    plant_wild_entry_of_the_index: ["I21 the key index names block"],
    plant_live_content_as_superseded: [
        "I1 what was superseded does not stand first in the ring",
        "I1 are counted as SUPERSEDED",
    ],
    plant_wild_entry_of_the_ring: ["I1 the CACHED list is not the set of such blocks"],
    plant_pool_that_begins_inside_another: ["I22 its blocks reach into those of"],
    plant_host_pool_whose_blocks_are_too_far_apart: ["I22 its blocks reach into those of"],
    plant_slab_that_no_pool_has: ["I1 pools have"],
    plant_more_slabs_than_there_are: [
        "I22 more slabs are used than there are",
        "I1 its slabs are not those that are counted",
    ],
    plant_stuck_slab_too_many: ["I1 its slabs are not those that are counted"],
    plant_fewer_keys_than_cached_blocks: ["I21 cached blocks"],
    plant_lists_of_another_size: ["I22 arrays are of other sizes than the layout's"],
    plant_fence_that_its_slab_does_not_count: ["I1 are counted as FENCES"],
    plant_slab_with_a_cached_block_too_many: ["I1 are counted as CACHED"],
    plant_pool_that_begins_before_its_memory: ["I22 the pools do not make the arena's"],
    plant_block_that_names_another_slab: ["I1 blocks name a slab in which they do not lie"],
}


@pytest.mark.usefixtures("damaged", "unaudited")
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_audit_sees_damage_to_pools(plant):
    assert_seen(plant, PLANTED[plant])


SHARED = canary_spec({"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}, num_layers={"full": 2, "win": 3})


@pytest.mark.parametrize("by", [-16, 16])
def test_the_audit_sees_blocks_outside_their_slabs(make_cache, by):
    """Pools that share an arena; the smaller blocks are moved."""
    cache = shared_serving(make_cache, SHARED, 12).cache
    assert cache.audit() == []
    inside.arena(cache).origins[0] += by
    assert_reported(cache, "I22 its blocks do not lie inside their slabs")
    inside.arena(cache).origins[0] -= by


def test_the_audit_sees_a_block_in_a_slab_that_another_pool_has(make_cache):
    cache = shared_serving(make_cache, SHARED, 12).cache
    place = inside.pools(cache).arrays.place
    at = int(np.flatnonzero(~inside.pools(cache).is_own(0))[1])  # beside the null block
    place[at] = Place.HELD
    assert_reported(cache, "I1 but another pool has its slab")
    place[at] = Place.EMPTY
