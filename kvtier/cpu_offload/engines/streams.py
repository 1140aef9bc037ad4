"""Copies on the streams of a device: one stream a direction, ordered behind and before the compute stream by events.

Owns       one store stream and one load stream, and which copies on them the host has not seen end.
Promises   the seven edges of the ordering contract, for any device that keeps ``StreamRuntime``'s word:

               1  last write -> store read      the store stream waits for the compute stream when a store is submitted
               2  last read  -> load write      the load stream waits for the compute stream when a load is submitted
               3  load write -> first read      the host has seen the load end before its request is scheduled
               4  store read -> next writer     ``order_after`` makes the compute stream wait for the store; a load that
                                                writes there is behind the compute stream by edge 2
               5, 6, 7  on one host block       the host has seen a copy end before it plans the next one there

           Loads never queue behind stores. The compute stream is put behind a copy only while that is young: one that
           has taken longer than ``YOUNG_S`` may never end, and is waited for by the host, up to its deadline.
Does not   know pools, keys or CUDA: the same code runs on a GPU and on ``kvtier.testing.SimulatedDevice``, where a
           wait that is missing here is reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.tier_memory import Ids, TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer

YOUNG_S = 1.0
"""A copy of a few MiB takes milliseconds; one that has taken this long is not trusted to end."""


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

    def move(self, memory: TierMemory, g: int, sources: Ids, targets: Ids) -> None:
        """Gives the compute stream a copy of group g's blocks on the device to others; ``memory.move`` does it."""

    def sleep(self, events: Sequence[Any], timeout_s: float) -> bool:
        """Until one of the events has happened (then True), somebody calls ``wake``, or the time is over.

        May return early; whoever needs an event asks again.
        """

    def wake(self) -> None:
        """Ends a ``sleep`` of another thread early."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def close(self, timeout_s: float) -> bool:
        """Waits for all streams; True if nothing runs any more."""


@dataclass(slots=True)
class _Copy:
    transfer: Transfer
    done: Any  # None: the device could not even say when it ends
    outcome: Callable[[], Outcome]
    begun_s: float


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
        done = None
        try:
            outcome: Callable[[], Outcome] = runtime.copy(stream, self._memory, transfer)
        except (
            Exception
        ) as problem:  # some of the copies may be under way: the failure counts once the stream is past it
            outcome = partial(Outcome, transfer.ticket, f"{type(problem).__name__}: {problem}")
        with suppress(Exception):  # without an event nobody knows the end: the deadline will have to do
            done = runtime.record(stream)
        self._under_way[transfer.direction].append(_Copy(transfer, done, outcome, runtime.now()))

    def poll(self) -> Sequence[Outcome]:
        ended: list[Outcome] = []
        for copies in self._under_way.values():
            while copies and copies[0].done is not None and self._runtime.is_done(copies[0].done):  # they end in order
                ended.append(copies.popleft().outcome())
        return ended

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        compute, end_s = self._runtime.compute_stream(), self._runtime.now() + timeout_s
        for copy in [c for copies in self._under_way.values() for c in copies if c.transfer.ticket in tickets]:
            if copy.done is not None and self._runtime.now() - copy.begun_s < YOUNG_S:
                self._runtime.wait(compute, copy.done)  # edge 4
            elif not self._see(copy.done, end_s):
                return False
        return True

    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        """Copies blocks of group g on the device to others, in the compute stream's order."""
        self._runtime.move(self._memory, g, sources, targets)

    def _see(self, done: Any, end_s: float) -> bool:
        """The host waits for an event; False if it has not happened by ``end_s``."""
        while done is None or not self._runtime.is_done(done):
            left_s = end_s - self._runtime.now()
            if left_s <= 0.0:
                return False
            self._runtime.sleep([] if done is None else [done], left_s)
        return True

    def wait(self, timeout_s: float) -> bool:
        first = [copies[0].done for copies in self._under_way.values() if copies]
        return self._runtime.sleep([done for done in first if done is not None], timeout_s)

    def wake(self) -> None:
        self._runtime.wake()

    def now(self) -> float:
        return self._runtime.now()

    def close(self, timeout_s: float) -> bool:
        self._closed = self._closed or self._runtime.close(timeout_s)
        return self._closed
