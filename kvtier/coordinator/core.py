"""The parts of a cache, for its driver, its audit and its statistics.

Owns       the current driver of the cache.
Promises   one driver at a time: the next driver takes over only when the previous one has nothing left to do. In a
           forked child, which has no threads for copies, the cache counts as closed.
"""

from __future__ import annotations

from typing import Protocol

from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.reports import Reports
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.step import Step
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import CacheClosed, ConfigError, MemoryUnavailable, StepError
from kvtier.machine.forks import of_another_process, watch
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools


class Checking(Protocol):
    """The audits of a running cache. Both raise ``InvariantBroken``."""

    level: int
    """0: none."""

    def after(self, core: Core, moment: str) -> None:
        """Called after every change."""

    def step(self, core: Core) -> None:
        """Called before a step ends."""


class Driver(Protocol):
    """What drives a cache, as its statistics and its audit see it."""

    reports: Reports

    @property
    def roster(self) -> Roster:
        """Waiting requests, running requests, and the rows."""

    @property
    def step(self) -> Step | None:
        """The step that is neither committed nor cancelled."""

    @property
    def num_arrived(self) -> int:
        """Requests that the roster does not know yet."""

    def has_work(self) -> bool:
        """Whether it still needs the cache."""

    def astray(self) -> set[str]:
        """Ids of requests that will never be reported."""

    def on_reset(self) -> None:
        """The cache was reset."""


class HasCore(Protocol):
    """A ``KVCache``."""

    core: Core


def core_of(cache: HasCore) -> Core:
    """Raises ``ConfigError`` for what is no cache."""
    core = getattr(cache, "core", None)
    if not isinstance(core, Core):
        raise ConfigError(f"cache must be a kvtier.KVCache, got {type(cache).__name__}")
    return core


class Core:
    """What a driver and the views share of one cache."""

    def __init__(
        self,
        spec: CacheSpec,
        coordinator: Coordinator,
        host: BlockPools | None,
        arenas: tuple[Arena, Arena | None],
        on_load_error: str,
        checks: Checking,
    ) -> None:
        self.spec = spec
        self.coordinator = coordinator
        self.host = host
        self.arenas = arenas
        self.on_load_error = on_load_error
        self._checks = checks
        self._why = "the cache is closed"
        self.driver: Driver | None = None
        self.is_closed = False
        if coordinator.connector.engine is not None:
            watch(self)

    def on_fork(self) -> None:
        """No copy ends in a forked child."""
        self.is_closed, self._why = True, of_another_process("this cache")

    def check(self, moment: str) -> None:
        """Runs the audit chosen by ``KVTIER_AUDIT``, after ``moment``."""
        if self._checks.level:
            self._checks.after(self, moment)

    def check_step(self) -> None:
        """Audits the arrays that the engine was given for its forward, before the step ends."""
        if self._checks.level:
            self._checks.step(self)

    def check_open(self) -> None:
        """Raises ``CacheClosed`` after ``close``, and in a forked child if there is a host tier."""
        if self.is_closed:
            raise CacheClosed(self._why)

    def check_driver(self, driver: Driver) -> None:
        """Raises ``StepError`` if another driver has taken over, ``CacheClosed`` after ``close``."""
        if self.is_closed or self.driver is not driver:
            self.check_open()
            raise StepError("this cache is driven by another scheduler, which was made later")

    def take_over(self, driver: Driver, num_rows: int) -> None:
        """``driver``, which is complete, drives the cache from now on, with ``num_rows`` rows.

        Raises ``StepError`` while another driver has work, and ``MemoryUnavailable``; then the other driver goes on.
        """
        self.check_open()
        if self.driver is not None and self.driver.has_work():
            raise StepError("this cache is driven by a scheduler that still has work")
        try:
            self.coordinator.use_tables(num_rows)
        except MemoryError as problem:
            raise MemoryUnavailable(
                f"the block tables of {num_rows:,} requests do not fit into memory ({problem or 'out of memory'}); "
                "lower max_running"
            ) from problem
        if self.driver is not None:
            driver.reports.go_on_from(self.driver.reports)
        self.driver = driver

    def reset(self) -> None:
        """Forgets all cached content in both tiers."""
        self.check_open()
        self.coordinator.reset()
        if self.driver is not None:
            self.driver.on_reset()

    def reset_prefix_cache(self) -> None:
        """``reset``; raises ``StepError`` while a step is under way."""
        self.check_open()
        if self.driver is not None and self.driver.step is not None:
            raise StepError("a step is under way; commit or cancel it before the prefix cache is reset")
        self.reset()
