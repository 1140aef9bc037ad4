"""Copies on the streams of a device: one stream a direction, ordered behind and before the compute stream by events.

Owns       one store stream and one load stream, and which copies on them the host has not seen end.
Promises   the seven edges of the ordering contract, for any device that keeps ``StreamRuntime``'s word:

               1  last write -> store read      the store stream waits for the compute stream when a store is submitted
               2  last read  -> load write      the load stream waits for the compute stream when a load is submitted
               3  load write -> first read      the host has seen the load end before its request is scheduled
               4  store read -> next writer     ``order_after`` makes the compute stream wait for the store; a load that
                                                writes there is behind the compute stream by edge 2
               5, 6, 7  on one host block       the host has seen a copy end before it plans the next one there

           Loads never queue behind stores.
Does not   know pools, keys or CUDA: the same code runs on a GPU and on ``kvtier.testing.SimulatedDevice``, where a
           wait that is missing here is reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer


class StreamRuntime(Protocol):
    """What a device with streams does; streams and events are the runtime's own objects."""

    def compute_stream(self) -> Any:
        """The stream that the engine's forward passes run on."""

    def new_stream(self, name: str) -> Any:
        """A stream for copies."""

    def record(self, stream: Any) -> Any:
        """An event after everything that the stream has been given so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from now on comes after the event."""

    def is_done(self, event: Any) -> bool:
        """Whether the event has happened; if so, the host sees the effects of all that came before it. Never waits."""

    def copy(self, stream: Any, memory: TierMemory, transfer: Transfer) -> Callable[[], Outcome]:
        """Gives the stream the copies of ``transfer``; what is returned tells how they ended, once they have."""

    def sleep(self, events: Sequence[Any], timeout_s: float) -> bool:
        """Until one of the events has happened (then True), somebody calls ``wake``, or the time is over."""

    def wake(self) -> None:
        """Ends a ``sleep`` of another thread early."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def close(self, timeout_s: float) -> bool:
        """Waits for all streams; True if nothing runs any more."""


@dataclass(slots=True)
class _Copy:
    transfer: Transfer
    done: Any
    outcome: Callable[[], Outcome]


class StreamsEngine:
    """A copy engine over a ``StreamRuntime``; see ``kvtier.cpu_offload.engines`` for the protocol."""

    def __init__(self, memory: TierMemory, runtime: StreamRuntime) -> None:
        self._memory = memory
        self._runtime = runtime
        self._streams = {direction: runtime.new_stream(direction.value) for direction in Direction}
        self._under_way: dict[Direction, deque[_Copy]] = {direction: deque() for direction in Direction}
        self._closed = False

    @property
    def runtime(self) -> StreamRuntime:
        """The device."""
        return self._runtime

    def submit(self, transfer: Transfer) -> None:
        runtime, stream = self._runtime, self._streams[transfer.direction]
        runtime.wait(stream, runtime.record(runtime.compute_stream()))  # edges 1 and 2
        outcome = runtime.copy(stream, self._memory, transfer)
        self._under_way[transfer.direction].append(_Copy(transfer, runtime.record(stream), outcome))

    def poll(self) -> Sequence[Outcome]:
        ended: list[Outcome] = []
        for copies in self._under_way.values():
            while copies and self._runtime.is_done(copies[0].done):  # a stream's copies end in order
                ended.append(copies.popleft().outcome())
        return ended

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        compute = self._runtime.compute_stream()
        for copies in self._under_way.values():
            for copy in copies:
                if copy.transfer.ticket in tickets:
                    self._runtime.wait(compute, copy.done)  # edge 4
        return True

    def wait(self, timeout_s: float) -> bool:
        return self._runtime.sleep([copies[0].done for copies in self._under_way.values() if copies], timeout_s)

    def wake(self) -> None:
        self._runtime.wake()

    def now(self) -> float:
        return self._runtime.now()

    def close(self, timeout_s: float) -> bool:
        self._closed = self._closed or self._runtime.close(timeout_s)
        return self._closed
