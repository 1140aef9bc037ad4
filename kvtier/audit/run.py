"""The invariants that can be read off the state, executable. Returns all violations and changes nothing.

Plain Python and NumPy on purpose: an auditor that shares code with its subject shares its mistakes. The shared parts
(the key chain, the lookup of a key, the reach of an attention kind) are tested against other definitions.

    I1   a block is in exactly one place; lists and counters agree      I2   references are owners and pins, exactly
    I7   a waiting request would fit into empty pools                   I9   waiting: holds nothing; service order
    I11  computed < known <= limit, hits aligned                        I13  findable only where every slot was written
    I14  the key of a row's block is the name of its content            I15  rows and exported arrays name held blocks
    I16  the blocks written next have one owner, no key                 I17  fences: live stores; no copies share bytes
    I18  every transfer is in a state it can be in                      I19  a PENDING key has a live transfer
    I21  the key index and the keyed blocks agree                       I22  ids lie in pools, pools in their arena
    I23  the loops' geometry is the groups'                             I25  gauges are the pools'; no negative counter
    I27  nothing is held once nothing is left to do
    I30  there is work while a request is unfinished, and awaited content will come
    I31  what a kept boundary of a row's text needs is not superseded

``check_counts`` is the part that costs the same for any pool: counters against each other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

from kvtier.audit import rows as rows, transfers as moves
from kvtier.audit.counters import check_counters
from kvtier.audit.pools import Tier, Violation, audit_pools, audit_structure
from kvtier.audit.remote import RemoteMoves
from kvtier.audit.requests import audit_requests
from kvtier.audit.step import audit_step
from kvtier.audit.transfers import Copies
from kvtier.coordinator.core import Core
from kvtier.machine.errors import ConfigError, InvariantBroken
from kvtier.machine.integers import shown
from kvtier.machine.stats import PoolStats
from kvtier.pools.block_pool import BlockPools
from kvtier.pools.pool_stats import pool_stats

__all__ = ["AuditLevel", "Checks", "Violation", "audit", "check_counts", "level_from_environment"]


class AuditLevel(IntEnum):
    """How much of the state is checked after every ``schedule``, ``commit`` and ``cancel``."""

    OFF = 0
    COUNTS = 1
    """Counters against each other; the cost does not depend on the size of the pools."""
    FULL = 2
    """All checks of ``KVCache.audit``."""


def level_from_environment() -> AuditLevel:
    """``KVTIER_AUDIT``: 0 (default), 1 or 2. Raises ``ConfigError`` for anything else."""
    text = os.environ.get("KVTIER_AUDIT", "").strip() or "0"
    if text not in ("0", "1", "2"):
        raise ConfigError(f"KVTIER_AUDIT must be 0 (off), 1 (counters) or 2 (everything), got {shown(text)}")
    return AuditLevel(int(text))


def audit(core: Core) -> list[Violation]:
    """All violations in both tiers, the rows, the requests and the transfers.

    If the arrays do not have the form that the layout gives them, only this is reported. If a part of the audit cannot
    follow some damage, it is reported as such, and the other parts still look.
    """
    coordinator, driver = core.coordinator, core.driver
    device, host = _tiers(core)
    found = [*audit_structure(device), *rows.audit_geometry(coordinator)]
    if host is not None:
        found += audit_structure(host)
    if found:
        return found
    transfers, books = list(coordinator.connector.ledger.live()), coordinator.connector.books
    copies = functools.cache(lambda: Copies.of_all(transfers, coordinator.connector.ledger.epoch))
    parts: list[Callable[[], Iterable[Violation]]] = [
        lambda: check_counts(core),
        lambda: audit_pools(
            device, moves.device_owners(device, coordinator, copies()), _stats(core, coordinator.pools)
        ),
        lambda: moves.audit_fences(device, copies()),
        lambda: moves.audit_quarantine(device, books, copies()),
        lambda: moves.audit_books(coordinator, transfers),
        lambda: rows.audit_rows(coordinator),
    ]
    if host is not None:
        remote = RemoteMoves(host, coordinator.door.remote)
        parts += [
            lambda: audit_pools(host, moves.host_owners(host, copies(), remote.owners), _stats(core, host.pools)),
            lambda: moves.audit_fences(host, None),
            lambda: moves.audit_quarantine(host, books, copies(), remote.overdue),
            lambda: moves.audit_transfers(coordinator, device, host, copies(), remote.bringing),
            remote.audit,
        ]
    if driver is not None:
        parts += [
            lambda: audit_requests(coordinator, driver),
            lambda: rows.audit_quiet(coordinator, core.host, driver, transfers),
        ]
        if driver.step is not None:
            step = driver.step
            parts.append(lambda: audit_step(coordinator, driver, step))
    for part in parts:
        found += _followed(part)
    return found


def _followed(part: Callable[[], Iterable[Violation]]) -> Iterator[Violation]:
    """Violations that a part of the audit sees before it meets damage that it cannot follow."""
    try:
        yield from part()
    except Exception as problem:  # an audit is there to report a number that leads nowhere
        yield Violation("I1", f"the state cannot be followed: {type(problem).__name__}: {problem}")


def check_counts(core: Core) -> list[Violation]:
    """The checks whose cost does not depend on pools or contexts: every counter against the others."""
    coordinator, driver = core.coordinator, core.driver
    found: list[Violation] = []
    for tier, arena in zip(_tiers(core), core.arenas, strict=True):
        if tier is not None:
            found += check_counters(tier, arena)
    counters = vars(coordinator.connector.counts) | coordinator.counts.numbers()
    if driver is not None:
        reports = driver.reports
        counters = {"finished": reports.num_finished, "preemptions": reports.num_preemptions, **counters}
        counters |= {f"prompt tokens of {source}": n for source, n in reports.prompt_tokens.items()}
        running, waiting = len(driver.roster.running), len(driver.roster.waiting) + driver.num_arrived
        free = driver.roster.num_free_rows
        if free + running != coordinator.tables.num_rows:
            found.append(Violation("I2", f"{running} run and {free} of {coordinator.tables.num_rows} rows are free"))
        under_way, unreported = coordinator.door.num_copies, len(reports.pending)
        if (running or waiting or under_way or unreported or driver.step) and not driver.has_work():
            left = (
                f"{running} run, {waiting} wait, {unreported} are to be reported, {under_way} transfers are under way"
            )
            found.append(Violation("I30", f"{left}, but has_work() is False"))
    found += [Violation("I25", f"{what} is negative: {n}") for what, n in counters.items() if n < 0]
    return found


def _stats(core: Core, pools: BlockPools) -> list[PoolStats]:
    return list(pool_stats(pools, core.spec.groups).values())


def _tiers(core: Core) -> tuple[Tier, Tier | None]:
    names, host = core.spec.names, core.host
    return Tier("device", names, core.coordinator.pools), Tier("host", names, host) if host is not None else None


class Checks:
    """The checks that ``KVTIER_AUDIT`` asks for while a cache runs; ``level`` may be changed meanwhile."""

    def __init__(self, level: AuditLevel) -> None:
        self.level: int = level

    def after(self, core: Core, moment: str) -> None:
        """Raises ``InvariantBroken`` if something is wrong after ``moment``."""
        found = audit(core) if self.level == AuditLevel.FULL else check_counts(core)
        if found:
            raise InvariantBroken(moment, found)

    def step(self, core: Core) -> None:
        """At the full level, before a step ends: the arrays that the engine was given for its forward."""
        driver = core.driver
        if self.level == AuditLevel.FULL and driver is not None and driver.step is not None:
            found = list(audit_step(core.coordinator, driver, driver.step))
            if found:
                raise InvariantBroken("the forward", found)
