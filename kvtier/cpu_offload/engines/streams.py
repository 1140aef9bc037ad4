"""Copies on the streams of a device: one stream a direction, ordered behind and before the compute stream by events.

Owns       one store stream and one load stream, and which copies on them the host has not seen end.
Promises   the seven edges of the ordering contract, for any device that keeps ``StreamRuntime``'s word:

               1  last write -> store read      ``submit`` marks the compute stream; the store stream waits for the mark
               2  last read  -> load write      ``submit`` marks the compute stream; the load stream waits for the mark
               3  load write -> first read      the host has seen the load end before its request is scheduled
               4  store read -> next writer     ``order_after`` makes the compute stream wait for the store; a load that
                                                writes there is behind the compute stream by edge 2
               5, 6, 7  on one host block       the host has seen a copy end before it plans the next one there

           Loads never queue behind stores. The compute stream is put behind a copy only while the copies' stream
           moves. A current copy older than ``YOUNG_S`` may be stuck. Then the host waits for it, up to the deadline,
           instead of queueing compute behind it.

           Another thread may give a copy to its stream later than ``submit`` (``Submission``). So ``submit`` itself
           marks the compute stream, at that moment and in the thread of this compute stream. A stream does not wait
           for an event that was not recorded yet. So ``order_after`` first waits until the copy has been given to its
           stream.
Does not   know pools, keys or CUDA: the same code runs on a GPU and on ``kvtier.testing.SimulatedDevice``. The
           simulated device reports a wait that is missing here.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.engines.submission import Inline, Submission
from kvtier.cpu_offload.tier_memory import Ids, TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.machine.errors import TransferError

YOUNG_S = 1.0
"""A copy of a few MiB takes milliseconds; one that has taken this long is not trusted to end."""


class StreamRuntime(Protocol):
    """A device with streams; streams and events are the runtime's own objects."""

    def compute_stream(self) -> Any:
        """The stream that the engine's forward passes run on."""

    def new_stream(self, name: str) -> Any:
        """A stream for copies."""

    def record(self, stream: Any) -> Any:
        """An event after all work that the stream has been given so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Later work of the stream comes after the event."""

    def retire(self, event: Any) -> None:
        """The event is needed no more: its waits have been enqueued, or the host has seen it."""

    def is_done(self, event: Any) -> bool:
        """Whether the event has happened; if so, the host sees the effects of all work before it. Never waits."""

    def copy(self, stream: Any, memory: TierMemory, transfer: Transfer) -> Callable[[], Outcome]:
        """Gives the stream the copies of ``transfer``. The result gives their outcome, once they have ended."""

    def move(self, memory: TierMemory, g: int, sources: Ids, targets: Ids) -> None:
        """Gives the compute stream a copy of group g's blocks on the device to other blocks; ``memory.move`` does
        it."""

    def wipe(self, memory: TierMemory, groups: Ids, blocks: Ids) -> None:
        """Gives the compute stream zeros for blocks on the device; ``memory.wipe`` does it."""

    def sleep(self, heads: Callable[[], Sequence[Any]], timeout_s: float) -> bool:
        """Until one of the events has happened (then True), ``wake`` is called, or the time is over.

        ``heads`` returns the events; there may be more of them later. May return early: a caller that needs an event
        asks again.
        """

    def wake(self) -> None:
        """Ends a ``sleep`` of another thread early."""

    def hurry(self, on: bool) -> None:
        """While it is on, ``copy`` gives its stream everything at once: somebody waits until it has."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""

    def close(self, timeout_s: float) -> bool:
        """Waits for all streams; True if nothing runs any more."""


class _Stage(Enum):
    """The host's progress with a copy."""

    PUT = "its stream has not been given it yet"
    GIVEN = "its stream has it, and an event behind it"
    BLIND = "its stream may have it, but the device could not even say when it ends"


@dataclass(slots=True, eq=False)
class _Copy:
    transfer: Transfer
    stage: _Stage = _Stage.PUT
    done: Any = None  # the event behind it, once it is given
    outcome: Callable[[], Outcome] | None = None
    begun_s: float = 0.0  # when it was given

    def is_given(self) -> bool:
        return self.stage is not _Stage.PUT


