"""A simulated device with streams: deterministic, seeded, asynchronous, and a witness of every missing order.

Owns       streams (for compute and for copy engines), a clock, and their work; the host's knowledge.
Promises   the same seed and calls give the same run. A stream's work runs in its order and at its own pace, late and
           out of step with other streams. Copies read their source when they begin or only when they end, and by choice
           fail, tear or corrupt. Two operations on one block, one of them a write, need an order by events, streams or
           host knowledge. If there is none, ``missing_edges`` reports them even if the bytes came out right.
Does not   know which orders kvtier asks for: only which orders there are.

Order is kept as vector clocks (``order``). A stream inherits clocks from its waits, and from the host's knowledge at
the time of its work. The host learns from events that it has seen happen.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.engines.simulated import Faults, SimulatedCopy
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.testing.late import LateEngine, LateSubmission
from kvtier.testing.order import STREAMS, Clock, Ids, Witness, edge_between

LOST_S = 1e4
"""Duration of a copy that is meant never to end."""


@dataclass(eq=False, slots=True)
class Event:
    """A point in a stream."""

    clock: Clock
    done: bool = False


@dataclass(eq=False, slots=True)
class _Op:
    """Work, or with ``event`` a mark to set (``sets``) or to wait for."""

    event: Event | None = None
    sets: bool = False
    begin: Callable[[], None] | None = None
    end: Callable[[], None] | None = None
    seconds: float = 0.0
    ends_at_s: float = math.inf  # once begun
    copy: SimulatedCopy | None = None


@dataclass(eq=False)
class Stream:
    """One queue of work."""

    index: int
    name: str
    clock: Clock = field(default_factory=lambda: np.zeros(STREAMS, np.int64))
    queue: deque[_Op] = field(default_factory=deque)


class SimulatedDevice:
    """One device and its streams; pass ``device.engine`` as a cache's ``copy_engine``, launch forwards on it.

    ``look_s``: simulated seconds that each question of the host costs. With 0 time stands still until ``advance``,
    ``finish`` or ``synchronize``. ``forward_s``: the longest a forward takes. ``lag_s``: the most seconds by which
    copies reach the device late, as if threads of their own gave them to it. 0: at once.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        look_s: float = 1.0,
        forward_s: float = 4.0,
        lag_s: float = 0.0,
    ) -> None:
        self._random = random.Random(seed)
        self._faults = faults or Faults()
        self._look_s = look_s
        self._forward_s = forward_s
        self._now = 0.0
        self._late = LateSubmission(self, lag_s) if lag_s > 0.0 else None
        self._streams: list[Stream] = []
        self._host = np.zeros(STREAMS, np.int64)  # the host's knowledge
        self._witnesses: dict[str, Witness] = {}
        self.missing_edges: list[str] = []
        """Missing orders: "edge 4: store read -> next writer (store, then forward) on device group 0 block 3"."""
        self._compute = self._make_stream("forward")

    def engine(self, memory: TierMemory) -> StreamsEngine:
        """A copy engine on this device's streams; one cache a device."""
        self._witnesses = {
            tier: Witness(tier, memory, cells) for tier, cells in zip(("device", "host"), memory.num_cells, strict=True)
        }
        return StreamsEngine(memory, self) if self._late is None else LateEngine(memory, self, self._late)

    # --- for the engine that computes ---------------------------------------------------------------

    def launch(self, reads: tuple[Ids, Ids], writes: tuple[Ids, Ids], run: Callable[[], None]) -> Event:
        """A forward pass on the compute stream: ``run`` is called at some time, at once or later.

        ``reads`` and ``writes`` are (groups, blocks), int32. Returns an event after it, for ``synchronize``.
        """
        stream = self._compute
        self._begin_op(stream)
        self._touch(stream, "device", *writes, writes=True)
        self._touch(stream, "device", *reads, writes=False)
        early = self._random.random() < 0.5
        op = _Op(seconds=self._random.uniform(0.0, self._forward_s))
        if early:
            op.begin = run
        else:
            op.end = run
        stream.queue.append(op)
        return self.record(stream)

    def synchronize(self, event: Event) -> None:
        """The host waits until the event has happened, however long that takes."""
        self._settle()
        while not event.done:
            if not self._advance_to_next(math.inf):
                raise RuntimeError("the simulated device hangs: its streams wait for each other")
        self._learn(event)

    # --- the runtime of a copy engine -------------------------------------------------------------

    def compute_stream(self) -> Stream:
        return self._compute

    def new_stream(self, name: str) -> Stream:
        return self._make_stream(name)

    def record(self, stream: Stream) -> Event:
        self._inherit(stream, self._host)
        event = Event(stream.clock.copy())
        stream.queue.append(_Op(event, sets=True))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._inherit(stream, event.clock)
        stream.queue.append(_Op(event))

    def retire(self, event: Event) -> None:
        """Events are not used again here."""

    def is_done(self, event: Event) -> bool:
        self.look()
        if event.done:
            self._learn(event)
        return event.done

    def copy(self, stream: Stream, memory: TierMemory, transfer: Transfer) -> Callable[[], Outcome]:
        copy, outcomes = SimulatedCopy(memory, transfer, self._faults, self._random), list[Outcome]()
        seconds = LOST_S if copy.fate == "lose" else self._random.uniform(0.0, self._faults.max_delay_s)
        self._begin_op(stream)
        store = transfer.direction is Direction.STORE
        self._touch(stream, "device", transfer.groups, transfer.device, writes=not store)
        self._touch(stream, "host", transfer.groups, transfer.host, writes=store)
        end = lambda: outcomes.append(copy.end())  # noqa: E731
        stream.queue.append(_Op(begin=copy.begin, end=end, seconds=seconds, copy=copy))
        return lambda: outcomes[0]

    def move(self, memory: TierMemory, g: int, sources: Ids, targets: Ids) -> None:
        stream, groups = self._compute, np.full(len(sources), g, np.int32)
        self._begin_op(stream)
        self._touch(stream, "device", groups, sources, writes=False)
        self._touch(stream, "device", groups, targets, writes=True)
        moved = sources.copy(), targets.copy()
        stream.queue.append(_Op(begin=lambda: memory.move(g, *moved), seconds=0.0))

    def wipe(self, memory: TierMemory, groups: Ids, blocks: Ids) -> None:
        self._begin_op(self._compute)
        self._touch(self._compute, "device", groups, blocks, writes=True)
        self._compute.queue.append(_Op(begin=lambda: memory.wipe(groups, blocks), seconds=0.0))

    def sleep(self, heads: Callable[[], Sequence[Event]], timeout_s: float) -> bool:
        return self.pass_until(lambda: any(event.done for event in heads()), timeout_s)

    def wake(self) -> None:
        """No thread sleeps here."""

    def hurry(self, on: bool) -> None:
        """Copies are given at once in any case."""

    def now(self) -> float:
        return self._now

    def close(self, timeout_s: float) -> bool:
        self.advance(timeout_s)
        return not any(stream.queue for stream in self._streams)

    # --- for the driver of the simulation ---------------------------------------------------------

    def look(self) -> None:
        """The host asks a question, which takes a while."""
        self.advance(self._look_s)

    def advance(self, seconds: float) -> None:
        """Time passes."""
        end = self._now + seconds
        self._settle()
        while self._advance_to_next(end):
            pass
        self._now = max(self._now, end)

    def pass_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Time passes until ``ready``, but no more than ``timeout_s``; returns whether it is."""
        end = self._now + timeout_s
        self._settle()
        while not ready() and self._advance_to_next(end):
            pass
        if not ready():
            self._now = max(self._now, end)
        return ready()

    def draw(self, seconds: float) -> float:
        """Some time up to ``seconds``, by this device's seed."""
        return self._random.uniform(0.0, seconds)

    def known(self) -> Clock:
        """All that the host knows to have happened."""
        return self._host.copy()

    @contextmanager
    def knowing(self, clock: Clock) -> Iterator[None]:
        """The host acts with this knowledge only."""
        saved, self._host = self._host, clock
        try:
            yield
        finally:
            self._host = saved

    def under_way(self) -> list[SimulatedCopy]:
        """Copies that have not ended, the oldest of each stream first."""
        return [op.copy for stream in self._streams for op in stream.queue if op.copy is not None]

    def finish(self, ticket: int, fate: str | None = None) -> None:
        """Time passes until this copy has ended, and all work before it; ``fate`` replaces its own."""
        for stream in self._streams:
            for op in stream.queue:
                if op.copy is not None and op.copy.transfer.ticket == ticket:
                    op.copy.fate = fate or op.copy.fate
                    op.seconds, op.ends_at_s = 0.0, min(op.ends_at_s, self._now)
        self._settle()
        while any(copy.transfer.ticket == ticket for copy in self.under_way()):
            if not self._advance_to_next(math.inf):
                raise RuntimeError("the simulated device hangs: its streams wait for each other")

    def end_lost(self) -> None:
        """Copies that were meant never to end do so now, with an error."""
        for stream in self._streams:
            for op in stream.queue:
                if op.copy is not None and op.copy.fate == "lose":
                    op.copy.fate, op.seconds, op.ends_at_s = "fail", 0.0, min(op.ends_at_s, self._now)
        self._settle()

    # --- order ------------------------------------------------------------------------------------

    def _make_stream(self, name: str) -> Stream:
        if len(self._streams) == STREAMS:
            raise ValueError(f"a simulated device has at most {STREAMS} streams")
        self._streams.append(Stream(len(self._streams), name))
        return self._streams[-1]

    @staticmethod
    def _inherit(stream: Stream, clock: Clock) -> None:
        np.maximum(stream.clock, clock, out=stream.clock)

    def _learn(self, event: Event) -> None:
        np.maximum(self._host, event.clock, out=self._host)

    def _begin_op(self, stream: Stream) -> None:
        self._inherit(stream, self._host)
        stream.clock[stream.index] += 1

    def _touch(self, stream: Stream, tier: str, groups: Ids, blocks: Ids, writes: bool) -> None:
        if tier not in self._witnesses:
            return
        now = "write" if writes else "read"
        for first in self._witnesses[tier].touch(stream.index, stream.clock, groups, blocks, writes):
            before = self._streams[first.stream].name
            edge = edge_between((before, first.access), (stream.name, now))
            place = f"{tier} group {first.group} block {first.block}"
            self.missing_edges.append(f"{edge} ({before}, then {stream.name}) on {place}")

    # --- time -------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Runs everything that can happen now, streams in random order."""
        moved = True
        while moved:
            moved = self._late is not None and self._late.run_due(self._now)
            for stream in self._random.sample(self._streams, len(self._streams)):
                while stream.queue and self._step(stream.queue[0]):
                    stream.queue.popleft()
                    moved = True

    def _step(self, op: _Op) -> bool:
        """Lets the head of a stream go on; True if it is over."""
        if op.event is not None:
            if op.sets:
                op.event.done = True
            return op.event.done
        if math.isinf(op.ends_at_s):
            op.ends_at_s = self._now + op.seconds
            if op.begin is not None:
                op.begin()
        if op.ends_at_s > self._now:
            return False
        if op.end is not None:
            op.end()
        return True

    def _advance_to_next(self, limit_s: float) -> bool:
        """The next operation that runs ends, unless that is after ``limit_s`` or none runs."""
        ends = [s.queue[0].ends_at_s for s in self._streams if s.queue and s.queue[0].event is None]
        ends += self._late.next_s if self._late is not None else []
        if not ends or min(ends) > limit_s:
            return False
        self._now = max(self._now, min(ends))
        self._settle()
        return True
