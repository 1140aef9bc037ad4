"""The invariants that can be read off the state, executable. Returns all violations and changes nothing.

Plain Python and NumPy on purpose: an auditor that shared code with what it audits would share its mistakes.

    I1   a block is in exactly one place; lists and counters agree      I2   references are owners and pins, exactly
    I9   who waits holds nothing; both lists are in service order       I11  computed < known <= limit, hits aligned
    I13  a key is findable only where every slot was written            I14  a block's key is the name of its content
    I15  rows, and the arrays of the step under way, name held blocks   I16  what is written next has one owner, no key
    I17  fences are those of live stores; no two copies share bytes     I18  every transfer is in a state it can be in
    I19  a PENDING key has a live transfer                              I21  the key index and the keyed blocks agree
    I22  ids lie inside their pools, pools inside their arena           I25  gauges are what the pools say
    I27  nothing is held once nothing is left to do                     I30  there is work while anybody is unfinished

``check_counts`` is the part that costs the same for any pool: counters against each other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.request import State, Tracked
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.errors import ConfigError
from kvtier.gpu_pool.block_pool import BlockPools, Col, Mark, Place
from kvtier.gpu_pool.block_table import Phase
from kvtier.spec import Kind

if TYPE_CHECKING:
    from kvtier.cache import KVCache
    from kvtier.coordinator.scheduler import Scheduler
    from kvtier.coordinator.step import GroupView, Step
    from kvtier.gpu_pool.arena import Arena
    from kvtier.stats import PoolStats


class AuditLevel(IntEnum):
    """How much of the state is checked after every ``schedule``, ``commit`` and ``cancel``."""

    OFF = 0
    COUNTS = 1
    """Counters against each other; the cost does not depend on the size of the pools."""
    FULL = 2
    """Everything that ``KVCache.audit`` looks at."""


def level_from_environment() -> AuditLevel:
    """``KVTIER_AUDIT``: 0 (default), 1 or 2. Raises ``ConfigError`` for anything else."""
    text = os.environ.get("KVTIER_AUDIT", "").strip() or "0"
    if text not in ("0", "1", "2"):
        raise ConfigError(f"KVTIER_AUDIT must be 0 (off), 1 (counters) or 2 (everything), got {text!r}")
    return AuditLevel(int(text))


@dataclass(frozen=True)
class Violation:
    """One broken invariant: its name in the contract and what was seen."""

    invariant: str
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.detail}"


def audit(cache: KVCache) -> list[Violation]:
    """All violations in both tiers, the rows, the requests and the transfers."""
    coordinator, host, scheduler = cache.parts
    transfers = list(coordinator.connector.live())
    found = list(check_counts(cache))
    found += _audit_tier("device", coordinator, coordinator.pools, _device_refs(coordinator, transfers))
    found += _audit_fences(coordinator.pools, transfers)
    found += _audit_rows(coordinator)
    if host is not None:
        found += _audit_tier("host", coordinator, host, _host_refs(transfers))
        found += _audit_transfers(coordinator, host, transfers)
    if scheduler is not None:
        found += _audit_requests(coordinator, scheduler)
        found += _audit_quiet(coordinator, host, scheduler, transfers)
        if scheduler.step is not None:
            found += _audit_step(coordinator, scheduler.step)
    return found


def check_counts(cache: KVCache) -> Iterator[Violation]:
    """The checks whose cost does not depend on pools or contexts: every counter against the others."""
    coordinator, host, scheduler = cache.parts
    for tier, pools, arena in (("device", coordinator.pools, cache.arenas[0]), ("host", host, cache.arenas[1])):
        if pools is not None:
            yield from _check_pool_counts(tier, pools, arena)
    if scheduler is not None:
        running, waiting = scheduler.num_running, scheduler.num_waiting
        if scheduler.num_free_rows + running != coordinator.tables.num_rows:
            yield Violation(
                "I2", f"{running} run and {scheduler.num_free_rows} rows are free of {coordinator.tables.num_rows}"
            )
        if (running or waiting) and not scheduler.has_work():
            yield Violation("I30", f"{running} run and {waiting} wait, but has_work() is False")


def _check_pool_counts(tier: str, pools: BlockPools, arena: Arena | None) -> Iterator[Violation]:
    meta, held = pools.arrays.meta, pools.held
    for g in range(pools.num_groups):
        counts = meta[g, [Col.EMPTY, Col.CACHED, Col.FENCED, Col.QUARANTINED]]
        if counts.min() < 0 or held[g] < 0:
            yield Violation("I1", f"{tier} group {g}: negative counts {counts.tolist()}, {held[g]} held")
        if not meta[g, Col.CACHED] <= meta[g, Col.KEYED] < meta[g, Col.ROWS]:
            yield Violation("I21", f"{tier} group {g}: {meta[g, Col.KEYED]} keys, {meta[g, Col.CACHED]} cached blocks")
        if arena is not None and arena.rows[g] != meta[g, Col.ROWS]:
            yield Violation("I22", f"{tier} group {g}: {meta[g, Col.ROWS]} ids, but memory for {arena.rows[g]} blocks")
    if arena is not None and int((arena.rows * arena.block_bytes).sum()) != arena.num_bytes:
        yield Violation("I22", f"{tier}: the pools do not add up to the arena's {arena.num_bytes:,} bytes")


def gauges(tier: str, pools: BlockPools, stats: Sequence[PoolStats]) -> Iterator[Violation]:
    """What ``stats`` says of a tier against a count of its blocks."""
    a = pools.arrays
    for g, seen in enumerate(stats):
        base, rows = int(a.meta[g, Col.BASE]), int(a.meta[g, Col.ROWS])
        place = a.place[base + 1 : base + rows]
        for name, kind in (("empty", Place.EMPTY), ("cached", Place.CACHED), ("fenced", Place.FENCED)):
            if getattr(seen, name) != int((place == kind).sum()):
                yield Violation("I25", f"{tier} group {g}: stats say {getattr(seen, name)} {name}")
        if seen.held != int((place == Place.HELD).sum()) or seen.quarantined != int((place == Place.QUARANTINED).sum()):
            yield Violation("I25", f"{tier} group {g}: stats say {seen.held} held, {seen.quarantined} quarantined")


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
            elif t.phase[row] not in (Phase.FREE, Phase.LOADING):
                yield from _audit_written(where, coordinator, g, row, held)


def _audit_written(
    where: str, coordinator: Coordinator, g: int, row: int, held: npt.NDArray[np.int32]
) -> Iterator[Violation]:
    """Findable blocks of a row are full; the blocks it writes next belong to it alone and have no key."""
    t, a, bt = coordinator.tables.arrays, coordinator.pools.arrays, coordinator.spec.groups[g].block_tokens
    entries = a.meta[g, Col.BASE] + held
    logical = int(t.lo[g, row]) + np.arange(len(held))
    full = (logical + 1) * bt <= t.computed[row]
    if np.any((a.mark[entries] != Mark.NONE) & ~full):
        yield Violation("I13", f"{where}: findable, but not every slot is written")
    if np.any(a.refs[entries[~full]] != 1):
        yield Violation("I16", f"{where}: a block that is still being filled has several owners")


def _audit_transfers(coordinator: Coordinator, host: BlockPools, transfers: list[Transfer]) -> Iterator[Violation]:
    """Each transfer by itself, then all of them against each other and against the marks."""
    ends: dict[str, Counter[tuple[int, int]]] = {"device": Counter(), "host": Counter()}
    sources: set[tuple[int, int]] = set()
    bringing: dict[str, set[tuple[int, int]]] = {"device": set(), "host": set()}
    epoch = coordinator.connector.epoch
    for t in transfers:
        if t.state not in (TransferState.PLANNED, TransferState.IN_FLIGHT, TransferState.EXPIRED):
            yield Violation("I18", f"transfer {t.ticket} is {t.state.value} and still listed")
        if t.direction is Direction.LOAD and t.state is TransferState.PLANNED:
            yield Violation("I18", f"load {t.ticket} was never submitted")
        for pools, ids in ((coordinator.pools, t.device), (host, t.host)):
            if np.any((ids < 1) | (ids >= pools.column(Col.ROWS)[t.groups])):
                yield Violation("I22", f"transfer {t.ticket} names a block outside its pool")
        written, there = ("host", t.host) if t.direction is Direction.STORE else ("device", t.device)
        blocks = list(zip(t.groups.tolist(), there.tolist(), strict=True))
        ends[written].update(blocks)
        if t.direction is Direction.LOAD:
            sources.update(zip(t.groups.tolist(), t.host.tolist(), strict=True))
        if t.state is not TransferState.EXPIRED and t.epoch == epoch:
            bringing[written].update(blocks)
    for tier, count in ends.items():
        for (g, b), n in count.items():
            if n > 1:
                yield Violation("I17", f"{tier} group {g} block {b}: {n} transfers write it at once")
    for g, b in sorted(sources & ends["host"].keys()):
        yield Violation("I17", f"host group {g} block {b}: a load reads what a store writes")
    for tier, pools in (("device", coordinator.pools), ("host", host)):
        yield from _audit_pending(tier, pools, bringing[tier])


def _audit_pending(tier: str, pools: BlockPools, bringing: set[tuple[int, int]]) -> Iterator[Violation]:
    """PENDING keys are exactly those that a live transfer of this epoch is bringing."""
    a = pools.arrays
    for g in range(pools.num_groups):
        base, rows = int(a.meta[g, Col.BASE]), int(a.meta[g, Col.ROWS])
        mark = a.mark[base : base + rows]
        for b in np.flatnonzero(mark == Mark.PENDING).tolist():
            if (g, b) not in bringing:
                yield Violation("I19", f"{tier} group {g} block {b}: PENDING, but no transfer brings it")
        for group, b in bringing:
            if group == g and b < rows and mark[b] == Mark.READY:
                yield Violation("I13", f"{tier} group {g} block {b}: findable while a transfer writes it")


def _audit_quiet(
    coordinator: Coordinator, host: BlockPools | None, scheduler: Scheduler, transfers: list[Transfer]
) -> Iterator[Violation]:
    """Once all requests are gone and all copies have ended, nothing is held."""
    if transfers or scheduler.num_running or scheduler.num_waiting:
        return
    for tier, pools in (("device", coordinator.pools), ("host", host)):
        if pools is not None and (np.any(pools.held) or np.any(pools.column(Col.FENCED))):
            yield Violation("I27", f"{tier}: {pools.held.tolist()} blocks are held and nobody is left")


def _audit_step(coordinator: Coordinator, step: Step) -> Iterator[Violation]:
    """The arrays of the step under way that somebody has asked for."""
    for name, view in step.built_views():
        g = coordinator.spec.index(name)
        yield from _audit_view(f"{name} of the step", coordinator.pools, g, step, view)


def _audit_view(where: str, pools: BlockPools, g: int, step: Step, view: GroupView) -> Iterator[Violation]:
    a, base, rows = pools.arrays, int(pools.arrays.meta[g, Col.BASE]), int(pools.arrays.meta[g, Col.ROWS])
    bt = view.block_tokens
    built = view.built()
    for name, ids in (("block_table", built.get("block_table")), ("kv_indices", built.get("kv_indices"))):
        if ids is None:
            continue
        if ids.size and (ids.min() < 0 or ids.max() >= rows):
            yield Violation("I15", f"{where}: {name} names a block outside the pool")
        elif np.any(a.refs[base + ids[ids > 0]] <= 0):
            yield Violation("I15", f"{where}: {name} names a block that nobody holds")
    slots = built.get("slot_mapping")
    if slots is not None:
        blocks = slots // bt
        if len(slots) != step.num_tokens or len(np.unique(slots)) != len(slots):
            yield Violation("I15", f"{where}: two tokens go to one slot")
        if np.any((blocks < 1) | (blocks >= rows)):
            yield Violation("I16", f"{where}: a token goes to the null block or outside the pool")
        elif np.any(a.refs[base + blocks] != 1) or np.any(a.mark[base + blocks] != Mark.NONE):
            yield Violation("I16", f"{where}: a token goes to a block that is shared or findable")
    if "kv_indptr" in built:
        qo, kv, last = built["qo_indptr"], built["kv_indptr"], built["kv_last_page_len"]
        sound = qo[0] == 0 and kv[0] == 0 and np.all(np.diff(qo) > 0) and np.all(np.diff(kv) > 0)
        sound &= int(kv[-1]) == len(built["kv_indices"]) and int(qo[-1]) == step.num_tokens
        if not sound or np.any((last < 1) | (last > bt)):
            yield Violation("I15", f"{where}: the paged index arrays contradict each other")


def _audit_requests(coordinator: Coordinator, scheduler: Scheduler) -> Iterator[Violation]:
    t = coordinator.tables.arrays
    for name, order in (("running", scheduler.running), ("waiting", scheduler.waiting)):
        if [seq.order for seq in order] != sorted({seq.order for seq in order}):
            yield Violation("I9", f"the {name} requests are not in service order")
    rows = [seq.row for seq in scheduler.running]
    if len(set(rows)) != len(rows) or set(rows) != set(np.flatnonzero(t.phase != Phase.FREE).tolist()):
        yield Violation("I2", f"running requests have rows {sorted(rows)}, the tables say otherwise")
    for seq in scheduler.running:
        loading = t.phase[seq.row] == Phase.LOADING
        if loading != (seq.state is State.LOADING):
            yield Violation("I2", f"{seq.request!r} is {seq.state.value} but its row is {Phase(t.phase[seq.row]).name}")
        if not 0 <= t.computed[seq.row] < t.total[seq.row] <= t.limit[seq.row]:
            yield Violation("I11", f"{seq.request!r}: {t.computed[seq.row]} computed of {t.total[seq.row]} tokens")
        if not seq.ran and t.computed[seq.row] % coordinator.spec.hit_tokens:
            yield Violation("I11", f"{seq.request!r}: a hit of {t.computed[seq.row]} tokens")
        yield from _audit_names(coordinator, seq)
    for seq in scheduler.waiting:
        if seq.row >= 0 or seq.state is not State.WAITING:
            yield Violation("I9", f"{seq.request!r} waits but holds row {seq.row}")


def _audit_names(coordinator: Coordinator, seq: Tracked) -> Iterator[Violation]:
    """Keys of a row's blocks against the chain over the request's own tokens."""
    t, a, spec = coordinator.tables.arrays, coordinator.pools.arrays, coordinator.spec
    for g, group in enumerate(spec.groups):
        units = group.block_tokens // spec.hash_tokens
        lo, hi = int(t.lo[g, seq.row]), int(t.hi[g, seq.row])
        logical = np.arange(lo, min(hi, len(seq.keys) // units))
        entries = a.meta[g, Col.BASE] + coordinator.tables.table(g)[seq.row, logical]
        named = a.mark[entries] != Mark.NONE
        keys = a.key.reshape(-1, 2)[entries[named]]
        if not np.array_equal(keys, seq.keys[(logical[named] + 1) * units - 1]):
            yield Violation("I14", f"{seq.request!r}: a block of group {group.name} carries another content's key")
        if group.attention.kind is Kind.FULL and lo:
            yield Violation("I15", f"{seq.request!r}: full-attention group {group.name} has let go of {lo} blocks")
