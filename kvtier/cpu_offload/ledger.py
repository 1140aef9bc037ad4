"""``Ledger``: every transfer from plan to end.

Owns       the live transfers, their tickets, their times, the epoch.
Promises   tickets grow with time. A transfer is live until it has settled; an overdue one until its copy has ended.
           Each end and each missed deadline is seen in ``num_settled``. Keeps I18.
Does not   touch blocks or move bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.pools.block_pool import Ids, Words

OUTDATED = -1
"""The epoch of a transfer with content that is not to be published."""


class Ledger:
    """Transfers with a deadline of ``deadline_s`` seconds from their submission, on the copy engine's clock."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.epoch = 0
        """Grows with each reset: content of earlier epochs is not published any more."""
        self.num_settled = 0
        """Grows whenever a transfer ends or is given up: a request that waits for one looks again then."""
        self._live: dict[int, Transfer] = {}  # by ticket, oldest first
        self._next_ticket = 1
        self._num_expired = 0

    def open(
        self, direction: Direction, groups: Ids, blocks: Ids, hosts: Ids, keys: Words, num_bytes: int, cold: bool
    ) -> Transfer:
        """A new transfer, PLANNED."""
        transfer = Transfer(self._next_ticket, direction, groups, blocks, hosts, keys, num_bytes, self.epoch, cold)
        self._next_ticket += 1
        self._live[transfer.ticket] = transfer
        return transfer

    def submit(self, t: Transfer, now: float) -> None:
        """IN_FLIGHT from ``now`` on."""
        t.move(TransferState.IN_FLIGHT)
        t.submitted_s = now
        t.deadline_s = now + self.deadline_s

    def expire(self, t: Transfer) -> None:
        """EXPIRED: nobody waits for it any more."""
        t.move(TransferState.EXPIRED)
        self._num_expired += 1
        self.num_settled += 1

    def settle(self, t: Transfer) -> None:
        """SETTLED: it touches no block any more."""
        self._num_expired -= t.state is TransferState.EXPIRED
        t.move(TransferState.SETTLED)
        del self._live[t.ticket]
        self.num_settled += 1

    def note_end(self) -> None:
        """A copy that is not listed here has ended: requests that wait for content look again."""
        self.num_settled += 1

    def outdate(self, t: Transfer) -> None:
        """The content of this transfer is not to be published: requests that wait for it look again."""
        t.epoch = OUTDATED
        self.num_settled += 1

    # --- questions --------------------------------------------------------------------------------

    def find(self, ticket: int) -> Transfer | None:
        """The live transfer of this ticket."""
        return self._live.get(ticket)

    def is_known(self, ticket: int) -> bool:
        """Whether the transfer may still touch its blocks, be it overdue."""
        return ticket in self._live

    def is_live(self, ticket: int) -> bool:
        """Whether the transfer's bytes may still be under way and are worth waiting for."""
        transfer = self._live.get(ticket)
        return transfer is not None and transfer.state is not TransferState.EXPIRED

    def is_current(self, t: Transfer) -> bool:
        """Whether no reset has outdated its content."""
        return t.epoch == self.epoch

    @property
    def num_live(self) -> int:
        """Transfers that have not settled."""
        return len(self._live)

    @property
    def num_progressing(self) -> int:
        """Live transfers that are not overdue: they will free what they hold."""
        return len(self._live) - self._num_expired

    def live(self) -> list[Transfer]:
        """All live transfers, oldest first."""
        return list(self._live.values())

    def overdue(self, now: float) -> list[Transfer]:
        """Transfers in flight with a deadline that has passed."""
        return [t for t in self._live.values() if t.deadline_s <= now and t.state is TransferState.IN_FLIGHT]

    def given_up(self) -> list[Transfer]:
        """Overdue transfers that may still touch their blocks."""
        return [t for t in self._live.values() if t.state is TransferState.EXPIRED] if self._num_expired else []

    def bringing(self, keys: Words) -> Iterator[Transfer]:
        """Transfers with content under these keys that would be published."""
        for t in self._live.values():
            counts = t.state is not TransferState.EXPIRED and self.is_current(t)
            if counts and np.isin(t.keys[:, 1], keys[:, 1]).any():
                yield t

    def next_deadline_s(self) -> float:
        """The first deadline ahead; infinite if nothing is in flight."""
        ahead = [t.deadline_s for t in self._live.values() if t.state is not TransferState.EXPIRED]
        return min(ahead, default=math.inf)
