"""Ctrl-C and callbacks of the garbage collector may come anywhere: a wake is not missed, and ``close`` still closes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import inside
import pytest
from breadth import sized

import kvtier
from core.cpu_offload.engines.cuda.test_engine import Rig
from core.cpu_offload.engines.test_engines import Tiers
from kvtier import FullAttention, KVCache
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.engines.submission import SubmissionThreads
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.transfer import Direction
from kvtier.testing import canary_spec
from kvtier.wakeup import Wakeup

STORE = Direction.STORE
SPEC = canary_spec({"full": (FullAttention(), 4)})
COUNTED = (str(Path(kvtier.__file__).parent), threading.__file__)
WRAPPER = StreamsEngine.poll.__code__
SOON_S, LATE_S = 5.0, 20.0
SLEEPS_S = sized(1.0, 2.0)
"""Of whoever waits, unless the handler wakes it: half of it is the most that may then go by."""


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
    """A handler that notes when it came."""

    def __init__(self, handler: Callable[[], Any]) -> None:
        self._handler = handler
        self._came_s: float | None = None

    def __call__(self) -> None:
        self._came_s = time.monotonic()
        self._handler()

    def age_s(self) -> float:
        return 0.0 if self._came_s is None else time.monotonic() - self._came_s


@pytest.mark.parametrize("name", ["wait", "set", "clear"])
def test_a_wakeup_is_set_at_each_line_of_its_own_calls(name):
    for at in each_line():
        woken = Wakeup()
        handler = Moment(woken.set)
        came = interrupted(partial(woken.wait, SLEEPS_S) if name == "wait" else getattr(woken, name), handler, at)
        assert handler.age_s() < SLEEPS_S / 2, f"it slept on, line {at}"
        if not came:
            break
        assert name == "clear" or woken.is_set()
        woken.clear()
        assert not woken.wait(0.0)
    assert 1 < at < 30


def test_who_waits_for_a_job_misses_nothing_that_a_handler_does():
    threads = SubmissionThreads()
    for at in each_line(apart=sized(2, 1)):
        ready: list[bool] = []
        handler = Moment(lambda ready=ready: (ready.append(True), threads.wake()))
        came = interrupted(partial(threads.wait_for, partial(bool, ready), SLEEPS_S), handler, at)
        assert handler.age_s() < SLEEPS_S / 2, f"it slept on, line {at}"
        threads.wake()  # of no concern to the next one
        if not came:
            break
    assert threads.close(SOON_S)


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
            call = partial(engine.close, LATE_S)
        else:
            call = call_of(engine, rig.tiers if rig else tiers, name)
        came, begun = True, time.monotonic()
        with suppress(Stop):
            came = interrupted(call, stop, at)
        assert engine.close(LATE_S), at
        assert time.monotonic() - begun < SOON_S, at
        if rig:
            assert rig.cuda.registered == {}
            assert rig.cuda.streams == {}
            assert len(rig.cuda.events) <= 1, "the one that was being made"
        if not came:
            break
    assert at > 1


def test_a_handler_that_raises_at_any_line_of_close_keeps_no_memory(monkeypatch):
    monkeypatch.setenv("KVTIER_AUDIT", "0")  # its lines are not those of close
    for at in each_line(200):
        cache, came = KVCache(SPEC, device_blocks={"full": 4}, host_blocks={"full": 4}), True
        with suppress(Stop):
            came = interrupted(cache.close, stop, at)
        cache.close()
        assert all(not arena.has_bytes for arena in (inside.arena(cache), inside.host_arena(cache))), at
        if not came:
            break
    assert 5 < at < 199
