"""``ThreadedBackend``: whatever a library does, each call ends once, with an outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S

from kvtier.remote.backends.contract import Buffers, Outcome
from kvtier.remote.backends.threaded import ThreadedBackend
from kvtier.remote.backends.threads import CLOSED, LONGEST, Failure
from remote.driving import FAILED, MISS, OK, REFUSED, Driver


class Panic(BaseException):
    """As a library in Rust raises it: no Exception."""


class Scripted(ThreadedBackend):
    """``acts[name]`` is called for an object; others are there."""

    kind = "scripted"

    def __init__(self, threads: int) -> None:
        self.acts: dict[str, Callable[[], object]] = {}
        self.done: list[str] = []
        self.ended = 0
        super().__init__(threads)

    def _act(self, name: str) -> None:
        self.acts.get(name, lambda: None)()
        self.done.append(name)

    def _exists(self, names: Sequence[str]) -> list[bool]:
        for name in names:
            self._act(name)
        return [True] * len(names)

    def _put(self, name: str, buffers: Buffers) -> None:
        self._act(name)

    def _get(self, name: str, buffers: Buffers, check: Callable[[int | None], None]) -> None:
        self._act(name)
        check(None)

    def _delete(self, name: str) -> None:
        self._act(name)

    def _end(self) -> None:
        self.ended += 1


class Held:
    """An act that waits until it is let go."""

    def __init__(self) -> None:
        self.begun, self._go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._go.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def driver() -> Iterator[Driver]:
    store = Scripted(1)
    yield Driver(store)
    assert store.close(PATIENCE_S)


def acting(problem: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise problem

    return act


@pytest.mark.parametrize(
    ("problem", "expected", "reason"),
    [
        (RuntimeError("a\nb"), FAILED, "RuntimeError: a b"),
        (RuntimeError("short\n\nDebug source: long"), FAILED, "RuntimeError: short"),
        (RuntimeError("x" * 1000), FAILED, "RuntimeError: " + "x" * LONGEST),
        (Panic("rust"), FAILED, "Panic: rust"),
        (MemoryError(), FAILED, "MemoryError: "),
        (Failure(Outcome.REFUSED, "full"), REFUSED, "full"),
    ],
)
def test_whatever_is_raised_is_an_outcome(
    driver: Driver, problem: BaseException, expected: Outcome, reason: str
) -> None:
    driver.store.acts = {"bad": acting(problem)}
    for what, more in (("put", ([[], []],)), ("get", ([[], []],)), ("delete", ())):
        answer = driver.call(what, ["bad", "good"], *more)
        assert (answer.outcomes, answer.reasons) == ((expected, OK), {0: reason})
    answer = driver.call("look", ["bad", "good"])
    assert (answer.outcomes, answer.reasons) == ((FAILED, FAILED), {0: reason, 1: reason})


def test_no_such_file_is_a_miss_for_who_reads_and_a_failure_for_who_writes(driver: Driver) -> None:
    driver.store.acts = {"gone": acting(FileNotFoundError("no such directory"))}
    assert driver.outcomes("get", ["gone"], [[]]) == driver.outcomes("delete", ["gone"]) == [MISS]
    answer = driver.call("put", ["gone"], [[]])
    assert (answer.outcomes, "no such directory" in answer.reasons[0]) == ((FAILED,), True)


def test_looks_go_before_reads_and_reads_before_writes(driver: Driver) -> None:
    held = Held()
    driver.store.acts = {"first": held}
    tickets = [driver.send("put", ["first"], [[]])]
    assert held.begun.wait(PATIENCE_S)
    tickets += [driver.send("delete", ["d"]), driver.send("put", ["p", "q"], [[], []])]
    tickets += [driver.send("get", ["g"], [[]]), driver.send("look", ["l"])]
    held.let_go()
    assert all(driver.answer(ticket).outcomes[0] is OK for ticket in tickets)
    assert driver.store.done == ["first", "l", "g", "p", "q", "d"]


def test_objects_of_one_call_are_moved_side_by_side() -> None:
    store = Scripted(2)
    meet = threading.Barrier(2, timeout=PATIENCE_S)
    store.acts = {"a": meet.wait, "b": meet.wait}
    driver = Driver(store)
    assert driver.outcomes("put", ["a", "b"], [[], []]) == [OK, OK]
    assert store.close(PATIENCE_S)


def test_a_call_that_waited_past_its_deadline_is_not_begun(driver: Driver) -> None:
    held = Held()
    driver.store.acts = {"slow": held}
    slow = driver.send("put", ["slow"], [[]])
    assert held.begun.wait(PATIENCE_S)
    late = [driver.send(what, ["late"], *more, within_s=0.0) for what, more in (("look", ()), ("put", ([[]],)))]
    held.let_go()
    assert driver.answer(slow).outcomes == (OK,)
    assert [driver.answer(ticket).outcomes for ticket in late] == [(FAILED,), (FAILED,)]
    assert driver.store.done == ["slow"]


def test_the_time_of_a_call_is_without_its_wait(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.remote.backends import threads

    now = [0.0]
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    held = Held()
    driver.store.acts = {"slow": held, "next": lambda: now.__setitem__(0, now[0] + 2.0)}
    slow, after = driver.send("put", ["slow"], [[]]), driver.send("put", ["next"], [[]])
    assert held.begun.wait(PATIENCE_S)
    now[0] = 10.0
    held.let_go()
    assert (driver.answer(slow).seconds, driver.answer(after).seconds) == (10.0, 2.0)


def test_close_lets_what_is_under_way_end_and_begins_nothing_more() -> None:
    store, held, held_too = Scripted(2), Held(), Held()
    driver = Driver(store)
    store.acts = {"slow": held, "slow too": held_too}
    under_way = driver.send("get", ["slow", "slow too", "waits"], [[], [], []])
    assert held.begun.wait(PATIENCE_S) and held_too.begun.wait(PATIENCE_S)
    waiting = [driver.send("look", ["w"]), driver.send("delete", ["w"])]
    assert not store.close(0.0)
    assert store.ended == 0
    held.let_go()
    held_too.let_go()
    assert store.close(PATIENCE_S)
    assert driver.answer(under_way).outcomes == (OK, OK, FAILED)
    assert [driver.answer(ticket).reasons for ticket in waiting] == [{0: CLOSED}] * 2
    assert sorted(store.done) == ["slow", "slow too"]
    assert store.close(0.0)
    assert store.ended == 1
