"""The audit of rows and transfers (I1, I2, I13 - I19, I22, I23, I27)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier._audit_pools import Int64s, Tier, Violation, indices
from kvtier.coordinator.coordinator import Coordinator
from kvtier.cpu_offload.books import Books
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.gpu_pool.block_pool import BlockPools, Col, Ids, Mark, Place, fence_of
from kvtier.gpu_pool.row_state import Geo, Phase

if TYPE_CHECKING:
    from kvtier.coordinator.scheduler import Scheduler

_FREE, _LOADING, _LAST_PHASE = int(Phase.FREE), int(Phase.LOADING), int(max(Phase))
_NONE, _PENDING, _READY = (int(m) for m in Mark)
_BASE, _ROWS = int(Col.BASE), int(Col.ROWS)
_EMPTY, _CACHED, _FENCED, _QUARANTINED = (int(p) for p in (Place.EMPTY, Place.CACHED, Place.FENCED, Place.QUARANTINED))
_NOT_ENDED = (TransferState.PLANNED, TransferState.IN_FLIGHT)


def device_owners(tier: Tier, coordinator: Coordinator, transfers: list[Transfer]) -> Int64s:
    """Entries once per row that holds them and once per load that writes them."""
    t, owners = coordinator.tables.arrays, []
    rows = indices(t.phase != _FREE)
    for g in range(len(coordinator.spec.groups)):
        table = coordinator.tables.table(g)
        held = [table[r, t.lo[g, r] : t.hi[g, r]] for r in rows]
        owners += [tier.entries(np.full(len(ids), g, np.int32), ids) for ids in held]
    owners += [tier.entries(x.groups, x.device) for x in transfers if x.direction is Direction.LOAD]
    return np.concatenate([np.empty(0, np.int64), *owners])


def host_owners(tier: Tier, transfers: list[Transfer]) -> Int64s:
    """Entries once per transfer that reads or writes them."""
    return np.concatenate([np.empty(0, np.int64), *(tier.entries(x.groups, x.host) for x in transfers)])


def audit_fences(tier: Tier, transfers: list[Transfer]) -> Iterator[Violation]:
    """The fences are those of the live stores that no writer has been ordered behind yet, negative once overdue."""
    a = tier.pools.arrays
    expected = np.zeros_like(a.fence)
    for t in transfers:
        if t.direction is Direction.STORE and not t.ordered:
            fence = fence_of(t.ticket)
            expected[tier.entries(t.groups, t.device)] = -fence if t.state is TransferState.EXPIRED else fence
    for i in indices(a.fence != expected):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: fence {a.fence[i]}, the live stores ask for {expected[i]}")
    for i in indices((a.place == _FENCED) & (a.fence <= 0)):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: FENCED without a fence")
    for i in indices((a.fence != 0) & ((a.place == _EMPTY) | (a.place == _CACHED))):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: could be handed out while a store reads it")


def audit_quarantine(tier: Tier, ids: str, books: Books, transfers: list[Transfer]) -> Iterator[Violation]:
    """Blocks are out of circulation only as long as an overdue copy, or a changed byte, keeps them there."""
    a = tier.pools.arrays
    reasons = np.zeros(len(a.place), bool)
    for t in transfers:
        if t.state is TransferState.EXPIRED and (ids == "host" or t.direction is Direction.LOAD):
            reasons[tier.entries(t.groups, getattr(t, ids))] = True
    if ids == "host":
        for groups, blocks in books.corrupt:
            reasons[tier.entries(groups, blocks)] = True
    else:
        reasons |= (a.fence < 0) & (a.refs == 0)
    for i in indices((a.place == _QUARANTINED) != reasons):
        g, b = tier.block_of(i)
        what = "QUARANTINED for no reason" if a.place[i] == _QUARANTINED else "should be QUARANTINED"
        yield Violation("I1", f"{tier.where(g)} block {b}: {what}")


def audit_books(coordinator: Coordinator, transfers: list[Transfer]) -> Iterator[Violation]:
    """The connector's queues, byte count and deadlines against its transfers."""
    books, engine = coordinator.connector.books, coordinator.connector.engine
    latest_s = math.inf if engine is None else engine.now() + books.deadline_s
    planned = [t.ticket for t in transfers if t.state is TransferState.PLANNED]
    if list(books.planned) != planned:
        yield Violation("I18", f"stores {planned} are planned, but {list(books.planned)} wait to be submitted")
    overdue = [t for t in transfers if t.state is TransferState.EXPIRED]
    hang = coordinator.connector.stores_hang
    if hang and planned:
        yield Violation("I19", f"stores {planned} wait for a link that hangs")
    if hang and all(t.direction is Direction.LOAD for t in overdue):
        yield Violation("I19", "nothing is stored, since stores hang, and none is overdue")
    progressing = len(transfers) - len(overdue)
    if progressing != coordinator.connector.num_progressing:
        yield Violation("I18", f"{progressing} transfers progress, {coordinator.connector.num_progressing} are counted")
    under_way = [t for t in transfers if t.state is TransferState.IN_FLIGHT]
    stores = [t for t in transfers if t.direction is Direction.STORE and t.state in _NOT_ENDED]
    fencing = [t.ticket for t in stores if not t.ordered]
    if list(books.fencing) != fencing:
        yield Violation("I17", f"stores {fencing} fence their source, but {list(books.fencing)} are known to")
    num_bytes = sum(t.num_bytes for t in under_way if t.direction is Direction.STORE)
    if num_bytes != books.store_bytes:
        yield Violation("I18", f"stores of {num_bytes:,} bytes are in flight, {books.store_bytes:,} are counted")
    for t in under_way:
        if not t.deadline_s <= latest_s:
            yield Violation("I19", f"transfer {t.ticket} is in flight without a deadline, or with one too far away")
    for t in transfers:
        if t.ticket in books.failed_loads and t.state is not TransferState.EXPIRED:
            yield Violation("I18", f"load {t.ticket} has failed and goes on")
        if t.ordered and (t.direction is Direction.LOAD or t.state is TransferState.PLANNED):
            yield Violation("I17", f"writers are ordered behind transfer {t.ticket}, which no stream knows")


