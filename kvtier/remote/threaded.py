"""``ThreadedStore``: a ``BlockStore`` over a library whose calls block, on a few threads of its own.

Owns       the threads, and the answers that were not polled yet.
Promises   an exception of the library is an outcome with a reason. A call that begins after its deadline is not made.
           A call that hangs keeps its thread: with all threads hanging, the deadlines of the tier do the rest.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kvtier.remote.block_store import Answer, Buffers, Outcome

LATE = "the call's time was over before it began"


class _Call:
    def __init__(self, ticket: int, names: Sequence[str], until: float, run: Callable[[int], Outcome]) -> None:
        self.ticket = ticket
        self.names = names
        self.until = until
        self.run = run
        self.lock = threading.Lock()
        self.left = len(names)
        self.outcomes = [Outcome.FAILED] * len(names)
        self.reasons: dict[int, str] = {}
        self.begun_s = time.monotonic()


class Failure(Exception):
    """Raised by a backend's call for one object: its outcome and the reason."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class ThreadedStore(ABC):
    """Base of backends: they say how one object is looked up, stored, read and deleted; these may block and raise.

    A backend whose library takes batches overrides ``_exists``.
    """

    kind = ""

    def __init__(self, threads: int) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self._queue: SimpleQueue[tuple[_Call, int] | Callable[[], None] | None] = SimpleQueue()
        self._answers: deque[Answer] = deque()
        self._news = threading.Event()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-store-{k}", daemon=True) for k in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- what a backend says ----------------------------------------------------------------------

    @abstractmethod
    def _exists(self, names: Sequence[str]) -> list[bool]:
        """Which objects are there."""

    @abstractmethod
    def _put(self, name: str, buffers: Buffers) -> None:
        """Stores an object. Raises ``Failure`` with REFUSED if the store is full."""

    @abstractmethod
    def _get(self, name: str, buffers: Buffers) -> None:
        """Reads an object into ``buffers``. Raises ``FileNotFoundError`` if there is none."""

    @abstractmethod
    def _delete(self, name: str) -> None:
        """Forgets an object. Raises ``FileNotFoundError`` if there is none."""

    def _end(self) -> None:
        """Called once, when no thread runs any more."""

    # --- the protocol -----------------------------------------------------------------------------

    def register(self, memory: memoryview) -> None:
        """Nothing, unless a backend needs it."""

    def look(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        """See ``BlockStore``."""
        begun = time.monotonic()

        def look() -> None:
            outcomes, reasons = [Outcome.FAILED] * len(names), dict[int, str]()
            try:
                if time.monotonic() > begun + deadline_s:
                    raise TimeoutError(LATE)
                outcomes = [Outcome.OK if there else Outcome.MISS for there in self._exists(names)]
            except Exception as problem:
                reasons = dict.fromkeys(range(len(names)), _reason(problem))
            self._tell(Answer(ticket, tuple(outcomes), reasons, time.monotonic() - begun))

        self._queue.put(look)

    def put(
        self,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """See ``BlockStore``."""

        def run(k: int) -> Outcome:
            if before is not None:
                before(k)
            self._put(names[k], objects[k])
            return Outcome.OK

        self._spread(_Call(ticket, names, time.monotonic() + deadline_s, run))

    def get(
        self,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        after: Callable[[int], str] | None = None,
    ) -> None:
        """See ``BlockStore``."""

        def run(k: int) -> Outcome:
            self._get(names[k], objects[k])
            wrong = "" if after is None else after(k)
            if wrong:
                raise Failure(Outcome.FAILED, wrong)
            return Outcome.OK

        self._spread(_Call(ticket, names, time.monotonic() + deadline_s, run))

    def delete(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        """See ``BlockStore``."""

        def run(k: int) -> Outcome:
            self._delete(names[k])
            return Outcome.OK

        self._spread(_Call(ticket, names, time.monotonic() + deadline_s, run))

    def poll(self) -> list[Answer]:
        """See ``BlockStore``."""
        found = []
        self._news.clear()
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def wait(self, timeout_s: float) -> bool:
        """See ``BlockStore``."""
        self._news.wait(timeout_s)
        return bool(self._answers)

    def wake(self) -> None:
        """See ``BlockStore``."""
        self._news.set()

    def close(self, timeout_s: float) -> bool:
        """See ``BlockStore``."""
        if not self._is_closed:
            self._is_closed = True
            for _ in self._threads:
                self._queue.put(None)
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._threads:
            self._threads = []
            self._end()
        return True

    # --- the threads ------------------------------------------------------------------------------

    def _spread(self, call: _Call) -> None:
        """One task an object, so that the objects of one call are moved side by side."""
        if not call.names:
            self._tell(Answer(call.ticket, ()))
        for k in range(len(call.names)):
            self._queue.put((call, k))

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            if callable(task):
                task()
            else:
                self._one(*task)

    def _one(self, call: _Call, k: int) -> None:
        outcome, reason = Outcome.FAILED, ""
        try:
            if time.monotonic() > call.until:
                raise TimeoutError(LATE)
            outcome = call.run(k)
        except FileNotFoundError:
            outcome = Outcome.MISS
        except Failure as problem:
            outcome, reason = problem.outcome, str(problem)
        except Exception as problem:
            reason = _reason(problem)
        with call.lock:
            call.outcomes[k] = outcome
            if reason:
                call.reasons[k] = reason
            call.left -= 1
            if call.left:
                return
        self._tell(Answer(call.ticket, tuple(call.outcomes), call.reasons, time.monotonic() - call.begun_s))

    def _tell(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._news.set()
        self.on_news()


def _reason(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
