"""Which device blocks get a copy in the host tier, and which of its copies a hit makes newer or older.

Owns       this decision.
Promises   a block is stored once as long as its copy is there. Blocks without room in the host are dropped and counted.
           While stores hang, nothing is stored.
Does not   move bytes, or know the meaning of an end: the ``Connector`` does. It knows no requests.

When stores are planned is told by ``STORE_MODES`` in ``kvtier.geometry.options``: ``plan`` and ``touch_or_store`` serve
``when_full``, ``launder`` serves ``before_eviction``. A new rule about which blocks is a method here, which plans its
stores through ``_store``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.device_side import DeviceSide
from kvtier.pools.block_pool import BlockPools, Ids, Words

Counts = npt.NDArray[np.int64]


class StorePolicy:
    """Plans stores from a device to the host pools, if there are any. ``groups`` and ``blocks`` are int32 [n]."""

    def __init__(self, connector: Connector, device: DeviceSide, host: BlockPools | None) -> None:
        self._connector = connector
        self._device = device
        self._host = host

    def plan(self, groups: Ids, blocks: Ids, keys: Words) -> None:
        """Plans to store findable device blocks whose keys, uint64 [n, 2], the host does not have."""
        self._store(groups, blocks, keys)

    def touch_or_store(self, groups: Ids, blocks: Ids, keys: Words, superseded: npt.NDArray[np.bool_]) -> None:
        """These device blocks were hit: their host copies become the newest, and missing copies are planned.

        Copies of blocks that are ``superseded``, bool [n], become the oldest: no other request is known to want them.
        """
        if self._host is None or len(groups) == 0:
            return
        self.touch(groups[superseded], keys[superseded], cold=True)
        kept = self.touch(groups[~superseded], keys[~superseded])
        missing = np.flatnonzero(~superseded)[~kept]
        self._store(groups[missing], blocks[missing], keys[missing])

    def touch(self, groups: Ids, keys: Words, cold: bool = False) -> npt.NDArray[np.bool_]:
        """The host's copies of these keys become the newest, or the oldest. Returns which keys have a copy, bool
        [n]."""
        assert self._host is not None
        hosts = self._host.find(groups, keys)
        found: npt.NDArray[np.bool_] = hosts > 0
        self._host.acquire(groups[found], hosts[found])
        self._host.release(groups[found], hosts[found], cold)
        return found

    def launder(self, pools: BlockPools, groups: Ids, blocks: Ids) -> Counts:
        """Plans stores for cached blocks of ``pools``, the device's, that the host lacks. Returns their number by
        group.

        Superseded blocks come last, and only as far as the host has empty blocks: an eviction for them would delay
        useful stores. Nothing is planned after the engine has refused a store: it would be refused again and again.
        """
        planned = np.zeros(self._device.num_groups, np.int64)
        if self._host is None or self._connector.refuses_stores:
            return planned
        keys, superseded = pools.arrays.key[pools.entries(groups, blocks)], pools.is_superseded(groups, blocks)
        useful = ~superseded
        planned += self._store(groups[useful], blocks[useful], keys[useful], cold=True)
        return planned + self.fill_spare(groups[superseded], blocks[superseded], keys[superseded])

    def fill_spare(self, groups: Ids, blocks: Ids, keys: Words) -> Counts:
        """Plans stores for superseded blocks that the host lacks, as far as it has empty blocks. Returns their number
        by group."""
        planned = np.zeros(self._device.num_groups, np.int64)
        if self._host is not None and len(groups):
            lacking = self._host.find(groups, keys) == 0
            for g in range(len(planned)):
                at = np.flatnonzero(lacking & (groups == g))[: self._host.num_spare(g)]
                planned += self._store(groups[at], blocks[at], keys[at], cold=True, superseded=True)
        return planned

    def count_lost(self, pools: BlockPools, groups: Ids, blocks: Ids) -> None:
        """These cached blocks of ``pools``, the device's, go out now: counts the blocks without a copy in the host."""
        if self._host is not None:
            keys = pools.arrays.key[pools.entries(groups, blocks)]
            self._connector.counts.dropped_blocks += int((self._host.find(groups, keys) == 0).sum())

    def _store(self, groups: Ids, blocks: Ids, keys: Words, cold: bool = False, superseded: bool = False) -> Counts:
        """Plans stores; returns their number by group.

        ``cold`` blocks are about to be evicted: a dropped block is counted at its eviction.
        """
        connector = self._connector
        if self._host is None or len(groups) == 0:
            return np.zeros(self._device.num_groups, np.int64)
        if connector.stores_hang:
            if not cold:
                connector.counts.dropped_blocks += int((self._host.find(groups, keys) == 0).sum())
            return np.zeros(self._device.num_groups, np.int64)
        if self._host.shared:
            self._host.provide(self._host.count_stores(self._device.arrays, groups, blocks, keys))
        groups, blocks, hosts, keys, dropped = self._host.take_for_stores(self._device.arrays, groups, blocks, keys)
        if not cold:
            connector.counts.dropped_blocks += dropped
        connector.store(groups, blocks, hosts, keys, cold, superseded)
        return np.bincount(groups, minlength=self._device.num_groups)
