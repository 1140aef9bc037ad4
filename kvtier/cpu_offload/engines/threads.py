"""The ``threads`` copy engine: real asynchrony on a CPU.

Owns       the outcomes of its two threads' copies, one thread a direction.
Promises   the ordering contract without streams. The caller's writes are complete when it submits (edges 1 and 2), and
           ``order_after`` waits (edge 4). Transfers of one direction run in order.
Does not   know pools or keys.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.engines.submission import SubmissionThreads
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Transfer


class ThreadsEngine(CopyEngine):
    """Copies between a device arena and a host arena that are both in this process's memory."""

    def __init__(self, memory: TierMemory) -> None:
        super().__init__(memory)
        self._ended: SimpleQueue[Outcome] = SimpleQueue()  # not polled yet
        self._unfinished: set[int] = set()
        self._woken = self._closing = False
        self._copies = SubmissionThreads()

    def submit(self, transfer: Transfer) -> None:
        self._unfinished.add(transfer.ticket)
        self._copies.put(transfer.direction, partial(self._make, transfer))

    def poll(self) -> Sequence[Outcome]:
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        # After ``close``, copies that have not begun never begin.
        self._copies.wait_for(lambda: self._closing or self._unfinished.isdisjoint(tickets), timeout_s)
        return self._unfinished.isdisjoint(tickets)

    def wait(self, timeout_s: float) -> bool:
        self._copies.wait_for(lambda: self._woken or self._closing or not self._ended.empty(), timeout_s)
        self._woken = False
        return not self._ended.empty()

    def wake(self) -> None:
        self._woken = True
        self._copies.wake()

    def now(self) -> float:
        return time.monotonic()

    def close(self, timeout_s: float) -> bool:
        self._closing = True
        self._copies.wake()
        return self._copies.close(timeout_s)

    def _make(self, transfer: Transfer) -> None:
        self._ended.put(self._copy(transfer))
        self._unfinished.discard(transfer.ticket)

    def _copy(self, transfer: Transfer) -> Outcome:
        try:
            bad = self.memory.copy(transfer)
        except Exception as problem:  # the report of a broken copy must reach the scheduler, whatever broke
            return Outcome(transfer.ticket, f"{type(problem).__name__}: {problem}")
        return Outcome.of_check(transfer, bad)
