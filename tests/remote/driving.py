"""A ``Backend`` with memory, driven call by call."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

from patience import PATIENCE_S

from kvtier.remote.backends.contract import Answer, Backend, Outcome
from kvtier.remote.envelope import TRAILER_BYTES, Envelope
from kvtier.remote.names import object_name

OK, MISS, FAILED, REFUSED = Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.REFUSED
NAMESPACE = bytes(range(16))
ARENA_BYTES = 4 << 20


def key(i: int) -> bytes:
    """Keys lie in different fan-out folders, as real ones do."""
    return bytes([i % 256]) + i.to_bytes(15, "big")


def name(i: int, kind: str = "t") -> str:
    return object_name(NAMESPACE, kind, key(i))


def pattern(i: int, num_bytes: int) -> bytes:
    return random.Random(i).randbytes(num_bytes)


class Driver:
    """``memory``: registered, as the tier's arena would be. Calls wait for their answer."""

    def __init__(self, store: Backend) -> None:
        self.store = store
        self.memory = memoryview(bytearray(ARENA_BYTES))
        store.register(self.memory)
        self._tickets = itertools.count()
        self._early: dict[int, Answer] = {}
        self._at = 0

    def room(self, *sizes: int) -> list[memoryview]:
        """Buffers of an object: pieces of the registered memory."""
        found = []
        for size in sizes:
            if self._at + size > len(self.memory):
                self._at = 0
            found.append(self.memory[self._at : self._at + size])
            self._at += -(-size // 16) * 16
        return found

    def filled(self, i: int, *sizes: int) -> list[memoryview]:
        """Buffers with the pattern of object i."""
        found = self.room(*sizes)
        for k, piece in enumerate(found):
            piece[:] = pattern(1000 * i + k, len(piece))
        return found

    def send(
        self, what: str, names: Sequence[str], *arguments: object, within_s: float = PATIENCE_S, **more: object
    ) -> int:
        ticket = next(self._tickets)
        getattr(self.store, what)(ticket, names, *arguments, within_s, **more)
        return ticket

    def answer(self, ticket: int) -> Answer:
        """The end of a call; others that end meanwhile are kept."""
        until = time.monotonic() + PATIENCE_S
        while ticket not in self._early:
            assert time.monotonic() < until, f"no answer to call {ticket}"
            self.store.wait(PATIENCE_S)  # it may end for news that the last poll has told already
            for answer in self.store.poll():
                assert answer.ticket not in self._early
                self._early[answer.ticket] = answer
        return self._early.pop(ticket)

    def call(self, what: str, names: Sequence[str], *arguments: object, **more: object) -> Answer:
        return self.answer(self.send(what, names, *arguments, **more))

    def outcomes(self, what: str, names: Sequence[str], *arguments: object, **more: object) -> list[Outcome]:
        return list(self.call(what, names, *arguments, **more).outcomes)

    # --- whole objects, sealed and checked

    def put_sealed(
        self, numbers: Sequence[int], sizes: Sequence[int] = (4096, 512), envelope: Envelope | None = None
    ) -> Answer:
        objects = [[*self.filled(i, *sizes), memoryview(bytearray(TRAILER_BYTES))] for i in numbers]
        sealer = envelope or Envelope(NAMESPACE)

        def before(k: int) -> None:
            sealer.seal(key(numbers[k]), "t", objects[k][:-1], objects[k][-1])

        return self.call("put", [name(i) for i in numbers], objects, before=before)

    def get_checked(
        self, numbers: Sequence[int], sizes: Sequence[int] = (4096, 512), envelope: Envelope | None = None
    ) -> Answer:
        """Also asserts that what passes the check is what was stored."""
        objects = [[*self.room(*sizes), memoryview(bytearray(TRAILER_BYTES))] for _ in numbers]
        checker = envelope or Envelope(NAMESPACE)

        def after(k: int, total: int | None) -> str:
            return checker.check(key(numbers[k]), "t", objects[k][:-1], objects[k][-1], total=total)

        answer = self.call("get", [name(i) for i in numbers], objects, after=after)
        for i, outcome, pieces in zip(numbers, answer.outcomes, objects, strict=True):
            if outcome is OK:
                assert [bytes(piece) for piece in pieces[:-1]] == [
                    pattern(1000 * i + k, n) for k, n in enumerate(sizes)
                ]
        return answer


Opens = Callable[[str], Driver]
