"""``ThreadedBackend``: a ``Backend`` over a library that looks up, stores, reads and deletes one object a call.

Promises   whatever the library raises is an outcome with a reason.
Does not   own threads (``threads``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.remote.backends.contract import DAMAGED, After, Buffers, Outcome
from kvtier.remote.backends.threads import BackendThreads, Call, Failure, Rank, reason_of


class _ObjectCall(Call):
    """``run(k)`` does object k. ``absent``: what a ``FileNotFoundError`` means."""

    def __init__(self, ticket: int, count: int, deadline_s: float, run: Callable[[int], Outcome], absent: Outcome):
        super().__init__(ticket, count, deadline_s)
        self.run = run
        self.absent = absent


class ThreadedBackend(BackendThreads, ABC):
    """Base of backends: they say how one object is looked up, stored, read and deleted; these may block and raise."""

    # --- what a backend says ----------------------------------------------------------------------

    @abstractmethod
    def _exists(self, names: Sequence[str]) -> list[bool]:
        """Asks which objects are there."""

    @abstractmethod
    def _put(self, name: str, buffers: Buffers) -> None:
        """Stores an object. Raises ``Failure`` with REFUSED if the backend is full. Keeps no reference to buffers."""

    @abstractmethod
    def _get(self, name: str, buffers: Buffers, check: Callable[[int | None], None]) -> None:
        """Reads an object into ``buffers``, and then has it checked. Raises ``FileNotFoundError`` if there is none.

        ``check(total)`` raises ``Failure`` for an object that is not what it should be. ``total``: the sum of its
        words, if that was taken on the way.
        """

    @abstractmethod
    def _delete(self, name: str) -> None:
        """Forgets an object. Raises ``FileNotFoundError`` if there is none."""

    # --- the protocol -----------------------------------------------------------------------------

    def look(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        """See ``Backend``. One task for all names, so that a backend may ask in one go."""
        call = Call(ticket, len(names), deadline_s)

        def task() -> None:
            call.begin()
            try:
                self._in_time(call)
                there = self._exists(names)
                call.outcomes = [Outcome.OK if found else Outcome.MISS for found in there]
            except BaseException as problem:  # a panic of a library in Rust is no Exception
                call.reasons = dict.fromkeys(range(len(names)), reason_of(problem))
            self._tell(call.answer())

        self._submit(Rank.LOOK, call, [task])

    def put(
        self,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """See ``Backend``."""

        def run(k: int) -> Outcome:
            if before is not None:
                before(k)
            self._put(names[k], objects[k])
            return Outcome.OK

        self._spread_objects(Rank.PUT, _ObjectCall(ticket, len(names), deadline_s, run, Outcome.FAILED))

    def get(
        self,
        ticket: int,
        names: Sequence[str],
        objects: Sequence[Buffers],
        deadline_s: float,
        after: After | None = None,
    ) -> None:
        """See ``Backend``."""

        def run(k: int) -> Outcome:
            def check(total: int | None) -> None:
                wrong = "" if after is None else after(k, total)
                if wrong:
                    raise Failure(Outcome.FAILED, wrong)

            self._get(names[k], objects[k], check)
            return Outcome.OK

        self._spread_objects(Rank.GET, _ObjectCall(ticket, len(names), deadline_s, run, Outcome.MISS))

    def delete(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        """See ``Backend``."""

        def run(k: int) -> Outcome:
            self._delete(names[k])
            return Outcome.OK

        self._spread_objects(Rank.DELETE, _ObjectCall(ticket, len(names), deadline_s, run, Outcome.MISS))

    # --- on the threads ---------------------------------------------------------------------------

    def _spread_objects(self, rank: Rank, call: _ObjectCall) -> None:
        self._spread(rank, call, partial(self._one, call))

    def _one(self, call: _ObjectCall, k: int) -> None:
        outcome, reason = Outcome.FAILED, ""
        call.begin()
        try:
            self._in_time(call)
            outcome = call.run(k)
        except BaseException as problem:  # a panic of a library in Rust is no Exception
            if isinstance(problem, Failure):
                outcome = problem.outcome
            elif isinstance(problem, FileNotFoundError):
                outcome = call.absent
            reason = "" if outcome is Outcome.MISS else reason_of(problem)
        answer = call.ended(k, outcome, reason)
        if answer is not None:
            self._tell(answer)


def check_size(found: int, buffers: Buffers) -> None:
    """Raises ``Failure`` for an object of another length than the buffers have."""
    wanted = sum(len(piece) for piece in buffers)
    if found != wanted:
        raise Failure(Outcome.FAILED, f"{DAMAGED}: torn, or another object: it has {found:,} bytes, not {wanted:,}")
