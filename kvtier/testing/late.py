"""A submission thread that is always late, on a simulated device's clock: deterministic and seeded.

Owns       the copies that the simulated device has not been given yet, and their times.
Promises   jobs of a direction run in their order, up to ``lag_s`` seconds late, while time passes or a thread waits for
           them. A job knows only the host's knowledge at its ``put``: another thread would not know more either. A poll
           passes time also while no copy has an event yet to ask for. So a host that only polls gets to the end.
Does not   run threads: ``kvtier.cpu_offload.engines.submission.SubmissionThreads`` does, on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.engines.streams import StreamRuntime, StreamsEngine
from kvtier.cpu_offload.engines.submission import Job
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction
from kvtier.testing.order import Clock


class LaggingDevice(StreamRuntime, Protocol):
    """A ``SimulatedDevice``, for its late submission."""

    def draw(self, seconds: float) -> float:
        """Some time up to ``seconds``."""

    def known(self) -> Clock:
        """All that the host knows to have happened."""

    def knowing(self, clock: Clock) -> AbstractContextManager[None]:
        """The host acts with this knowledge only."""

    def pass_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Time passes until ``ready``, but no more than ``timeout_s``; returns whether it is."""

    def look(self) -> None:
        """The host asks a question, which takes a while."""


@dataclass(slots=True)
class _Late:
    job: Job
    due_s: float
    known: Clock


class LateSubmission:
    """The submission of a ``SimulatedDevice`` with ``lag_s``."""

    def __init__(self, device: LaggingDevice, lag_s: float) -> None:
        self._device = device
        self._lag_s = lag_s
        self._queues: dict[Direction, deque[_Late]] = {direction: deque() for direction in Direction}

    def put(self, direction: Direction, job: Job) -> None:
        queue, device = self._queues[direction], self._device
        due_s = device.now() + device.draw(self._lag_s)
        queue.append(_Late(job, max(due_s, queue[-1].due_s if queue else due_s), device.known()))

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        return self._device.pass_until(ready, timeout_s)

    def wake(self) -> None: ...

    def close(self, timeout_s: float) -> bool:
        for queue in self._queues.values():
            queue.clear()
        return True

    @property
    def next_s(self) -> list[float]:
        """When the next jobs are due."""
        return [queue[0].due_s for queue in self._queues.values() if queue]

    def run_due(self, now_s: float) -> bool:
        """Runs the jobs whose time has come; returns whether there were any."""
        ran = False
        for queue in self._queues.values():
            while queue and queue[0].due_s <= now_s:
                late = queue.popleft()
                with self._device.knowing(late.known):
                    late.job()
                ran = True
        return ran


class LateEngine(StreamsEngine):
    """The copy engine of a ``SimulatedDevice`` with ``lag_s``."""

    def __init__(self, memory: TierMemory, device: LaggingDevice, late: LateSubmission) -> None:
        super().__init__(memory, device, late)
        self._device = device
        self._late = late

    def poll(self) -> Sequence[Outcome]:
        if self._late.next_s:
            self._device.look()
        return super().poll()