def audit_geometry(coordinator: Coordinator) -> Iterator[Violation]:
    """The rows' arrays have the form that the spec gives them."""
    t, spec = coordinator.tables.arrays, coordinator.spec
    for g, group in enumerate(spec.groups):
        expected = {
            Geo.BLOCK_TOKENS: group.block_tokens,
            Geo.KIND: int(group.attention.kind),
            Geo.SPAN: group.attention.span_tokens,
            Geo.UNITS: group.block_tokens // spec.hash_tokens,
        }
        for column, number in expected.items():
            if t.geometry[g, column] != number:
                yield Violation(
                    "I23", f"{group.name}: {column.name} is {t.geometry[g, column]}, the spec says {number}"
                )
    widths = t.geometry[:, Geo.WIDTH] * coordinator.tables.num_rows
    offsets = np.cumsum(widths) - widths
    if widths.min() < 0 or int(widths.sum()) != len(t.table) or (t.geometry[:, Geo.OFFSET] != offsets).any():
        yield Violation("I15", f"the tables of the groups do not divide up the {len(t.table):,} entries")


def audit_rows(coordinator: Coordinator) -> Iterator[Violation]:
    """Each group's table: what is held is inside the pool, once; everything else is null."""
    t = coordinator.tables.arrays
    taken = indices(t.phase != _FREE)
    for row in indices((t.phase < 0) | (t.phase > _LAST_PHASE)):
        yield Violation("I2", f"row {row}: there is no phase {t.phase[row]}")
    for g, group in enumerate(coordinator.spec.groups):
        table = coordinator.tables.table(g)
        lo, hi, at = t.lo[g][:, None], t.hi[g][:, None], np.arange(table.shape[1])
        inside = (at >= lo) & (at < hi)
        for row in indices((t.phase == _FREE) & (t.hi[g] > 0)):
            yield Violation("I27", f"{group.name} row {row}: free but holds blocks")
        for row in indices(((table != 0) & ~inside).any(1)):
            yield Violation("I15", f"{group.name} row {row}: an id outside the held entries")
        rows = coordinator.pools.arrays.meta[g, _ROWS]
        for row in indices((((table <= 0) | (table >= rows)) & inside).any(1)):
            yield Violation("I15", f"{group.name} row {row}: a held entry is null or outside the pool")
        for row in taken:
            held = table[row, t.lo[g, row] : t.hi[g, row]]
            if len(set(held.tolist())) != len(held):
                yield Violation("I16", f"{group.name} row {row}: a block holds two places of one request")
            elif len(held) and held.min() > 0 and held.max() < rows:
                yield from _audit_written(f"{group.name} row {row}", coordinator, g, int(row), held)
            computed, bt = int(t.computed[row]), group.block_tokens
            first, end = group.attention.first_visible(computed) // bt, -(-computed // bt)
            if t.lo[g, row] > first or t.hi[g, row] < end:
                seen = f"[{t.lo[g, row]}, {t.hi[g, row]})"
                yield Violation("I15", f"{group.name} row {row}: blocks {seen} are held, [{first}, {end}) are seen")


