"""What all tests share: caches that are audited and closed after the test, whatever it did."""

from __future__ import annotations

import ctypes
import os

os.environ.setdefault("KVTIER_AUDIT", "2")  # every schedule, commit and cancel of every test is audited in full
os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")  # a compiled loop that leaves an array raises IndexError
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; Triton reads it when it is imported

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import shuffle
from breadth import AUDITED_THEN, AUDITED_WHOLLY, LANE
from core.driving import HeldEngine, Serving
from core.loops import compiled_again
from hypothesis import HealthCheck, settings

from kvtier import CacheSpec, ChunkedLocal, FullAttention, KVCache, SlidingWindow
from kvtier.audit.run import AuditLevel, Checks, Violation
from kvtier.coordinator.core import Core
from kvtier.testing import canary_spec

settings.register_profile(
    "kvtier", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvtier")

FULL = {"full": (FullAttention(), 4)}
WINDOW = {"win": (SlidingWindow(6), 4)}
CHUNK = {"chunk": (ChunkedLocal(8), 4)}

Factory = Callable[..., Any]

SOUND = weakref.WeakSet[KVCache]()
"""Caches that `make_cache` has audited and closes now: there is no need to do it twice."""

LEFT_OUT = pytest.StashKey[int]()
WHOLLY = pytest.StashKey[set[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay: no search for garbage among them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out(config, items)
    if (seed := shuffle.seed()) is not None:
        items[:] = shuffle.shuffled(items, seed)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What only `make test-all` runs, unless the command line names the test itself or it needs a GPU."""
    named = [argument.partition("[")[0].rpartition("::")[2] for argument in config.args if "::" in argument]
    left_out = {
        item
        for item in items
        if item.get_closest_marker("breadth")
        and not item.get_closest_marker("gpu")
        and getattr(item, "originalname", item.name) not in named
    }
    kept = [item for item in items if item not in left_out]
    config.stash[WHOLLY] = {_function(item) for item in left_out} - {_function(item) for item in kept}
    if LANE == "all":
        return
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """With xdist, workers collect; each of them leaves out the same tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_sessionstart(session: pytest.Session) -> None:
    _say_order(session.config.pluginmanager.get_plugin("terminalreporter"))


def _say_order(terminal: Any) -> None:
    """Workers of xdist have no terminal."""
    if terminal is not None and (seed := shuffle.seed()) is not None:
        terminal.write_line(f"the order of tests is that of {shuffle.VARIABLE}={seed}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{left_out} tests more, of the same kinds, are in `make test-all` (KVTIER_TESTS=all; docs/TESTING.md)"
        )
    _say_order(terminalreporter)


@pytest.fixture(autouse=True)
def leave_logging_as_it_was() -> Iterator[None]:
    """`kvtier serve` in a test's process sets up logging for good, on a stderr that is closed after the test."""
    logs = [logging.getLogger(name) for name in ("kvtier", "uvicorn", "uvicorn.access")]
    before = [(log.handlers[:], log.level, log.propagate) for log in logs]
    yield
    for log, (handlers, level, propagate) in zip(logs, before, strict=True):
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture(autouse=True)
def audit_every_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever caches a test builds are sound when it closes them, and when it ends; but see the two fixtures below."""
    watched = not {"damaged", "unaudited"} & set(request.fixturenames)
    monkeypatch.setattr(InPart, "is_on", "damaged" not in request.fixturenames)
    made: list[Callable[[], KVCache | None]] = []
    found: list[Violation] = []
    build, close = KVCache.__init__, KVCache.close

    @functools.wraps(build)
    def recorded(self: KVCache, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        made.append((lambda: self) if watched else weakref.ref(self))

    @functools.wraps(close)
    def audited(self: KVCache, *args: Any, **options: Any) -> Any:
        if watched and os.environ.get("KVTIER_AUDIT") != "0" and not self.is_closed and self not in SOUND:
            found.extend(self.audit())
        made[:] = [cache for cache in made if cache() is not self]
        return close(self, *args, **options)

    monkeypatch.setattr(KVCache, "__init__", recorded)
    monkeypatch.setattr(KVCache, "close", audited)
    yield
    left = [cache for cache in (ref() for ref in made) if cache is not None and "damaged" not in request.fixturenames]
    assert found + [violation for cache in left for violation in cache.audit()] == []


class InPart:
    """Whether long runs are audited in part: not where a test plants what the next audit must see."""

    is_on = True


def _audit_in_part() -> None:
    whole, turns = Checks.after, weakref.WeakKeyDictionary[Checks, int]()

    @functools.wraps(whole)
    def after(self: Checks, core: Core, moment: str) -> None:
        turn = turns[self] = turns.get(self, 0) + 1
        level = self.level
        if InPart.is_on and level == AuditLevel.FULL and turn > AUDITED_WHOLLY and turn % AUDITED_THEN:
            self.level = AuditLevel.COUNTS
        try:
            whole(self, core, moment)
        finally:
            self.level = level

    Checks.after = after  # type: ignore[method-assign]


if LANE != "all":
    _audit_in_part()


@pytest.fixture(autouse=True)
def nobody_waits_for_the_compiler() -> Iterator[None]:
    """The warm-up compiles each loop for the only form of arguments that kvtier ever gives it."""
    yield
    assert compiled_again() == {}


@pytest.fixture
def damaged() -> None:
    """For tests that leave caches as no scheduler would, on purpose."""


@pytest.fixture
def unaudited(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that plant what an audit would report, or count what an audit would ask."""
    monkeypatch.setenv("KVTIER_AUDIT", "0")


@pytest.fixture
def make_cache() -> Iterator[Factory]:
    """Builds caches: ``make_cache(groups or spec, blocks, host, **options)``; audits and closes them.

    ``groups`` is what ``canary_spec`` takes. A number of blocks stands for that many in every group.
    """
    made: list[KVCache] = []

    def make(groups: Any = FULL, blocks: Any = 32, host: Any = None, **options: Any) -> KVCache:
        spec = groups if isinstance(groups, CacheSpec) else canary_spec(groups)
        sizes = [dict.fromkeys(spec.names, n) if isinstance(n, int) else n for n in (blocks, host)]
        options = {"key_secret": b"tests", "device_blocks": sizes[0], "host_blocks": sizes[1], **options}
        made.append(KVCache(spec, **options))
        return made[-1]

    yield make
    for cache in made:
        violations = [] if cache.is_closed else cache.audit()
        if not violations:
            SOUND.add(cache)
        cache.close()
        assert violations == []


@pytest.fixture
def make_serving(make_cache: Factory) -> Factory:
    """Builds a ``Serving``: a cache as ``make_cache`` does, with a scheduler and the canary engine.

    ``hold=...`` (directions) gives it a ``HeldEngine``; ``scheduler={...}`` are the scheduler's options.
    """

    def make(
        groups: Any = FULL,
        blocks: Any = 32,
        host: Any = None,
        hold: Any = None,
        scheduler: Mapping[str, int] | None = None,
        **options: Any,
    ) -> Serving:
        if hold is not None:
            has_bytes = options.get("device") != "meta"
            options["copy_engine"] = lambda memory: HeldEngine(memory, hold, has_bytes=has_bytes)
        return Serving(make_cache(groups, blocks, host, **options), **(scheduler or {}))

    return make
