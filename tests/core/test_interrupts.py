"""Ctrl-C and callbacks of the garbage collector may come anywhere: a wake is not missed, and ``close`` still closes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import inside
import pytest
from patience import FOREVER_S, PATIENCE_S

import kvtier
from core.cpu_offload.engines.cuda.rig import Rig
from core.cpu_offload.engines.test_engines import Tiers
from kvtier import FullAttention, KVCache
from kvtier.cpu_offload import memory_guard
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.engines.submission import SubmissionThreads
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.transfer import Direction
from kvtier.machine.wakeup import Wakeup
from kvtier.testing import canary_spec

STORE = Direction.STORE
SPEC = canary_spec({"full": (FullAttention(), 4)})
COUNTED = (str(Path(kvtier.__file__).parent), threading.__file__)
WRAPPER = StreamsEngine.poll.__code__


def interrupted(call: Callable[[], Any], handler: Callable[[], Any], at: int) -> bool:
    """Makes the call, and runs ``handler`` before the ``at``-th line of it; False if it had fewer.

    Lines of kvtier and of ``threading`` count, but for the wrapper that holds the lock: Python handles no signal
    between the end of a ``with`` and the release of its lock.
    """
    lines, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if event == "line" and frame.f_code.co_filename.startswith(COUNTED) and frame.f_code is not WRAPPER:
            lines += 1
            if lines == at:
                handler()
        return trace if lines < at else None

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines >= at


def each_line(most: int = 300, apart: int = 1) -> Iterator[int]:
    yield from range(1, most, apart)


class Moment:
    """A handler that notes that it came, and whether anybody would have slept after that, ``Wakeup``s being patched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_come = self.is_slept_on = False
        self._handler: Callable[[], Any] = lambda: None
        moment = self

        class Naps(SimpleQueue[None]):
            """Nobody sleeps for what comes: time is over at once."""

            def get(self, block: bool = True, timeout: float | None = None) -> None:
                with suppress(Empty):
                    return self.get_nowait()
                moment.is_slept_on |= moment.has_come and timeout != 0.0
                raise Empty

        monkeypatch.setattr("kvtier.machine.wakeup.SimpleQueue", Naps)

    def of(self, handler: Callable[[], Any]) -> Moment:
        """The same, to come."""
        self.has_come, self._handler = False, handler
        return self

    def __call__(self) -> None:
        self.has_come = True
        self._handler()


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Moment:
    return Moment(monkeypatch)


@pytest.mark.parametrize("name", ["wait", "set", "clear"])
def test_a_wakeup_is_set_at_each_line_of_its_own_calls(moment, name):
    for at in each_line():
        woken = Wakeup()
        call = partial(woken.wait, 1.0) if name == "wait" else getattr(woken, name)
        came = interrupted(call, moment.of(woken.set), at)
        assert not moment.is_slept_on, f"it slept on, line {at}"
        if not came:
            break
        assert name == "clear" or woken.is_set()
        woken.clear()
        assert not woken.wait(0.0)
    assert 1 < at < 30


def test_who_waits_for_a_job_misses_nothing_that_a_handler_does(moment):
    threads = SubmissionThreads()
    for at in each_line():
        ready: list[bool] = []
        moment.of(lambda ready=ready: (ready.append(True), threads.wake()))
        came = interrupted(partial(threads.wait_for, partial(bool, ready), 1.0), moment, at)
        assert not moment.is_slept_on, f"it slept on, line {at}"
        threads.wake()  # of no concern to the next one
        if not came:
            break
    assert threads.close(PATIENCE_S)


def call_of(engine: Any, tiers: Any, name: str) -> Callable[[], Any]:
    transfer = tiers.transfer(STORE, (0, 1, 1))
    if name == "submit":
        return lambda: engine.submit(transfer)
    engine.submit(transfer)
    return {
        "close": lambda: engine.close(0.02),
        "poll": engine.poll,
        "wait": lambda: engine.wait(2.0),
        "order_after": lambda: engine.order_after([transfer.ticket], 2.0),
        "quiesce": lambda: engine.quiesce(2.0),
    }[name]


class Stop(BaseException):
    """As KeyboardInterrupt, which pytest would take for its own."""


def stop() -> None:
    raise Stop


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the line may be one of a finalizer
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("threads", "streams") for name in ("submit", "poll", "wait", "order_after", "close")]
    + [("streams", "quiesce")],
)
def test_a_handler_that_raises_at_any_line_leaves_nothing_that_keeps_close_from_closing(kind, name):
    tiers = Tiers()
    for at in each_line(150):
        rig = Rig() if kind == "streams" else None
        engine = rig.engine if rig else ThreadsEngine(tiers.memory)
        if name == "close":
            engine.submit((rig.tiers if rig else tiers).transfer(STORE, (0, 1, 1)))
            call = partial(engine.close, FOREVER_S)
        else:
            call = call_of(engine, rig.tiers if rig else tiers, name)
        came = True
        with suppress(Stop):
            came = interrupted(call, stop, at)
        assert engine.close(FOREVER_S), at
        if rig:
            assert rig.cuda.registered == {}
            assert rig.cuda.streams == {}
            assert len(rig.cuda.events) <= 1, "the one that was being made"
        if not came:
            break
    assert at > 1


def test_a_handler_that_raises_at_any_line_of_close_keeps_no_memory(monkeypatch):
    monkeypatch.setenv("KVTIER_AUDIT", "0")  # its lines are not those of close
    monkeypatch.setattr(memory_guard, "CLOSE_AGAIN_S", FOREVER_S)  # its 0.1 s may pass before a thread has its turn
    for at in each_line(200):
        cache, came = KVCache(SPEC, device_blocks={"full": 4}, host_blocks={"full": 4}), True
        with suppress(Stop):
            came = interrupted(cache.close, stop, at)
        cache.close()
        assert all(not arena.has_bytes for arena in (inside.arena(cache), inside.host_arena(cache))), at
        if not came:
            break
    assert 5 < at < 199
