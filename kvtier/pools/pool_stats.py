"""A tier's pools for their users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.machine.stats import PoolStats
from kvtier.pools.block_pool import BlockPools, Col


class Sized(Protocol):
    """The part of a group that its pool needs."""

    @property
    def name(self) -> str:
        """Name of the group."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""


def pool_stats(pools: BlockPools, groups: Sequence[Sized]) -> dict[str, PoolStats]:
    """The statistics of each group, by its name; from any thread."""
    meta = pools.arrays.meta
    return {group.name: _of_group(pools, meta[g].tolist(), group) for g, group in enumerate(groups)}


def _of_group(pools: BlockPools, meta: list[int], group: Sized) -> PoolStats:
    """The statistics of one group, from its row of ``meta``.

    Another thread may be changing it: each number may be of another moment, but their sum never exceeds the pool.
    """
    usable = left = meta[Col.ROWS] - 1
    parts = []
    lent = usable - (meta[Col.SLABS] + pools.num_unused) * meta[Col.PER_SLAB]
    for n in (meta[Col.HELD], meta[Col.QUARANTINED], meta[Col.FENCED], meta[Col.CACHED], lent):
        parts.append(min(max(n, 0), left))
        left -= parts[-1]
    held, quarantined, fenced, cached, lent = parts
    return PoolStats(
        usable=usable,
        empty=left,
        cached=cached,
        fenced=fenced,
        held=held,
        quarantined=quarantined,
        lent=lent,
        peak_held=meta[Col.PEAK_HELD],
        evicted=meta[Col.EVICTED],
        block_bytes=group.block_bytes,
        block_tokens=group.block_tokens,
        capacity_tokens=usable * group.block_tokens,
    )
