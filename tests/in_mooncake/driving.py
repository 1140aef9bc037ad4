"""A store, called as the tier calls it, but one call at a time; the bytes of an object follow from its name."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from remote.mooncake_cluster import HOST, PORT

from kvtier.remote.backends.contract import Answer, Outcome
from kvtier.remote.backends.mooncake import MooncakeBackend

OK, MISS, FAILED, REFUSED = Outcome.OK, Outcome.MISS, Outcome.FAILED, Outcome.REFUSED
PIECE = 64 << 10
TRAILER = 64
ARENA_PIECES = 512
DEADLINE_S = 5.0
SLOW_S = 15.0
"""More than the library's limits say: a machine with other work."""


def content(name: str, nbytes: int) -> np.ndarray:
    """The bytes of an object."""
    seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Client:
    """A store and its arena. Objects have ``pieces`` pieces in the arena, scattered, and a trailer outside of it."""

    def __init__(self, pieces: int = 3, **options: str) -> None:
        self.pieces = pieces
        self.store = MooncakeBackend(HOST, PORT, {"timeout_s": "1", **options})
        self._mapping = mmap.mmap(-1, ARENA_PIECES * PIECE)
        self.arena = np.frombuffer(self._mapping, np.uint8)
        self.store.register(memoryview(self._mapping))
        self._places = np.random.default_rng(0).permutation(ARENA_PIECES)
        self._tickets = itertools.count()
        self._early: dict[int, Answer] = {}

    @property
    def nbytes(self) -> int:
        """Of an object, all of it."""
        return self.pieces * PIECE + TRAILER

    def answer(self, ticket: int, deadline_s: float = DEADLINE_S) -> Answer:
        """The answer to a call. It must come: at the deadline, a batch may have begun."""
        until = time.monotonic() + deadline_s + self.store.longest_s + SLOW_S
        while True:
            for answer in self.store.poll():
                assert answer.ticket not in self._early
                self._early[answer.ticket] = answer
            if ticket in self._early:
                return self._early.pop(ticket)
            assert time.monotonic() < until, "the call hangs"
            self.store.wait(0.5)

    def buffers(self, count: int) -> list[list[memoryview]]:
        """Memory of so many objects."""
        assert count * self.pieces <= ARENA_PIECES
        places = iter(self._places)
        spans = [[next(places) * PIECE for _ in range(self.pieces)] for _ in range(count)]
        arena = memoryview(self.arena)
        return [[arena[at : at + PIECE] for at in each] + [memoryview(bytearray(TRAILER))] for each in spans]

    def put(self, names: Sequence[str], deadline_s: float = DEADLINE_S) -> Answer:
        """Stores the objects of these names; trailers are written by ``before``."""
        objects = self.buffers(len(names))
        contents = [content(name, self.nbytes) for name in names]
        for buffers, wanted in zip(objects, contents, strict=True):
            for k, buffer in enumerate(buffers[:-1]):
                buffer[:] = wanted[k * PIECE : (k + 1) * PIECE].data

        def before(k: int) -> None:
            objects[k][-1][:] = contents[k][-TRAILER:].data

        ticket = next(self._tickets)
        self.store.put(ticket, names, objects, deadline_s, before)
        return self.answer(ticket, deadline_s)

    def get(self, names: Sequence[str], deadline_s: float = DEADLINE_S) -> Answer:
        """Reads them. Whatever comes back as OK is right."""
        objects = self.buffers(len(names))
        for buffers in objects:
            for buffer in buffers:
                buffer[:] = b"\xee" * buffer.nbytes
        seen = []

        def after(k: int, total: int | None) -> str:
            seen.append(k)
            got = np.concatenate([np.frombuffer(buffer, np.uint8) for buffer in objects[k]])
            return "" if (got == content(names[k], self.nbytes)).all() else "WRONG BYTES"

        ticket = next(self._tickets)
        self.store.get(ticket, names, objects, deadline_s, after)
        answer = self.answer(ticket, deadline_s)
        assert "WRONG BYTES" not in answer.reasons.values()
        assert sorted(seen) == [k for k, outcome in enumerate(answer.outcomes) if outcome is OK]
        return answer

    def look(self, names: Sequence[str], deadline_s: float = DEADLINE_S) -> Answer:
        ticket = next(self._tickets)
        self.store.look(ticket, names, deadline_s)
        return self.answer(ticket, deadline_s)

    def delete(self, names: Sequence[str], deadline_s: float = DEADLINE_S) -> Answer:
        ticket = next(self._tickets)
        self.store.delete(ticket, names, deadline_s)
        return self.answer(ticket, deadline_s)

    def until(self, wanted: str, call: str, names: Sequence[str], within_s: float = 60.0) -> Answer:
        """Calls again and again until all outcomes are as wanted: ("ok", "get", names)."""
        until = time.monotonic() + within_s
        while True:
            answer: Answer = getattr(self, call)(names)
            if {outcome.value for outcome in answer.outcomes} == {wanted}:
                return answer
            assert time.monotonic() < until, answer
            time.sleep(0.1)

    def close(self) -> None:
        assert self.store.close(self.store.longest_s + SLOW_S)


def names_of(prefix: str, count: int) -> list[str]:
    """Names as the tier makes them."""
    return [f"kvt1/{'5' * 32}/0/{prefix}/{k:032x}" for k in range(count)]
