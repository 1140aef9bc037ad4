"""Copy engines: ``threads`` (CPU), ``streams`` (a device's streams), ``simulated`` (faults and delays), ``null``.

An engine moves bytes and knows nothing else. The protocol is small on purpose:

    submit       start one transfer; its copies read what is in the source once everything the caller has written
                 so far is there (edges 1, 2 and 4 of the ordering contract)
    poll         what ended since the last poll; never waits
    order_after  make the caller's next writes come after the copies of these tickets (edge 4); waits if it must
    wait, wake   until something ends, somebody calls ``wake``, or the time is over
    close        end all work

An engine whose device has a stream of its own for computing also has ``move(g, sources, targets)``: a copy of blocks
within the device, in that stream's order. Without it the copy is made at once, on the current stream. What one says of
its link by ``link_stats()`` bounds the stores that it gets at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.transfer import Transfer


@dataclass(frozen=True)
class Outcome:
    """How a transfer's copies ended: all well if ``error`` is "".

    ``bad`` gives the positions in the transfer of the blocks that did not arrive whole; None means all of them. The
    others have, and where blocks are verified, with the bytes that were stored.
    ``corrupt``: they arrived, but their bytes are not those that were stored.
    """

    ticket: int
    error: str = ""
    bad: npt.NDArray[np.int64] | None = None
    corrupt: bool = False

    @staticmethod
    def of_check(transfer: Transfer, bad: npt.NDArray[np.int64] | Sequence[int]) -> Outcome:
        """All copies have ended; ``bad`` are the positions of the blocks whose checksum is wrong."""
        if len(bad) == 0:
            return Outcome(transfer.ticket)
        error = f"checksum mismatch in {len(bad)} of {len(transfer.groups)} blocks"
        return Outcome(transfer.ticket, error, np.asarray(bad, np.int64), corrupt=True)


PROTOCOL = ("submit", "poll", "order_after", "wait", "wake", "now", "close")
"""What a copy engine must have."""


class CopyEngine(Protocol):
    """What a copy engine does; see the module's docstring."""

    def submit(self, transfer: Transfer) -> None:
        """Starts the copies of ``transfer``; returns at once."""

    def poll(self) -> Sequence[Outcome]:
        """Transfers that ended since the last call, each once."""

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        """True once the caller's next writes are ordered after these tickets; False if that took too long."""

    def wait(self, timeout_s: float) -> bool:
        """True as soon as ``poll`` has something to report; False after ``timeout_s`` seconds or a ``wake``."""

    def wake(self) -> None:
        """Ends a ``wait`` of another thread early."""

    def now(self) -> float:
        """Seconds on the clock that deadlines use."""

    def close(self, timeout_s: float) -> bool:
        """Stops; True if no copy runs any more. Calling it again does nothing."""
