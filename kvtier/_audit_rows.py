"""The audit of rows, requests, transfers and the step under way (I9, I11, I13 - I19, I27)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier._audit_pools import Int64s, Tier, Violation
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.request import State, Tracked
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.gpu_pool.block_pool import BlockPools, Col, Mark, Place, fence_of
from kvtier.gpu_pool.block_table import Phase
from kvtier.spec import Kind

if TYPE_CHECKING:
    from kvtier.coordinator.scheduler import Scheduler
    from kvtier.coordinator.step import GroupView, Step

_FREE, _LOADING, _PREFILL, _DECODE = (int(p) for p in Phase)
_NONE, _PENDING, _READY = (int(m) for m in Mark)
_BASE, _ROWS = int(Col.BASE), int(Col.ROWS)
_FENCED = int(Place.FENCED)


def device_owners(tier: Tier, coordinator: Coordinator, transfers: list[Transfer]) -> Int64s:
    """Entries once per row that holds them and once per load that writes them."""
    t, owners = coordinator.tables.arrays, []
    rows = np.flatnonzero(t.phase != _FREE)
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
    """Every fence is that of a live store; FENCED blocks have one that is not overdue."""
    a = tier.pools.arrays
    stores = {fence_of(t.ticket): t for t in transfers if t.direction is Direction.STORE}
    for i in np.flatnonzero(a.fence):
        store, (g, b) = stores.get(abs(int(a.fence[i]))), tier.block_of(i)
        if store is None:
            yield Violation("I17", f"{tier.where(g)} block {b}: fence {a.fence[i]} is of a transfer that has settled")
        elif (a.fence[i] < 0) != (store.state is TransferState.EXPIRED):
            yield Violation(
                "I17", f"{tier.where(g)} block {b}: fence and transfer {store.ticket} disagree on whether it is overdue"
            )
    for i in np.flatnonzero((a.place == _FENCED) & (a.fence <= 0)):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: FENCED without a fence")


def audit_rows(coordinator: Coordinator) -> Iterator[Violation]:
    """Each group's table: what is held is inside the pool, once; everything else is null."""
    t = coordinator.tables.arrays
    for g, group in enumerate(coordinator.spec.groups):
        table = coordinator.tables.table(g)
        lo, hi, at = t.lo[g][:, None], t.hi[g][:, None], np.arange(table.shape[1])
        inside = (at >= lo) & (at < hi)
        for row in np.flatnonzero((t.phase == _FREE) & (t.hi[g] > 0)):
            yield Violation("I27", f"{group.name} row {row}: free but holds blocks")
        for row in np.flatnonzero(((table != 0) & ~inside).any(1)):
            yield Violation("I15", f"{group.name} row {row}: an id outside the held entries")
        rows = coordinator.pools.arrays.meta[g, _ROWS]
        for row in np.flatnonzero((((table <= 0) | (table >= rows)) & inside).any(1)):
            yield Violation("I15", f"{group.name} row {row}: a held entry is null or outside the pool")
        for row in np.flatnonzero(t.phase != _FREE):
            held = table[row, t.lo[g, row] : t.hi[g, row]]
            if len(set(held.tolist())) != len(held):
                yield Violation("I16", f"{group.name} row {row}: a block holds two places of one request")
            elif t.phase[row] != _LOADING and len(held) and held.min() > 0 and held.max() < rows:
                yield from _audit_written(f"{group.name} row {row}", coordinator, g, int(row), held)


def _audit_written(
    where: str, coordinator: Coordinator, g: int, row: int, held: npt.NDArray[np.int32]
) -> Iterator[Violation]:
    """Findable blocks of a row are full; the blocks it writes next belong to it alone and have no key."""
    t, a, bt = coordinator.tables.arrays, coordinator.pools.arrays, coordinator.spec.groups[g].block_tokens
    filled = max(0, int(t.computed[row]) // bt - int(t.lo[g, row]))
    entries = a.meta[g, _BASE] + held[filled:]
    if np.any(a.mark[entries] != _NONE):
        yield Violation("I13", f"{where}: findable, but not every slot is written")
    if np.any(a.refs[entries] != 1):
        yield Violation("I16", f"{where}: a block that is still being filled has several owners")


def audit_transfers(coordinator: Coordinator, host: BlockPools, transfers: list[Transfer]) -> Iterator[Violation]:
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
        base, rows = int(a.meta[g, _BASE]), int(a.meta[g, _ROWS])
        mark = a.mark[base : base + rows]
        for b in np.flatnonzero(mark == _PENDING).tolist():
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
        if pools is not None and (np.any(pools.held) or np.any(pools.column(Col.FENCED))):
            yield Violation("I27", f"{tier}: {pools.held.tolist()} blocks are held and nobody is left")


def audit_step(coordinator: Coordinator, step: Step) -> Iterator[Violation]:
    """The arrays of the step under way that somebody has asked for."""
    for name, view in step.built_views():
        g = coordinator.spec.index(name)
        yield from _audit_view(f"{name} of the step", coordinator.pools, g, step, view)


def _audit_view(where: str, pools: BlockPools, g: int, step: Step, view: GroupView) -> Iterator[Violation]:
    a, base, rows = pools.arrays, int(pools.arrays.meta[g, _BASE]), int(pools.arrays.meta[g, _ROWS])
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
        elif np.any(a.refs[base + blocks] != 1) or np.any(a.mark[base + blocks] != _NONE):
            yield Violation("I16", f"{where}: a token goes to a block that is shared or findable")
    if "kv_indptr" in built:
        qo, kv, last = built["qo_indptr"], built["kv_indptr"], built["kv_last_page_len"]
        sound = qo[0] == 0 and kv[0] == 0 and np.all(np.diff(qo) > 0) and np.all(np.diff(kv) > 0)
        sound &= int(kv[-1]) == len(built["kv_indices"]) and int(qo[-1]) == step.num_tokens
        if not sound or np.any((last < 1) | (last > bt)):
            yield Violation("I15", f"{where}: the paged index arrays contradict each other")


def audit_requests(coordinator: Coordinator, scheduler: Scheduler) -> Iterator[Violation]:
    t = coordinator.tables.arrays
    for name, order in (("running", scheduler.running), ("waiting", scheduler.waiting)):
        if [seq.order for seq in order] != sorted({seq.order for seq in order}):
            yield Violation("I9", f"the {name} requests are not in service order")
    rows = [seq.row for seq in scheduler.running]
    if len(set(rows)) != len(rows) or set(rows) != set(np.flatnonzero(t.phase != _FREE).tolist()):
        yield Violation("I2", f"running requests have rows {sorted(rows)}, the tables say otherwise")
    for seq in scheduler.running:
        loading = t.phase[seq.row] == _LOADING
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
        entries = a.meta[g, _BASE] + coordinator.tables.table(g)[seq.row, logical]
        named = a.mark[entries] != _NONE
        keys = a.key[entries[named]]
        if not np.array_equal(keys, seq.keys[(logical[named] + 1) * units - 1]):
            yield Violation("I14", f"{seq.request!r}: a block of group {group.name} carries another content's key")
        if group.attention.kind is Kind.FULL and lo:
            yield Violation("I15", f"{seq.request!r}: full-attention group {group.name} has let go of {lo} blocks")
