"""Small pools that share an arena, what can be done to them in one line, and their books counted anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from core.driving import Serving
from kvtier import CacheSpec
from kvtier.geometry import layout
from kvtier.geometry.layout import Layout
from kvtier.pools.block_pool import BlockPools, Col, Mark, Place, SlabCol

SIZES = (32, 48)
"""Bytes of a block: a slab holds three of group 0 or two of group 1."""
A, B = 0, 1


def arena_bytes(sizes: Sequence[int], num_slabs: int) -> int:
    return max(sizes) + num_slabs * math.lcm(*sizes)


def pools_of(num_slabs: int, sizes: Sequence[int] = SIZES) -> BlockPools:
    with patch.object(layout, "FEWEST_SLABS", 1):
        found = Layout.of_slabs(sizes, arena_bytes(sizes, num_slabs))
    assert found is not None
    assert found.shared
    assert found.num_slabs == num_slabs
    return BlockPools(found)


def counts(*n: int) -> np.ndarray:
    return np.array(n, np.int64)


def of(g: int, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.full(len(blocks), g, np.int32), np.array(blocks, np.int32)


def key_of(g: int, b: int) -> list[int]:
    return [1000 * g + b, (7919 * (1000 * g + b)) << 32 | b]


def keys_of(g: int, blocks: Sequence[int]) -> np.ndarray:
    return np.array([key_of(g, b) for b in blocks], np.uint64).reshape(-1, 2)


def take(pools: BlockPools, g: int, n: int) -> list[int]:
    """n blocks of group g, held."""
    assert pools.provide(counts(*(n * (h == g) for h in range(pools.num_groups))))
    return pools.take(np.full(n, g, np.int32)).tolist()


def whole_slab(pools: BlockPools, g: int) -> list[int]:
    """Takes blocks of group g until they fill a slab that the pool did not have."""
    blocks = take(pools, g, int(pools.arrays.meta[g, Col.PER_SLAB]))
    assert len({slab_of(pools, g, b) for b in blocks}) == 1
    return blocks


def slab_of(pools: BlockPools, g: int, b: int) -> int:
    return (b - 1) // int(pools.arrays.meta[g, Col.PER_SLAB])


def cache(pools: BlockPools, g: int, blocks: Sequence[int], cold: bool = False) -> None:
    """Held blocks are given up with their content, later than whatever was cached before."""
    pools.tick()
    pools.publish(*of(g, blocks), keys_of(g, blocks), Mark.READY)
    pools.release(*of(g, blocks), cold)


def free(pools: BlockPools, g: int, blocks: Sequence[int]) -> None:
    """Held blocks are given up without content."""
    pools.release(*of(g, blocks))


def owners(pools: BlockPools) -> list[int]:
    return pools.arrays.slabs[:, SlabCol.OWNER].tolist()


def found(pools: BlockPools, g: int, blocks: Sequence[int]) -> list[bool]:
    """Whether the content that each block had when it was cached is still findable, in that block."""
    return (pools.find(of(g, blocks)[0], keys_of(g, blocks)) == np.array(blocks)).tolist()


def check_books(pools: BlockPools) -> None:
    """Counts by slab and by pool are those of the blocks, and the empty blocks are listed once each."""
    a = pools.arrays
    for g in range(pools.num_groups):
        base, per_slab = int(a.meta[g, Col.BASE]), int(a.meta[g, Col.PER_SLAB])
        place = a.place[base + 1 : base + int(a.meta[g, Col.ROWS])].reshape(-1, per_slab)
        mark = a.mark[base + 1 : base + int(a.meta[g, Col.ROWS])].reshape(-1, per_slab)
        own = np.array(owners(pools)) == g
        assert a.meta[g, Col.SLABS] == own.sum()
        assert np.all(place[~own] == Place.EMPTY), "a block of another's slab is in use"
        for column, kind in ((SlabCol.EMPTY, Place.EMPTY), (SlabCol.CACHED, Place.CACHED)):
            assert a.slabs[own, column].tolist() == (place[own] == kind).sum(1).tolist()
        stuck = ((place == Place.QUARANTINED) | (mark == Mark.PENDING)).any(1)
        assert a.meta[g, Col.STUCK] == stuck.sum()
        fence = a.fence[base + 1 : base + int(a.meta[g, Col.ROWS])].reshape(-1, per_slab)
        assert a.slabs[own, SlabCol.FENCES].tolist() == (fence[own] > 0).sum(1).tolist()
        empty = (base + 1 + np.flatnonzero(((place == Place.EMPTY) & own[:, None]).ravel())).tolist()
        assert sorted(base + b for b in pools.empties(g)) == empty
        assert a.meta[g, Col.EMPTY] == len(empty)


def shared_serving(make_cache: Any, spec: CacheSpec, slabs: int, host: int = 0, **options: Any) -> Serving:
    """A ``Serving`` whose tiers are arenas of so many slabs that the groups share; ``host`` 0 is no host tier."""
    sizes = [group.block_bytes for group in spec.groups]
    num_bytes = {"device_bytes": arena_bytes(sizes, slabs), "host_bytes": host and arena_bytes(sizes, host)}
    with patch.object(layout, "FEWEST_SLABS", 1):
        made = make_cache(spec, None, None, **num_bytes, **options)
    assert made.core.coordinator.pools.shared
    return Serving(made)


# --- what keeps a slab from changing hands --------------------------------------------------------


def _fence(pools: BlockPools, b: int) -> None:
    pools.publish(*of(A, [b]), keys_of(A, [b]), Mark.READY)
    pools.fence(*of(A, [b]), 1)
    free(pools, A, [b])


def _quarantine(pools: BlockPools, b: int) -> None:
    pools.quarantine(*of(A, [b]))
    free(pools, A, [b])


BLOCKED = {
    "held": (lambda pools, b: None, lambda pools, b: free(pools, A, [b])),
    "fenced": (_fence, lambda pools, b: pools.unfence(*of(A, [b]), 1)),
    "quarantined": (_quarantine, lambda pools, b: pools.restore(*of(A, [b]))),
    "pending": (
        lambda pools, b: pools.publish(*of(A, [b]), keys_of(A, [b]), Mark.PENDING),
        lambda pools, b: (pools.make_ready(*of(A, [b])), free(pools, A, [b])),
    ),
}
