"""Calls whose objects move in batches: which objects go together, and what has become of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from kvtier.remote.block_store import Answer, Buffers, Outcome

Result = tuple[Outcome, str]
"""Of one object: the outcome, and why if it failed or was refused."""


class BatchedCall:
    """A call of some objects, whose batches end on different threads."""

    def __init__(self, ticket: int, count: int, deadline_s: float) -> None:
        self.ticket = ticket
        self.until = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._left = count
        self._results: list[Result] = [(Outcome.FAILED, "")] * count
        self._begun_s: float | None = None

    def begin(self) -> None:
        """A batch begins; the call's time counts from the first one."""
        with self._lock:
            if self._begun_s is None:
                self._begun_s = time.monotonic()

    def ended(self, part: Sequence[int], results: Sequence[Result]) -> Answer | None:
        """The results of a batch; the answer, if it was the last one."""
        with self._lock:
            for k, result in zip(part, results, strict=True):
                self._results[k] = result
            self._left -= len(part)
            return None if self._left else self.answer()

    def answer(self) -> Answer:
        """The end of the call."""
        seconds = 0.0 if self._begun_s is None else time.monotonic() - self._begun_s
        reasons = {k: reason for k, (_, reason) in enumerate(self._results) if reason}
        return Answer(self.ticket, tuple(outcome for outcome, _ in self._results), reasons, seconds)


def by_size(names: Sequence[str], objects: Sequence[Buffers], most_pieces: int, most_bytes: int) -> Iterator[list[int]]:
    """Batches, in order. No name is in one twice: libraries know the objects of a batch by their names.

    An object that is larger than a batch is a batch alone.
    """
    part: list[int] = []
    within = set[str]()
    pieces = size = 0
    for k, (name, buffers) in enumerate(zip(names, objects, strict=True)):
        pieces += len(buffers)
        size += sum(buffer.nbytes for buffer in buffers)
        if part and (pieces > most_pieces or size > most_bytes or name in within):
            yield part
            part, within = [], set()
            pieces, size = len(buffers), sum(buffer.nbytes for buffer in buffers)
        part.append(k)
        within.add(name)
    if part:
        yield part


def by_number(count: int, most: int) -> list[range]:
    """Batches of ``most`` objects."""
    return [range(begin, min(begin + most, count)) for begin in range(0, count, most)]
