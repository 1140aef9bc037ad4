"""The ``null`` copy engine: every transfer has landed by the next poll, and no byte moves. For ``device="meta"``."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Transfer


class NullEngine(CopyEngine):
    """Bookkeeping without bytes, for planning and for benchmarks of the scheduler."""

    def __init__(self, memory: TierMemory) -> None:
        super().__init__(memory)
        self._ended: list[Outcome] = []

    def submit(self, transfer: Transfer) -> None:
        self._ended.append(Outcome(transfer.ticket))

    def poll(self) -> Sequence[Outcome]:
        ended, self._ended = self._ended, []
        return ended

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return bool(self._ended)

    def wake(self) -> None:
        """No thread sleeps here."""

    def now(self) -> float:
        return time.monotonic()

    def close(self, timeout_s: float) -> bool:
        return True
