"""Who gives a device its copies, or makes them: the scheduling thread itself, or a thread a direction beside it.

Owns       the copies that are planned and not begun yet.
Promises   jobs of one direction run in the order in which they were put, each once, unless ``close`` comes first; jobs
           of the two directions do not wait for each other, so a load is never submitted behind stores.
Does not   know copies, streams or events: a job is a function that never raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kvtier.cpu_offload.transfer import Direction

Job = Callable[[], None]

END_S = 1.0
"""For a thread that waits for jobs to end; it does so at once."""


class Submission(Protocol):
    """When jobs run; see the module's docstring."""

    def put(self, direction: Direction, job: Job) -> None:
        """``job`` will run, now or soon, behind those of its direction that were put before."""

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Until ``ready``, which a job makes true, is true; False if that takes longer than ``timeout_s`` seconds."""

    def wake(self) -> None:
        """Whoever is in ``wait_for`` asks again whether it is ready, for something else has made it so."""

    def close(self, timeout_s: float) -> bool:
        """Forgets the jobs that have not begun; True if none runs any more. Calling it again does nothing."""


class Inline:
    """Runs every job where it is put."""

    def put(self, direction: Direction, job: Job) -> None:
        job()

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        return ready()

    def wake(self) -> None: ...

    def close(self, timeout_s: float) -> bool:
        return True


class SubmissionThreads:
    """One thread a direction. ``on_start`` runs first in each of them (on CUDA: it chooses the device).

    Raises what ``on_start`` raises; then no thread is left.
    """

    def __init__(self, on_start: Job = lambda: None) -> None:
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[Job]] = {direction: deque() for direction in Direction}
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
        with self._changed:
            if not self._closing:
                self._queues[direction].append(job)
                self._changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        if ready():
            return True
        with self._changed:
            return self._changed.wait_for(ready, max(0.0, timeout_s))

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        with self._changed:
            self._closing = True
            for queue in self._queues.values():
                queue.clear()
            self._changed.notify_all()
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
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or queue)
                if not queue:
                    return
                job = queue.popleft()
            job()
            del job  # it holds on to a transfer, and to whoever closes this
            with self._changed:
                self._changed.notify_all()
