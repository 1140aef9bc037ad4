"""Free lists, rows and transfers of a cache, as section A looks at them."""

from __future__ import annotations

import inside
import numpy as np

from kvtier.pools.block_pool import BlockPools


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