def _audit_written(
    where: str, coordinator: Coordinator, g: int, row: int, held: npt.NDArray[np.int32]
) -> Iterator[Violation]:
    """Findable blocks of a row are full; the blocks it writes next belong to it alone and have no key."""
    t, a, bt = coordinator.tables.arrays, coordinator.pools.arrays, coordinator.spec.groups[g].block_tokens
    if t.phase[row] == _LOADING:
        return
    if (a.mark[a.meta[g, _BASE] + held] == _PENDING).any():
        yield Violation("I13", f"{where}: runs on a block that a transfer is still writing")
    filled = max(0, int(t.computed[row]) // bt - int(t.lo[g, row]))
    entries = a.meta[g, _BASE] + held[filled:]
    if (a.mark[entries] != _NONE).any():
        yield Violation("I13", f"{where}: findable, but not every slot is written")
    if (a.refs[entries] != 1).any():
        yield Violation("I16", f"{where}: a block that is still being filled has several owners")
    if (a.fence[entries] != 0).any():
        yield Violation("I17", f"{where}: a store still reads a block that is being filled")


def audit_transfers(coordinator: Coordinator, host: BlockPools, transfers: list[Transfer]) -> Iterator[Violation]:
    """Each transfer by itself, then all of them against each other and against the marks."""
    ends: dict[str, Counter[tuple[int, int]]] = {"device": Counter(), "host": Counter()}
    sources: set[tuple[int, int]] = set()
    bringing: dict[str, set[tuple[int, int]]] = {"device": set(), "host": set()}
    tiers = {"device": coordinator.pools, "host": host}
    epoch = coordinator.connector.epoch
    block_bytes = np.array([group.block_bytes for group in coordinator.spec.groups])
    if [t.ticket for t in transfers] != sorted({t.ticket for t in transfers}):
        yield Violation("I18", f"transfers {[t.ticket for t in transfers]} are not in the order of their plans")
    for t in transfers:
        if t.num_bytes != block_bytes[t.groups].sum():
            yield Violation("I18", f"transfer {t.ticket}: {t.num_bytes:,} bytes are not those of its blocks")
        if t.state not in (TransferState.PLANNED, TransferState.IN_FLIGHT, TransferState.EXPIRED):
            yield Violation("I18", f"transfer {t.ticket} is {t.state.value} and still listed")
        if t.direction is Direction.LOAD and t.state is TransferState.PLANNED:
            yield Violation("I18", f"load {t.ticket} was never submitted")
        for pools, ids in ((coordinator.pools, t.device), (host, t.host)):
            if ((ids < 1) | (ids >= pools.column(Col.ROWS)[t.groups])).any():
                yield Violation("I22", f"transfer {t.ticket} names a block outside its pool")
        written, there = ("host", t.host) if t.direction is Direction.STORE else ("device", t.device)
        blocks = list(zip(t.groups.tolist(), there.tolist(), strict=True))
        ends[written].update(blocks)
        if t.direction is Direction.LOAD:
            sources.update(zip(t.groups.tolist(), t.host.tolist(), strict=True))
        if t.state is not TransferState.EXPIRED and t.epoch == epoch:
            bringing[written].update(blocks)
            yield from _audit_keys(t, written, tiers[written], there, _PENDING)
            if t.direction is Direction.LOAD:
                yield from _audit_keys(t, "host", host, t.host, _READY)
            elif not t.ordered:  # else the source may have its next owner already
                yield from _audit_keys(t, "device", coordinator.pools, t.device, _READY)
    for tier, count in ends.items():
        for (g, b), n in count.items():
            if n > 1:
                yield Violation("I17", f"{tier} group {g} block {b}: {n} transfers write it at once")
    fenced = coordinator.pools.arrays.fence != 0
    for g, b in sorted(ends["device"]):
        if b < coordinator.pools.column(Col.ROWS)[g] and fenced[coordinator.pools.column(Col.BASE)[g] + b]:
            yield Violation("I17", f"device group {g} block {b}: a load writes what a store reads")
    for g, b in sorted(sources & ends["host"].keys()):
        yield Violation("I17", f"host group {g} block {b}: a load reads what a store writes")
    for tier, pools in (("device", coordinator.pools), ("host", host)):
        yield from _audit_pending(tier, pools, bringing[tier])


def _audit_keys(t: Transfer, tier: str, pools: BlockPools, blocks: Ids, mark: int) -> Iterator[Violation]:
    """The blocks of a transfer carry its keys: PENDING where it writes, READY where a load reads."""
    a = pools.arrays
    inside = (blocks >= 1) & (blocks < a.meta[t.groups, _ROWS])
    entries = a.meta[t.groups[inside], _BASE] + blocks[inside]
    if (a.mark[entries] == _NONE).any() or (mark == _READY and (a.mark[entries] != _READY).any()):
        yield Violation("I19", f"{tier} blocks of transfer {t.ticket} are not found by anybody")
    elif not np.array_equal(a.key.reshape(-1, 2)[entries], t.keys[inside]):
        yield Violation("I14", f"{tier} blocks of transfer {t.ticket} carry other keys than its content's")


def _audit_pending(tier: str, pools: BlockPools, bringing: set[tuple[int, int]]) -> Iterator[Violation]:
    """PENDING keys are exactly those that a live transfer of this epoch is bringing."""
    a = pools.arrays
    for g in range(pools.num_groups):
        base, rows = int(a.meta[g, _BASE]), int(a.meta[g, _ROWS])
        mark = a.mark[base : base + rows]
        for b in indices(mark == _PENDING).tolist():
            if (g, b) not in bringing:
                yield Violation("I19", f"{tier} group {g} block {b}: PENDING, but no transfer brings it")
        for group, b in bringing:
            if group == g and b < rows and mark[b] == _READY:
                yield Violation("I13", f"{tier} group {g} block {b}: findable while a transfer writes it")


def audit_quiet(
    coordinator: Coordinator, host: BlockPools | None, scheduler: Scheduler, transfers: list[Transfer]
) -> Iterator[Violation]:
    """Once all requests are gone and all copies have ended, nothing is held."""
    if transfers or scheduler.num_running or scheduler.num_waiting:
        return
    for tier, pools in (("device", coordinator.pools), ("host", host)):
        if pools is not None and (pools.held.any() or pools.column(Col.FENCED).any()):
            yield Violation("I27", f"{tier}: {pools.held.tolist()} blocks are held and nobody is left")
    if scheduler.roster.watched:
        yield Violation("I27", f"the ends of loads of {list(scheduler.roster.watched)} are awaited and nobody is left")
