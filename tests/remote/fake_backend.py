"""A remote in memory whose calls end when the test says so, well or not, and a world of caches that share it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvtier.remote.backends.contract import Answer, Buffers, Outcome


class Shared:
    """The bytes of a remote, by name; several ``FakeBackend`` may have it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}


class FakeBackend:
    """Calls end at the next ``poll``, unless ``hold``: then ``end`` ends them. ``faults``: the shares of objects that
    go wrong ("fail", "refuse", "miss", "damage", "tear", "swap"; looks: "lie", "blind"; deletes: "keep"), drawn by
    ``seed``."""

    kind = "fake"

    def __init__(self, shared: Shared | None = None, hold: bool = False, seed: int = 0, **faults: float) -> None:
        self.shared = Shared() if shared is None else shared
        self.hold = hold
        self.faults = faults
        self.on_news: Callable[[], None] = lambda: None
        self.calls: dict[int, tuple[str, Callable[[], Answer]]] = {}
        self.made: list[tuple[str, tuple[str, ...]]] = []
        """Every call: what it was, and its names."""
        self._random = random.Random(seed)
        self._ended: list[Answer] = []
        self.is_closed = self.is_to_be_left_alone = False

    def register(self, memory: memoryview) -> None:
        pass

    def _call(self, what: str, ticket: int, names: Sequence[str], run: Callable[[], Answer]) -> None:
        assert not self.is_closed
        assert what == "delete" or not self.is_to_be_left_alone, f"{what} after a reset"
        self.made.append((what, tuple(names)))
        self.calls[ticket] = what, run
        if not self.hold:
            self.on_news()

    def end(self, *kinds: str) -> None:
        """Ends the calls of these kinds that are under way; all without any."""
        for ticket, (what, run) in list(self.calls.items()):
            if not kinds or what in kinds:
                del self.calls[ticket]
                self._ended.append(run())
        self.on_news()

    def look(self, ticket: int, names: Sequence[str], deadline_s: float) -> None:
        def run() -> Answer:
            if self._draws("fail"):
                return Answer(ticket, (Outcome.FAILED,) * len(names), dict.fromkeys(range(len(names)), "no answer"))
            lie, blind = self._draws("lie"), self._draws("blind")  # a master that does not know what it lost, or has
            there = ((name in self.shared.objects and not blind) or lie for name in names)
            return Answer(ticket, tuple(Outcome.OK if each else Outcome.MISS for each in there), {}, 0.001)

        self._call("look", ticket, names, run)

    def put(self, ticket, names, objects: Sequence[Buffers], deadline_s, before=None) -> None:
        def one(k: int) -> tuple[Outcome, str]:
            if self._draws("fail"):
                return Outcome.FAILED, "the write failed"
            if self._draws("refuse"):
                return Outcome.REFUSED, "it is full"
            try:
                if before is not None:
                    before(k)
            except Exception as problem:
                return Outcome.FAILED, f"{type(problem).__name__}: {problem}"
            data = b"".join(objects[k])
            if self._draws("tear"):  # as a crashed writer leaves it where writes are not atomic
                data = data[: self._random.randrange(len(data))]
            self.shared.objects[names[k]] = data
            return Outcome.OK, ""

        self._call("put", ticket, names, lambda: self._answer(ticket, [one(k) for k in range(len(names))]))

    def get(self, ticket, names, objects: Sequence[Buffers], deadline_s, after=None) -> None:
        def one(k: int) -> tuple[Outcome, str]:
            data = self.shared.objects.get(names[k])
            if data is None or self._draws("miss"):
                return Outcome.MISS, ""
            if self._draws("fail"):
                return Outcome.FAILED, "the read failed"
            if self._draws("damage"):
                at = self._random.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            if self._draws("swap"):
                data = self._random.choice(list(self.shared.objects.values()))
            if len(data) != sum(len(buffer) for buffer in objects[k]):
                return Outcome.FAILED, f"damaged: {len(data)} bytes"
            at = 0
            for buffer in objects[k]:
                buffer[:] = data[at : at + len(buffer)]
                at += len(buffer)
            wrong = "" if after is None else after(k, None)
            return (Outcome.FAILED, wrong) if wrong else (Outcome.OK, "")

        self._call("get", ticket, names, lambda: self._answer(ticket, [one(k) for k in range(len(names))]))

    def delete(self, ticket, names, deadline_s) -> None:
        def run() -> Answer:
            if self._draws("keep"):
                return Answer(ticket, (Outcome.FAILED,) * len(names), dict.fromkeys(range(len(names)), "not deleted"))
            for name in names:
                self.shared.objects.pop(name, None)
            return Answer(ticket, (Outcome.OK,) * len(names))

        self._call("delete", ticket, names, run)

    def _draws(self, fault: str) -> bool:
        return self._random.random() < self.faults.get(fault, 0.0)

    def _answer(self, ticket: int, ends: list[tuple[Outcome, str]]) -> Answer:
        reasons = {k: reason for k, (_, reason) in enumerate(ends) if reason}
        return Answer(ticket, tuple(outcome for outcome, _ in ends), reasons, 0.001)

    def poll(self) -> list[Answer]:
        if not self.hold:
            for ticket, (_, run) in list(self.calls.items()):
                del self.calls[ticket]
                self._ended.append(run())
        found, self._ended = self._ended, []
        return found

    def wait(self, timeout_s: float) -> bool:
        return bool(self._ended)

    def wake(self) -> None:
        pass

    def close(self, timeout_s: float) -> bool:
        self.is_closed = True
        self.calls.clear()
        return True
