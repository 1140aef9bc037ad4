"""The invariants that can be read off the state, executable. Returns all violations and changes nothing.

Plain Python and NumPy on purpose: an auditor that shared code with what it audits would share its mistakes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.request import State
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.gpu_pool.block_pool import BlockPools, Col, Mark, Place
from kvtier.gpu_pool.block_table import Phase

if TYPE_CHECKING:
    from kvtier.coordinator.scheduler import Scheduler


@dataclass(frozen=True)
class Violation:
    """One broken invariant: its name in the contract and what was seen."""

    invariant: str
    detail: str


def audit(coordinator: Coordinator, host: BlockPools | None, scheduler: Scheduler | None) -> list[Violation]:
    """All violations in both tiers, the rows and the requests."""
    transfers = list(coordinator.connector.live())
    found = list(_audit_tier("device", coordinator, coordinator.pools, _device_refs(coordinator, transfers)))
    found += _audit_fences(coordinator.pools, transfers)
    found += _audit_rows(coordinator)
    if host is not None:
        found += _audit_tier("host", coordinator, host, _host_refs(transfers))
    if scheduler is not None:
        found += _audit_requests(coordinator, scheduler)
    return found


def _device_refs(coordinator: Coordinator, transfers: list[Transfer]) -> Counter[tuple[int, int]]:
    """References that should be there: one per row that holds the block, one per load that writes it."""
    refs: Counter[tuple[int, int]] = Counter()
    t = coordinator.tables.arrays
    for g in range(len(coordinator.spec.groups)):
        table = coordinator.tables.table(g)
        for row in np.flatnonzero(t.phase != Phase.FREE):
            refs.update((g, int(b)) for b in table[row, t.lo[g, row] : t.hi[g, row]])
    for transfer in transfers:
        if transfer.direction is Direction.LOAD:
            refs.update(zip(transfer.groups.tolist(), transfer.device.tolist(), strict=True))
    return refs


def _host_refs(transfers: list[Transfer]) -> Counter[tuple[int, int]]:
    refs: Counter[tuple[int, int]] = Counter()
    for transfer in transfers:
        refs.update(zip(transfer.groups.tolist(), transfer.host.tolist(), strict=True))
    return refs


def _audit_tier(
    tier: str, coordinator: Coordinator, pools: BlockPools, refs: Counter[tuple[int, int]]
) -> Iterator[Violation]:
    a = pools.arrays
    for g, group in enumerate(coordinator.spec.groups):
        where, base, rows = f"{tier} {group.name}", int(a.meta[g, Col.BASE]), int(a.meta[g, Col.ROWS])
        place = a.place[base : base + rows]
        if place[0] != Place.NULL or a.refs[base] != 0:
            yield Violation("I1", f"{where}: the null block is owned")
        for column, kind in (
            (Col.EMPTY, Place.EMPTY),
            (Col.CACHED, Place.CACHED),
            (Col.FENCED, Place.FENCED),
            (Col.QUARANTINED, Place.QUARANTINED),
        ):
            count = int((place[1:] == kind).sum())
            if count != a.meta[g, column]:
                yield Violation("I1", f"{where}: {count} blocks are {kind.name}, the counter says {a.meta[g, column]}")
        for head, kind in ((0, Place.CACHED), (rows, Place.EMPTY)):
            listed = _walk(pools, g, head)
            if len(listed) != len(set(listed)):
                yield Violation("I1", f"{where}: the {kind.name} list holds a block twice")
            if set(listed) != set(np.flatnonzero(place == kind).tolist()):
                yield Violation("I1", f"{where}: the {kind.name} list is not the set of {kind.name} blocks")
        expected = np.zeros(rows, np.int64)
        for (group_index, b), count in refs.items():
            if group_index == g and b < rows:  # an id outside the pool is the rows' violation (I15)
                expected[b] = count
        counted, mark = a.refs[base : base + rows], a.mark[base : base + rows]
        off_duty = (place == Place.NULL) | (place == Place.QUARANTINED)
        unkeyed = (place == Place.EMPTY) | (place == Place.QUARANTINED)
        for invariant, what, broken in (
            ("I2", "references do not equal owners and pins", counted != expected),
            ("I2", "references and place disagree", ((counted > 0) != (place == Place.HELD)) & ~off_duty),
            ("I21", "findable, but empty or quarantined", unkeyed & (mark != Mark.NONE)),
            ("I21", "CACHED without a key", (place == Place.CACHED) & (mark == Mark.NONE)),
        ):
            for b in np.flatnonzero(broken).tolist():
                seen = f"{Place(place[b]).name}, {counted[b]} references, {expected[b]} owners and pins"
                yield Violation(invariant, f"{where} block {b}: {what} ({seen})")
        yield from _audit_index(where, pools, g)


def _walk(pools: BlockPools, g: int, head: int) -> list[int]:
    a, base = pools.arrays, int(pools.arrays.meta[g, Col.BASE])
    out: list[int] = []
    b = int(a.next[base + head])
    while b != head and len(out) <= int(a.meta[g, Col.ROWS]):
        if a.prev[base + a.next[base + b]] != b:
            return [b, b]  # a broken link reads as a repeated block
        out.append(b)
        b = int(a.next[base + b])
    return out


def _audit_index(where: str, pools: BlockPools, g: int) -> Iterator[Violation]:
    a, base, rows = pools.arrays, int(pools.arrays.meta[g, Col.BASE]), int(pools.arrays.meta[g, Col.ROWS])
    start, size = int(a.meta[g, Col.INDEX_BASE]), int(a.meta[g, Col.INDEX_MASK]) + 1
    entries = a.slots[start : start + size]
    indexed = (entries[entries != 0] & np.uint64(0xFFFFFFFF)).astype(np.int64).tolist()
    keyed = np.flatnonzero(a.mark[base : base + rows] != Mark.NONE)
    if sorted(indexed) != keyed.tolist():
        yield Violation("I21", f"{where}: the key index and the keyed blocks differ")
        return
    groups = np.full(len(keyed), g, np.int32)
    keys = a.key.reshape(-1, 2)[base + keyed]
    if not np.array_equal(pools.find(groups, keys), keyed):
        yield Violation("I21", f"{where}: a key does not lead to its block")


def _audit_fences(pools: BlockPools, transfers: list[Transfer]) -> Iterator[Violation]:
    a = pools.arrays
    stores = {t.ticket: t for t in transfers if t.direction is Direction.STORE}
    for i in np.flatnonzero(a.fence != 0):
        ticket = abs(int(a.fence[i]))
        if ticket not in stores:
            yield Violation("I17", f"device entry {i}: fenced by transfer {ticket}, which has settled")
        elif (a.fence[i] < 0) != (stores[ticket].state is TransferState.EXPIRED):
            yield Violation("I17", f"device entry {i}: fence and transfer {ticket} disagree on whether it is overdue")
    for i in np.flatnonzero(a.place == Place.FENCED):
        if a.fence[i] <= 0:
            yield Violation("I17", f"device entry {i}: FENCED without a fence")


def _audit_rows(coordinator: Coordinator) -> Iterator[Violation]:
    t = coordinator.tables.arrays
    for g, group in enumerate(coordinator.spec.groups):
        table = coordinator.tables.table(g)
        for row in range(table.shape[0]):
            lo, hi = int(t.lo[g, row]), int(t.hi[g, row])
            where = f"{group.name} row {row}"
            if t.phase[row] == Phase.FREE and hi > 0:
                yield Violation("I27", f"{where}: free but holds blocks")
            if np.any(table[row, :lo]) or np.any(table[row, hi:]):
                yield Violation("I15", f"{where}: an id outside the held entries [{lo}, {hi})")
            held = table[row, lo:hi]
            if np.any(held <= 0) or np.any(held >= coordinator.pools.arrays.meta[g, Col.ROWS]):
                yield Violation("I15", f"{where}: a held entry is null or outside the pool")
            if len(set(held.tolist())) != len(held):
                yield Violation("I16", f"{where}: a block holds two places of one request")


def _audit_requests(coordinator: Coordinator, scheduler: Scheduler) -> Iterator[Violation]:
    t = coordinator.tables.arrays
    rows = [seq.row for seq in scheduler.running]
    if len(set(rows)) != len(rows) or set(rows) != set(np.flatnonzero(t.phase != Phase.FREE).tolist()):
        yield Violation("I2", f"running requests have rows {sorted(rows)}, the tables say otherwise")
    for seq in scheduler.running:
        loading = t.phase[seq.row] == Phase.LOADING
        if loading != (seq.state is State.LOADING):
            yield Violation("I2", f"{seq.request!r} is {seq.state.value} but its row is {Phase(t.phase[seq.row]).name}")
        if not 0 <= t.computed[seq.row] < t.total[seq.row] <= t.limit[seq.row]:
            yield Violation("I11", f"{seq.request!r}: {t.computed[seq.row]} computed of {t.total[seq.row]} tokens")
    for seq in scheduler.waiting:
        if seq.row >= 0 or seq.state is not State.WAITING:
            yield Violation("I9", f"{seq.request!r} waits but holds row {seq.row}")
