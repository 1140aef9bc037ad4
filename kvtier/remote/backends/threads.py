"""``BackendThreads``: the threads of a ``Backend`` whose library's calls block.

Owns       the threads, the calls that wait for one, and the answers that were not polled yet.
Promises   looks go first, then reads, then the rest. A call that begins after its deadline is not made. A call that
           hangs keeps its thread: with all threads hanging, the deadlines of the tier do the rest. In a forked child,
           which has no threads, every call ends as FAILED, and nothing of the backend is touched.
Does not   know what a call does.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from queue import PriorityQueue

from kvtier.machine.forks import of_another_process, watch
from kvtier.machine.kept import KEPT
from kvtier.remote.backends.contract import Answer, Outcome

LATE = "the call's time was over before it began"
LONGEST = 200
"""Characters of a reason."""
_REQUEST = re.compile(r".*?Error performing [A-Z]+ \S+ in .*? - ", re.DOTALL)
"""What obstore says of a request, before what became of it. Of the whole address the object's name is of use alone,
which is known."""
_ANSWER = re.compile(r"<.*?<Code>(\w+)</Code>.*", re.DOTALL)
"""A bucket's answer, in XML."""
CLOSED = "the backend is closed"


class Rank(IntEnum):
    """The order in which a free thread takes waiting calls."""

    LOOK = 0
    GET = 1
    PUT = 2
    DELETE = 3
    STOP = 4


class Failure(Exception):
    """Raised by a backend's call for one object: its outcome and the reason."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Call:
    """One call, and what has become of its objects so far."""

    def __init__(self, ticket: int, count: int, deadline_s: float):
        self.ticket = ticket
        self.until = time.monotonic() + deadline_s
        self.lock = threading.Lock()
        self.left = count
        self.outcomes = [Outcome.FAILED] * count
        self.reasons: dict[int, str] = {}
        self.begun_s: float | None = None

    def begin(self) -> None:
        """The first object's time begins."""
        with self.lock:
            if self.begun_s is None:
                self.begun_s = time.monotonic()

    def ended(self, k: int, outcome: Outcome, reason: str) -> Answer | None:
        """Object k has ended; the answer, if it was the last one."""
        with self.lock:
            self.outcomes[k] = outcome
            if reason:
                self.reasons[k] = reason
            self.left -= 1
            if self.left:
                return None
        return self.answer()

    def answer(self) -> Answer:
        """The end of the call."""
        seconds = 0.0 if self.begun_s is None else time.monotonic() - self.begun_s
        return Answer(self.ticket, tuple(self.outcomes), self.reasons, seconds)


class BackendThreads:
    """Base of backends, which give it tasks (``_submit``) that end in answers (``_tell``)."""

    kind = ""

    def __init__(self, threads: int) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self._queue: PriorityQueue[tuple[Rank, int, Callable[[], None]]] = PriorityQueue()
        self._turns = itertools.count()
        self._answers: deque[Answer] = deque()
        self._news = threading.Event()
        self._is_closed = False
        self._why = CLOSED
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-remote-{k}", daemon=True) for k in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        watch(self)

    def on_fork(self) -> None:
        """The backend's files and connections are the parent's; other threads may have had the locks."""
        self._is_closed, self._why, self._threads = True, of_another_process("this backend"), []
        self._queue, self._news = PriorityQueue(), threading.Event()
        KEPT.append(self)

    def _end(self) -> None:
        """Called once, when no thread runs any more."""

    # --- the protocol -----------------------------------------------------------------------------

    def register(self, memory: memoryview) -> None:
        """Nothing, unless a backend needs it."""

    def poll(self) -> list[Answer]:
        """See ``Backend``."""
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def wait(self, timeout_s: float) -> bool:
        """See ``Backend``."""
        if not self._answers:
            self._news.wait(timeout_s)
        self._news.clear()  # an answer that comes after this sets it again, one from before is seen below
        return bool(self._answers)

    def wake(self) -> None:
        """See ``Backend``."""
        self._news.set()

    def close(self, timeout_s: float) -> bool:
        """See ``Backend``. What no thread has begun ends as FAILED."""
        if not self._is_closed:
            self._is_closed = True
            for _ in self._threads:
                self._queue.put((Rank.STOP, next(self._turns), lambda: None))
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

    def _submit(self, rank: Rank, call: Call, tasks: Sequence[Callable[[], None]]) -> None:
        if self._is_closed:
            call.reasons = dict.fromkeys(range(len(call.outcomes)), self._why)
        if self._is_closed or not call.outcomes:
            self._tell(call.answer())
            return
        for task in tasks:
            self._queue.put((rank, next(self._turns), task))

    def _spread(self, rank: Rank, call: Call, run: Callable[[int], None]) -> None:
        """``run(k)`` for each object of the call, on all threads. Each turns to more urgent calls in between."""
        left = iter(range(len(call.outcomes)))

        def task(turn: int) -> None:
            k = next(left, None)
            if k is not None:
                run(k)
                self._queue.put((rank, turn, partial(task, turn)))

        turns = [next(self._turns) for _ in range(min(len(self._threads), len(call.outcomes)))]
        self._submit(rank, call, [partial(task, turn) for turn in turns])

    def _work(self) -> None:
        while True:
            rank, _, task = self._queue.get()
            if rank is Rank.STOP:
                return
            task()

    def _in_time(self, call: Call) -> None:
        """Raises ``Failure`` for a call that must not begin any more."""
        if self._is_closed:
            raise Failure(Outcome.FAILED, CLOSED)
        if time.monotonic() > call.until:
            raise Failure(Outcome.FAILED, LATE)

    def _tell(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._news.set()
        self.on_news()


def reason_of(problem: BaseException) -> str:
    """One line for people."""
    text = str(problem).partition("\n\n")[0]  # what some libraries add below is for their own developers
    text = _ANSWER.sub(r"\1", _REQUEST.sub("", text, count=1))
    line = " ".join(text.split())[:LONGEST]
    return line if isinstance(problem, Failure) else f"{type(problem).__name__}: {line}"
