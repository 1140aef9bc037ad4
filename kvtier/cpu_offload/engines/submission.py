"""Which thread gives a device its copies, or makes them: the scheduling thread itself, or one thread a direction.

Owns       the copies that are planned and not begun yet.
Promises   jobs of one direction run in their order, each once, unless ``close`` comes first. Jobs of the two directions
           do not wait for each other, so a load is never submitted behind stores.
Does not   know copies, streams or events: a job is a function that never raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

from kvtier.cpu_offload.transfer import Direction
from kvtier.machine.wakeup import Wakeup

Job = Callable[[], None]

END_S = 1.0
"""Wait for a thread that only waits for jobs; it ends at once."""


class Submission(Protocol):
    """When jobs run; see the module's docstring."""

    def put(self, direction: Direction, job: Job) -> None:
        """``job`` will run, now or soon, behind earlier jobs of its direction."""

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Until ``ready``, which a job makes true, is true; False if it takes longer than ``timeout_s`` seconds."""

    def wake(self) -> None:
        """A thread in ``wait_for`` asks ``ready`` again, since it may be true without a job."""

    def close(self, timeout_s: float) -> bool:
        """Forgets the jobs that have not begun; True if none runs any more. Calling it again does nothing."""


class Inline:
    """Runs every job at once, in the caller's thread."""

    def put(self, direction: Direction, job: Job) -> None:
        job()

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        return ready()

    def wake(self) -> None: ...

    def close(self, timeout_s: float) -> bool:
        return True


class SubmissionThreads:
    """One thread a direction. ``on_start`` runs first in each of them (on CUDA: it chooses the device).

    There is no lock: ``wake`` may come in the middle of any other call of the same thread; see ``Wakeup``.

    Raises what ``on_start`` raises; then no thread is left.
    """

    def __init__(self, on_start: Job = lambda: None) -> None:
        self._queues: dict[Direction, SimpleQueue[Job | None]] = {direction: SimpleQueue() for direction in Direction}
        self._ran = Wakeup()  # a job has run, or ``wake`` was called
        self._closing = False
        started = {direction: Future[None]() for direction in Direction}
        self._threads = [
            threading.Thread(target=self._run, args=(d, on_start, begun), name=f"kvtier-{d.value}", daemon=True)
            for d, begun in started.items()
        ]
        try:
            for thread in self._threads:
                thread.start()
            for begun in started.values():
                begun.result()
        except BaseException:
            self.close(END_S)
            raise

    def put(self, direction: Direction, job: Job) -> None:
        self._queues[direction].put(job)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not ready():
            self._ran.clear()
            if not ready() and not self._ran.wait(end - time.monotonic()):
                return ready()
        return True

    def wake(self) -> None:
        self._ran.set()

    def close(self, timeout_s: float) -> bool:
        self._closing = True
        for queue in self._queues.values():
            queue.put(None)  # else its thread would wait for a job
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, direction: Direction, on_start: Job, begun: Future[None]) -> None:
        try:
            on_start()
        except BaseException as problem:
            begun.set_exception(problem)
            return
        begun.set_result(None)
        queue = self._queues[direction]
        while (job := queue.get()) is not None and not self._closing:
            job()
            del job  # it holds on to a transfer, and to the owner of this object
            self._ran.set()
