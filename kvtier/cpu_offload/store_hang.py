"""``StoreHang``: whether stores hang, and which stores are tried meanwhile.

Owns       the last store that became overdue, the last store that ended, and the time of the next try.
Promises   while stores hang, only one block is stored now and then, ever more rarely, to see whether stores still hang.
           It is a block that the host has room for, and that no other store fences.
Does not   move transfers: the ``Connector`` does, and reports their ends.

Stores hang if a store is overdue and no store that was submitted later has ended: the next store would hang as well.
Each attempt takes its blocks out of circulation for a deadline at least.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.device_side import DeviceSide
from kvtier.pools.block_pool import BlockPools, Ids

SHORTEST_PAUSE_S = 1.0
"""Lower bound on the pause between two tries; engines treat copies younger than this as progressing."""


class StoreHang:
    """Watches the stores from a device to the host pools, if there are any. Tickets grow with the engine's time."""

    def __init__(self, device: DeviceSide, host: BlockPools | None, deadline_s: float) -> None:
        self._device = device
        self._host = host
        self._shortest_pause_s = max(deadline_s, SHORTEST_PAUSE_S)
        self._last_overdue = self._last_ended = 0  # tickets
        self._next_try_s = self._pause_s = 0.0  # the next try, and the pause before it

    @property
    def is_on(self) -> bool:
        """Whether stores hang."""
        return self._last_overdue > self._last_ended

    def on_end(self, ticket: int) -> None:
        """A store has ended, good or bad. A refused store says nothing about the link."""
        self._last_ended = max(self._last_ended, ticket)

    def on_overdue(self, ticket: int, deadline_s: float) -> None:
        """A store has not ended by ``deadline_s``."""
        if not self.is_on:
            self._pause_s = self._shortest_pause_s
            self._next_try_s = deadline_s + self._pause_s
        self._last_overdue = max(self._last_overdue, ticket)

    def choose(self, groups: Ids, blocks: Ids, lacking: npt.NDArray[np.bool_], now: float) -> npt.NDArray[np.int64]:
        """Which of these device blocks is stored ``now``: its place among them; int64 [1], or [0] for none.

        The block is ``lacking`` in the host, bool [n]. It is chosen once a pause has passed; the next pause is twice as
        long.
        """
        assert self._host is not None
        if now < self._next_try_s:
            return np.empty(0, np.int64)
        free = ~self._device.are_fenced(groups, blocks)
        room = self._host.shared | (self._host.clean[groups] > 0)
        at = np.flatnonzero(lacking & free & room)[:1]
        if len(at):
            self._pause_s *= 2.0
            self._next_try_s = now + self._pause_s
        return at
