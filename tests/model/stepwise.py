"""The copy engine of the explorer: nothing ends unasked, and time stands still."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Transfer


class StepwiseEngine(CopyEngine):
    """Ends transfers only when told. ``order``: what it means to order a writer behind a store that is under way.

    "stream"  at once, as on a CUDA stream; the store's end is reported when told
    "wait"    the store ends well before the writer goes on, as with threads
    "stuck"   the store never ends: the deadline passes while the writer waits
    """

    def __init__(self, memory: TierMemory, order: str) -> None:
        super().__init__(memory)
        self._order = order
        self.live: dict[int, Transfer] = {}
        self.ended: list[Outcome] = []

    def submit(self, transfer: Transfer) -> None:
        self.live[transfer.ticket] = transfer

    def end(self, ticket: int, error: str = "") -> None:
        del self.live[ticket]
        self.ended.append(Outcome(ticket, error))

    def poll(self) -> Sequence[Outcome]:
        ended, self.ended = self.ended, []
        return ended

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        under_way = [ticket for ticket in tickets if ticket in self.live]
        if self._order == "wait":
            for ticket in under_way:
                self.end(ticket)
        return not under_way or self._order != "stuck"

    def wait(self, timeout_s: float) -> bool:
        return bool(self.ended)

    def wake(self) -> None:
        pass

    def now(self) -> float:
        """Stands still: the action "expire" moves a transfer's deadline into the past instead."""
        return 0.0

    def close(self, timeout_s: float) -> bool:
        return True
