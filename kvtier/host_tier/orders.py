"""A copy engine whose copies are made in other processes: orders go out, reports come in.

Owns       orders that were not taken yet, and the ends that only some workers have reported.
Promises   orders leave in the order of their making. A copy has ended once every worker has said so. A block is bad if
           it is bad in one of them.
Does not   move bytes (``HostTierWorker``), or carry orders and reports: the embedding engine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.machine.errors import TransferError
from kvtier.machine.wakeup import Wakeup
from kvtier.pools.block_pool import Ids
from kvtier.remote.parcels import Parcel, Receipt


class Copy(NamedTuple):
    """Blocks to copy. ``groups``, ``device`` and ``host`` are int32 [n], as in ``Transfer``."""

    ticket: int
    is_load: bool
    groups: Ids
    device: Ids
    host: Ids

    def of_rank(self, rank: int, ranks: int) -> tuple[Copy, npt.NDArray[np.int64]]:
        """What one of several workers stores of blocks that all have, and where that is in the copy, int64 [n]."""
        at = np.flatnonzero(self.host % ranks == rank)
        return self._replace(groups=self.groups[at], device=self.device[at], host=self.host[at]), at


class Orders(NamedTuple):
    """Work for every worker: first its stores, then the order of later writers, then its loads."""

    copies: tuple[Copy, ...] = ()
    after: tuple[int, ...] = ()
    """Stores, by ticket. Whatever the worker enqueues from now on writes after them."""
    parcels: tuple[Parcel, ...] = ()
    """Parcels for the remote tier, if there is one."""


class End(NamedTuple):
    """The end of a copy in one worker, or in all of them; see ``Outcome``. ``bad``: int64 [n]."""

    error: str = ""
    bad: npt.NDArray[np.int64] | None = None
    corrupt: bool = False


@dataclass
class Report:
    """Ends of copies, by ticket, with the number of workers that have reported each. Reports add up (``merge``)."""

    ends: dict[int, tuple[int, End]] = field(default_factory=dict)
    receipts: dict[int, tuple[int, Receipt]] = field(default_factory=dict)
    """Likewise, of parcels; their tickets are others than those of copies."""

    def __bool__(self) -> bool:
        return bool(self.ends or self.receipts)

    def add(self, ticket: int, end: End, workers: int = 1) -> None:
        """One more end, or one end more of the same copy."""
        before = self.ends.get(ticket)
        self.ends[ticket] = (workers, end) if before is None else (before[0] + workers, _both(before[1], end))

    def add_receipt(self, ticket: int, receipt: Receipt, workers: int = 1) -> None:
        """One more receipt, or one more of the same parcel."""
        before = self.receipts.get(ticket)
        both = receipt if before is None else before[1].both(receipt)
        self.receipts[ticket] = workers + (before[0] if before is not None else 0), both

    def merge(self, other: Report) -> Report:
        """Both reports in one."""
        for ticket, (workers, end) in other.ends.items():
            self.add(ticket, end, workers)
        for ticket, (workers, receipt) in other.receipts.items():
            self.add_receipt(ticket, receipt, workers)
        return self

    def take_whole(self, workers: int) -> tuple[dict[int, End], dict[int, Receipt]]:
        """Removes and returns what so many workers have reported."""
        ends = {ticket: end for ticket, (count, end) in self.ends.items() if count >= workers}
        receipts = {ticket: receipt for ticket, (count, receipt) in self.receipts.items() if count >= workers}
        for ticket in ends:
            del self.ends[ticket]
        for ticket in receipts:
            del self.receipts[ticket]
        return ends, receipts


def _both(a: End, b: End) -> End:
    """The worse of two ends; bad blocks are bad blocks of either."""
    if not a.error or not b.error:
        return a if a.error else b
    bad = None if a.bad is None or b.bad is None else np.union1d(a.bad, b.bad)
    return End(a.error if a.error == b.error else f"{a.error}; {b.error}", bad, a.corrupt and b.corrupt)


class RelayEngine(CopyEngine):
    """A copy engine of ``workers`` processes that all make every copy, each in its own memory."""

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._copies: list[Copy] = []
        self._after: list[int] = []
        self._partial = Report()
        self._ended: list[Outcome] = []
        self._receipts: dict[int, Receipt] = {}
        self._woken = Wakeup()
        self._is_closed = False

    def take(self) -> Orders:
        """The orders since the last call."""
        orders = Orders(tuple(self._copies), tuple(dict.fromkeys(self._after)))
        self._copies.clear()
        self._after.clear()
        return orders

    def report(self, report: Report) -> None:
        """Ends in workers. A copy with an end in each worker has ended."""
        self._partial.merge(report)
        ends, receipts = self._partial.take_whole(self._workers)
        self._ended += [Outcome(ticket, *end) for ticket, end in ends.items()]
        self._receipts |= receipts
        if ends or receipts:
            self._woken.set()

    def take_receipts(self) -> dict[int, Receipt]:
        """Receipts, by ticket, of parcels that every worker has reported since the last call."""
        receipts, self._receipts = self._receipts, {}
        return receipts

    # --- CopyEngine ---------------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        if self._is_closed:
            raise TransferError("the copy engine is closed")
        t = transfer
        self._copies.append(Copy(t.ticket, t.direction is Direction.LOAD, t.groups, t.device, t.host))

    def poll(self) -> Sequence[Outcome]:
        ended, self._ended = self._ended, []
        return ended

    def wipe(self, groups: Ids, blocks: Ids) -> None:
        """A worker has wiped what its load has left before it has reported the end."""

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        self._after += tickets  # workers order, and fail a store that they cannot wait for
        return True

    def wait(self, timeout_s: float) -> bool:
        self._woken.wait(timeout_s)
        self._woken.clear()
        return bool(self._ended)

    def wake(self) -> None:
        self._woken.set()

    def now(self) -> float:
        return self._clock()

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        return True