@dataclass(slots=True)
class _Lane:
    """Copies of one direction that were not seen to end, in order: the stream makes one copy after the other."""

    copies: deque[_Copy] = field(default_factory=deque)
    looked_s: float = -math.inf  # the host's last look at it
    since_s: float = -math.inf  # the first copy has begun no earlier: the copy before it had not ended then

    def is_moving(self, now: float) -> bool:
        """Whether the stream's current copy began less than ``YOUNG_S`` ago."""
        return now - max(self.copies[0].begun_s, self.since_s) < YOUNG_S


P = ParamSpec("P")
R = TypeVar("R")


def _uses_streams(method: Callable[Concatenate[StreamsEngine, P], R]) -> Callable[Concatenate[StreamsEngine, P], R]:
    """One call at a time: ``close`` may come from another thread."""

    @wraps(method)
    def call(self: StreamsEngine, /, *args: P.args, **options: P.kwargs) -> R:
        with self._gate:
            return method(self, *args, **options)

    return call


class StreamsEngine(CopyEngine):
    """A copy engine over a ``StreamRuntime``; see ``kvtier.cpu_offload.engines`` for the protocol."""

    def __init__(self, memory: TierMemory, runtime: StreamRuntime, submission: Submission | None = None) -> None:
        super().__init__(memory)
        self._runtime = runtime
        self._submission: Submission = submission or Inline()
        self._streams = {direction: runtime.new_stream(direction.value) for direction in Direction}
        self._lanes = {direction: _Lane() for direction in Direction}
        self._under_way: dict[int, _Copy] = {}  # by ticket
        self._ended: list[_Copy] = []  # not reported yet
        self._gate = threading.Lock()
        self._closing = self._closed = False

    @property
    def runtime(self) -> StreamRuntime:
        """The device."""
        return self._runtime

    @_uses_streams
    def submit(self, transfer: Transfer) -> None:
        if self._closing:
            raise TransferError("the copy engine is closed")
        copy = _Copy(transfer)
        mark = self._runtime.record(self._runtime.compute_stream())  # edges 1 and 2: here and now
        self._submission.put(transfer.direction, partial(self._give, copy, mark))
        self._lanes[transfer.direction].copies.append(copy)
        self._under_way[transfer.ticket] = copy

    def _give(self, copy: _Copy, mark: Any) -> None:
        """Gives a copy to its stream, behind ``mark``. It may run on a thread of its own, so it must not raise."""
        runtime, stream, stage = self._runtime, self._streams[copy.transfer.direction], _Stage.BLIND
        try:
            runtime.wait(stream, mark)  # edges 1 and 2
            copy.outcome = runtime.copy(stream, self.memory, copy.transfer)
        except Exception as problem:  # some of it may be under way: the failure counts once the stream is past it
            copy.outcome = partial(Outcome, copy.transfer.ticket, f"{type(problem).__name__}: {problem}")
        with suppress(Exception):  # without an event the end is unknown: ``_events`` asks for an event again
            copy.done, stage = runtime.record(stream), _Stage.GIVEN
            runtime.retire(mark)
        copy.begun_s = runtime.now()
        copy.stage = stage  # last: a thread that sees this sees the rest

    @_uses_streams
    def poll(self) -> Sequence[Outcome]:
        if self._closed:  # its events are no more
            return []
        for lane in self._lanes.values():
            self._look(lane)
        ended, self._ended = self._ended, []
        return [self._report(copy) for copy in ended]

    def _look(self, lane: _Lane) -> None:
        """Takes ended copies off a lane; they end in order."""
        now, moved = self._runtime.now(), False
        while lane.copies and self._has_ended(lane.copies[0]):
            copy, moved = lane.copies.popleft(), True
            del self._under_way[copy.transfer.ticket]
            self._ended.append(copy)
        if moved:
            lane.since_s = lane.looked_s
        lane.looked_s = now

    def _report(self, copy: _Copy) -> Outcome:
        assert copy.outcome is not None
        outcome = copy.outcome()
        self._runtime.retire(copy.done)
        return outcome

    def _events(self, copies: Sequence[_Copy]) -> list[Any]:
        """The events behind the copies among ``copies`` that their streams have been given."""
        for copy in copies:
            if copy.stage is _Stage.BLIND:
                with suppress(Exception):  # behind later copies as well: late, but not wrong
                    copy.done = self._runtime.record(self._streams[copy.transfer.direction])
                    copy.stage = _Stage.GIVEN
        return [copy.done for copy in copies if copy.stage is _Stage.GIVEN]

    def _has_ended(self, copy: _Copy) -> bool:
        return any(self._runtime.is_done(event) for event in self._events([copy]))

    @_uses_streams
    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        if self._closed:
            return True
        compute, end_s = self._runtime.compute_stream(), self._runtime.now() + timeout_s
        for copy in [self._under_way[ticket] for ticket in tickets if ticket in self._under_way]:
            if not self._is_given(copy, end_s - self._runtime.now()):
                return False
            lane = self._lanes[copy.transfer.direction]
            self._look(lane)
            if copy.transfer.ticket not in self._under_way:
                continue  # the host has seen it end
            if copy.stage is _Stage.GIVEN and lane.is_moving(self._runtime.now()):
                self._runtime.wait(compute, copy.done)  # edge 4
            elif not self._see(copy, end_s):
                return False
        return True

    def _is_given(self, copy: _Copy, timeout_s: float) -> bool:
        """Waits until the copy has been given to its stream; False if it was not in time, or once ``close`` is
        called."""
        if copy.is_given():
            return True
        self._runtime.hurry(True)
        try:
            self._submission.wait_for(lambda: copy.is_given() or self._closing, timeout_s)
        finally:
            self._runtime.hurry(self._closing)
        return copy.is_given()

    @_uses_streams
    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        """Copies blocks of group g on the device to other blocks, in the compute stream's order."""
        self._runtime.move(self.memory, g, sources, targets)

    @_uses_streams
    def wipe(self, groups: Ids, blocks: Ids) -> None:
        """Zeros on the compute stream: behind the load that the host has seen end, and before all that comes later."""
        self._runtime.wipe(self.memory, groups, blocks)

    def _see(self, copy: _Copy, end_s: float) -> bool:
        """The host waits for a copy's end; False if it has not happened by ``end_s``, or ``close`` is called first."""
        while not self._has_ended(copy):
            left_s = end_s - self._runtime.now()
            if left_s <= 0.0 or self._closing:
                return False
            self._runtime.sleep(lambda: self._events([copy]), left_s)
        return True

    @_uses_streams
    def quiesce(self, timeout_s: float) -> bool:
        """Waits until every copy has ended, as graph captures demand; ``poll`` still reports them."""
        if self._closed:
            return True
        end_s = self._runtime.now() + timeout_s
        return all(self._see(copy, end_s) for copy in self._under_way.values())

    @_uses_streams
    def wait(self, timeout_s: float) -> bool:
        return bool(self._ended) or (not self._closed and self._runtime.sleep(self._heads, timeout_s))

    def _heads(self) -> list[Any]:
        """The events that will happen first, of copies that have been given to their streams."""
        return self._events([lane.copies[0] for lane in self._lanes.values() if lane.copies])

    def wake(self) -> None:
        self._runtime.wake()

    def now(self) -> float:
        return self._runtime.now()

    def close(self, timeout_s: float) -> bool:
        end_s = self._runtime.now() + timeout_s
        self._closing = True  # nothing is submitted from now on, and every wait for a copy ends
        self._runtime.hurry(True)
        self._submission.wake()
        self._runtime.wake()
        is_ours = False
        try:
            is_ours = self._gate.acquire(timeout=timeout_s)
            if is_ours and not self._closed:
                self._stop(end_s)
        finally:
            if is_ours:
                self._gate.release()
        return self._closed

    def _stop(self, end_s: float) -> None:
        if self._submission.close(max(0.0, end_s - self._runtime.now())):
            self._closed = self._runtime.close(max(0.0, end_s - self._runtime.now()))
