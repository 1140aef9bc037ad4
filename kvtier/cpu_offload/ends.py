"""The effect of a copy's end on the blocks of both tiers.

Owns       the counters of transfers, the loads that have failed, the host blocks whose bytes have changed.
Promises   a key is findable only once its bytes are there and, if asked for, verified. Blocks that an overdue copy may
           still touch are out of circulation until it has ended. A changed block is out of use until a reset. Keeps
           I13, I20.
Does not   know how copies are ordered, or when a copy ends: the ``Connector`` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.books import TransferCounts
from kvtier.cpu_offload.device_side import DeviceSide
from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.pools.block_pool import BlockPools, Ids, Words

Bools = npt.NDArray[np.bool_]


class Ends:
    """Ends of the transfers between a device and the host pools. ``good``: bool [n], which blocks have arrived
    whole. ``pools``: the device's, None if an engine owns its content."""

    def __init__(
        self,
        device: DeviceSide,
        pools: BlockPools | None,
        host: BlockPools | None,
        block_bytes: npt.NDArray[np.int64],
    ) -> None:
        self._device = device
        self._pools = pools
        self._host = host
        self._block_bytes = block_bytes
        self.counts = TransferCounts()
        self.failed_loads: dict[int, str] = {}
        """By ticket: the problems of failed loads that were not asked for yet."""
        self.corrupt: list[tuple[Ids, Ids]] = []
        """(groups, host blocks) that are quarantined until a reset."""

    def store(self, t: Transfer, good: Bools, is_current: bool) -> None:
        """A store has ended in time. ``is_current``: no reset has outdated its content."""
        assert self._host is not None
        all_good = bool(good.all())
        if is_current and all_good:
            self._host.make_ready(t.groups, t.host)
        elif is_current:
            self._host.make_ready(t.groups[good], t.host[good])
            self._host.unpublish(t.groups[~good], t.host[~good])
        self._host.release(t.groups, t.host, cold=t.superseded is not None)
        self._device.unfence(t.groups, t.device, t.ticket, t.cold)
        self.counts.stores += 1
        self.counts.failed_stores += not all_good
        self.counts.failed_store_blocks += 0 if all_good else int((~good).sum())
        self.counts.stored_blocks += int(good.sum())
        self.counts.stored_bytes += t.num_bytes if all_good else int(self._block_bytes[t.groups[good]].sum())

    def load(self, t: Transfer, good: Bools, outcome: Outcome, is_current: bool) -> None:
        """A load has ended in time."""
        assert self._host is not None
        error = outcome.error
        if self._pools is not None and is_current:
            self._pools.make_ready(t.groups[good], t.device[good])
            self._pools.unpublish(t.groups[~good], t.device[~good])
        if is_current:
            self._host.unpublish(t.groups[~good], t.host[~good])
        elif not error:
            error = "what it brought is not valid any more"
        if outcome.corrupt:
            self._take_out(t, np.flatnonzero(~good))
        if self._pools is not None:
            self._pools.release(t.groups, t.device)
        superseded = np.zeros(len(good), bool) if t.superseded is None else t.superseded
        self._host.release(t.groups[~superseded], t.host[~superseded])
        self._host.release(t.groups[superseded], t.host[superseded], cold=True)
        if error:
            self.failed_loads[t.ticket] = error
        self.counts.loads += 1
        self.counts.failed_loads += int(not good.all())
        self.counts.failed_load_blocks += int((~good).sum()) if error else 0
        self.counts.loaded_blocks += int(good.sum())
        self.counts.loaded_bytes += int(self._block_bytes[t.groups[good]].sum())

    def _take_out(self, t: Transfer, bad: npt.NDArray[np.int64]) -> None:
        """The bytes of these host blocks have changed: they are not handed out before a reset."""
        assert self._host is not None
        self._host.quarantine(t.groups[bad], t.host[bad])
        self.corrupt.append((t.groups[bad], t.host[bad]))
        self.counts.corrupt_blocks += len(bad)

    def give_up(self, t: Transfer, why: str) -> None:
        """A copy is overdue: its keys become misses, and both ends are quarantined until the engine reports."""
        assert self._host is not None
        self._host.quarantine(t.groups, t.host)
        if t.direction is Direction.STORE:
            self._device.expire_fence(t.groups, t.device, t.ticket)
        else:
            if self._pools is not None:
                self._pools.quarantine(t.groups, t.device)
            self.failed_loads[t.ticket] = why
        self.counts.expired += 1

    def late(self, t: Transfer, outcome: Outcome, overdue: Sequence[Transfer]) -> None:
        """A copy that was given up has ended after all. ``overdue``: the other copies that were given up."""
        assert self._host is not None
        good = np.ones(len(t.groups), bool)
        if outcome.corrupt and t.direction is Direction.LOAD:
            good[slice(None) if outcome.bad is None else outcome.bad] = False
            self._take_out(t, np.flatnonzero(~good))
        self._host.release(t.groups, t.host)
        self._restore(t.groups[good], t.host[good], overdue)
        if t.direction is Direction.STORE:
            self.counts.stores += 1
            self._device.unfence(t.groups, t.device, t.ticket)
        else:
            self.counts.loads += 1
            if self._pools is not None:
                self._pools.release(t.groups, t.device)
                self._pools.restore(t.groups, t.device)

    def _restore(self, groups: Ids, hosts: Ids, overdue: Sequence[Transfer]) -> None:
        """Host blocks are in use again, except blocks that another reason keeps out of use."""
        assert self._host is not None
        kept = [(t.groups, t.host) for t in overdue] + self.corrupt
        names = [self._host.entries(*blocks) for blocks in kept]
        free = ~np.isin(self._host.entries(groups, hosts), np.concatenate(names)) if names else slice(None)
        self._host.restore(groups[free], hosts[free])

    def cancel(self, t: Transfer) -> None:
        """A planned store will not be made."""
        assert self._host is not None
        self._device.unfence(t.groups, t.device, t.ticket, t.cold)
        self._host.unpublish(t.groups, t.host)
        self._host.release(t.groups, t.host)

    def outdate(self, t: Transfer) -> None:
        """The content that this transfer brings is not to be found."""
        if t.direction is Direction.STORE:
            assert self._host is not None
            self._host.unpublish(t.groups, t.host)
        elif self._pools is not None:
            self._pools.unpublish(t.groups, t.device)

    def forget(self, groups: Ids, keys: Words) -> None:
        """Content under these keys is found in no tier any more."""
        for pools in filter(None, (self._pools, self._host)):
            blocks = pools.find(groups, keys)
            pools.unpublish(groups[blocks > 0], blocks[blocks > 0])

    def forget_all(self, overdue: Sequence[Transfer]) -> None:
        """Present content is never found again. Changed blocks are in use again, unless an ``overdue`` copy may touch
        them."""
        if self._pools is not None:
            self._pools.forget_all()
        if self._host is not None:
            self._host.forget_all()
            changed, self.corrupt = self.corrupt, []
            for groups, hosts in changed:
                self._restore(groups, hosts, overdue)
