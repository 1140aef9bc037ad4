"""The remote of a ``World``: its calls end when the world says so, and as it says; what lies in it can go bad."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from remote.fake_backend import FakeBackend, Shared

from kvtier.remote import objects as stored_objects
from kvtier.remote.backends.contract import Answer, Buffers
from kvtier.remote.envelope import TRAILER_BYTES
from kvtier.remote.keeper.upkeep import check_object

FATES = ("ok", "fail", "miss", "refuse", "tear", "damage", "swap", "lie", "blind", "keep")
"""How a call may end; most mean something for one kind of call only, and are "ok" for the others."""
ROTS = ("flip", "cut", "swap", "drop", "age", "grow")
"""What may happen to an object that lies in the remote."""


def least_bytes(n: int) -> AbstractContextManager[Any]:
    """Caches that are opened meanwhile store objects of so many bytes at least."""
    return patch.object(stored_objects, "LEAST_BYTES", n)


class Shelf(Shared):
    """What lies in the remote; it survives the caches of a world. ``spoiled``: names whose object may be wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.spoiled: set[str] = set()
        self.random = random.Random(seed)

    def rot(self, k: int, how: str) -> bool:
        """Something happens to an object; False if there is none."""
        if not self.objects:
            return False
        names = sorted(self.objects)
        name = names[k % len(names)]
        data = self.objects[name]
        if not data:
            return False  # torn to nothing
        if how == "drop":
            del self.objects[name]
            return True
        self.spoiled.add(name)
        at = self.random.randrange(len(data))
        self.objects[name] = {
            "flip": lambda: data[:at] + bytes([data[at] ^ (1 << k % 8)]) + data[at + 1 :],
            "cut": lambda: data[:at],
            "swap": lambda: self.objects[names[self.random.randrange(len(names))]],
            "age": lambda: of_an_older_format(data),
            "grow": lambda: data + data[at:] + bytes(1),
        }[how]()
        return True

    def wrong(self) -> list[str]:
        """Objects that do not verify, though nothing has happened to them."""
        found = []
        for name, data in self.objects.items():
            if name not in self.spoiled and (reason := check_object(name, memoryview(data))):
                found.append(f"{name}: {reason}")
        return found


def of_an_older_format(data: bytes) -> bytes:
    """The object as another version would have written it: a trailer that is whole, of format 0."""
    body = data[-TRAILER_BYTES:-8]
    head = body[:8] + bytes(4) + body[12:]
    return data[:-TRAILER_BYTES] + head + hashlib.blake2b(head, digest_size=8).digest()


class PlayedBackend(FakeBackend):
    """Each call ends by ``finish`` with the fate it names, or never. A share of them, ``quick``, ends by itself."""

    def __init__(self, shelf: Shelf, quick: float = 0.0) -> None:
        super().__init__(shelf, hold=True)
        self._quick = quick
        self._due: set[int] = set()
        """Calls that end at the next poll."""
        self.shelf = shelf
        self._random = shelf.random
        self._fate = "ok"
        self.num_told = 0
        """Calls whose end the cache knows."""

    def _call(self, what: str, ticket: int, names: Sequence[str], run: Callable[[], Answer]) -> None:
        super()._call(what, ticket, names, run)
        if self._random.random() < self._quick:
            self._due.add(ticket)

    def poll(self) -> list[Answer]:
        for ticket in sorted(self._due & self.calls.keys()):
            self._end(ticket, self._random.choice(FATES) if self._random.random() < 0.05 else "ok")
        self._due.clear()
        found = super().poll()
        self.num_told += len(found)
        return found

    def finish(self, k: int, fate: str) -> str:
        """Call k of those under way ends so. Returns what it was."""
        return self._end(list(self.calls)[k % len(self.calls)], fate)

    def _end(self, ticket: int, fate: str) -> str:
        what, run = self.calls.pop(ticket)
        self._fate = fate
        self._ended.append(run())
        self._fate = "ok"
        self.on_news()
        return what

    def _draws(self, fault: str) -> bool:
        return fault == self._fate and (fault in ("lie", "blind", "keep") or self._random.random() < 0.7)

    def put(
        self, ticket: int, names: Sequence[str], objects: Sequence[Buffers], deadline_s: float, before: object = None
    ) -> None:
        def run() -> Answer:
            before_it = {name: self.shelf.objects.get(name) for name in names}
            answer = stored()
            for name in names:
                if self.shelf.objects.get(name) is not before_it[name]:
                    (self.shelf.spoiled.add if self._fate == "tear" else self.shelf.spoiled.discard)(name)
            return answer

        super().put(ticket, names, objects, deadline_s, before)
        stored = self.calls[ticket][1]
        self.calls[ticket] = "put", run

    def close(self, timeout_s: float) -> bool:
        """The process ends in the middle of its calls: some of its puts are done, torn, or not begun."""
        if not self.is_closed:
            for what, run in self.calls.values():
                if what == "put" and self._random.random() < 0.6:
                    self._fate = self._random.choice(["ok", "tear"])
                    run()
            self._fate = "ok"
        return super().close(timeout_s)
