"""The audit of rows, requests and transfers (I1, I2, I9, I11, I13 - I19, I27, I30)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier._audit_pools import Int64s, Tier, Violation
from kvtier.coordinator.coordinator import NO_LIMIT, Coordinator
from kvtier.coordinator.request import State, Tracked
from kvtier.cpu_offload.connector import Books
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.gpu_pool.block_pool import BlockPools, Col, Ids, Mark, Place, fence_of
from kvtier.gpu_pool.row_state import Geo, Phase
from kvtier.spec import Kind

if TYPE_CHECKING:
    from kvtier.coordinator.scheduler import Scheduler

Keys = npt.NDArray[np.uint64]

_FREE, _LOADING, _PREFILL, _DECODE = (int(p) for p in Phase)
_NONE, _PENDING, _READY = (int(m) for m in Mark)
_BASE, _ROWS = int(Col.BASE), int(Col.ROWS)
_EMPTY, _CACHED, _FENCED, _QUARANTINED = (int(p) for p in (Place.EMPTY, Place.CACHED, Place.FENCED, Place.QUARANTINED))


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
    """The fences are those of the live stores that no writer has been ordered behind yet, negative once overdue."""
    a = tier.pools.arrays
    expected = np.zeros_like(a.fence)
    for t in transfers:
        if t.direction is Direction.STORE and not t.ordered:
            fence = fence_of(t.ticket)
            expected[tier.entries(t.groups, t.device)] = -fence if t.state is TransferState.EXPIRED else fence
    for i in np.flatnonzero(a.fence != expected):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: fence {a.fence[i]}, the live stores ask for {expected[i]}")
    for i in np.flatnonzero((a.place == _FENCED) & (a.fence <= 0)):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: FENCED without a fence")
    for i in np.flatnonzero((a.fence != 0) & ((a.place == _EMPTY) | (a.place == _CACHED))):
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
    for i in np.flatnonzero((a.place == _QUARANTINED) != reasons):
        g, b = tier.block_of(i)
        what = "QUARANTINED for no reason" if a.place[i] == _QUARANTINED else "should be QUARANTINED"
        yield Violation("I1", f"{tier.where(g)} block {b}: {what}")


def audit_books(coordinator: Coordinator, transfers: list[Transfer]) -> Iterator[Violation]:
    """The connector's queue, byte count and deadlines against its transfers."""
    books, engine = coordinator.connector.books, coordinator.connector.engine
    latest_s = math.inf if engine is None else engine.now() + books.deadline_s
    planned = [t.ticket for t in transfers if t.state is TransferState.PLANNED]
    if list(books.planned) != planned:
        yield Violation("I18", f"stores {planned} are planned, but {list(books.planned)} wait to be submitted")
    under_way = [t for t in transfers if t.state is TransferState.IN_FLIGHT]
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
                yield Violation("I23", f"{group.name}: {column.name} is {t.geometry[g, column]}, not {number}")
    widths = t.geometry[:, Geo.WIDTH] * coordinator.tables.num_rows
    offsets = np.cumsum(widths) - widths
    if np.any(widths < 0) or int(widths.sum()) != len(t.table) or np.any(t.geometry[:, Geo.OFFSET] != offsets):
        yield Violation("I15", f"the tables of the groups do not divide up the {len(t.table):,} entries")


def audit_rows(coordinator: Coordinator) -> Iterator[Violation]:
    """Each group's table: what is held is inside the pool, once; everything else is null."""
    t = coordinator.tables.arrays
    for row in np.flatnonzero(~np.isin(t.phase, list(Phase))):
        yield Violation("I2", f"row {row}: there is no phase {t.phase[row]}")
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
    if np.any(a.mark[a.meta[g, _BASE] + held] == _PENDING):
        yield Violation("I13", f"{where}: runs on a block that a transfer is still writing")
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
            if np.any((ids < 1) | (ids >= pools.column(Col.ROWS)[t.groups])):
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
    for tier, count in ends.items():
        for (g, b), n in count.items():
            if n > 1:
                yield Violation("I17", f"{tier} group {g} block {b}: {n} transfers write it at once")
    for g, b in sorted(sources & ends["host"].keys()):
        yield Violation("I17", f"host group {g} block {b}: a load reads what a store writes")
    for tier, pools in (("device", coordinator.pools), ("host", host)):
        yield from _audit_pending(tier, pools, bringing[tier])


def _audit_keys(t: Transfer, tier: str, pools: BlockPools, blocks: Ids, mark: int) -> Iterator[Violation]:
    """The blocks of a transfer carry its keys: PENDING where it writes, READY where a load reads."""
    a = pools.arrays
    inside = (blocks >= 1) & (blocks < a.meta[t.groups, _ROWS])
    entries = a.meta[t.groups[inside], _BASE] + blocks[inside]
    if np.any(a.mark[entries] == _NONE) or (mark == _READY and np.any(a.mark[entries] != _READY)):
        yield Violation("I19", f"{tier} blocks of transfer {t.ticket} are not found by anybody")
    elif not np.array_equal(a.key.reshape(-1, 2)[entries], t.keys[inside]):
        yield Violation("I14", f"{tier} blocks of transfer {t.ticket} carry other keys than its content's")


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


def audit_requests(coordinator: Coordinator, scheduler: Scheduler) -> Iterator[Violation]:
    t = coordinator.tables.arrays
    for name, order in (("running", scheduler.running), ("waiting", scheduler.waiting)):
        if [seq.order for seq in order] != sorted({seq.order for seq in order}):
            yield Violation("I9", f"the {name} requests are not in service order")
    rows = [seq.row for seq in scheduler.running]
    if len(set(rows)) != len(rows) or set(rows) != set(np.flatnonzero(t.phase != _FREE).tolist()):
        yield Violation("I2", f"running requests have rows {sorted(rows)}, the tables say otherwise")
    else:
        yield from _audit_roster(coordinator, scheduler, rows)
    if scheduler.astray():
        yield Violation("I30", f"nobody will report {sorted(scheduler.astray())}, or they were reported and go on")
    chains = [_chain(coordinator, seq) for seq in scheduler.running]
    for seq, keys in zip(scheduler.running, chains, strict=True):
        loading = t.phase[seq.row] == _LOADING
        if loading != (seq.state is State.LOADING):
            phase = _phase(int(t.phase[seq.row]))
            yield Violation("I2", f"{seq.request!r} is {seq.state.value} but its row is {phase}")
        if seq.state not in (State.LOADING, State.RUNNING):
            yield Violation("I2", f"{seq.request!r} has row {seq.row} but is {seq.state.value}")
        if not 0 <= t.computed[seq.row] < t.total[seq.row] <= t.limit[seq.row]:
            yield Violation("I11", f"{seq.request!r}: {t.computed[seq.row]} computed of {t.total[seq.row]} tokens")
        if not seq.ran and t.computed[seq.row] % coordinator.spec.hit_tokens:
            yield Violation("I11", f"{seq.request!r}: a hit of {t.computed[seq.row]} tokens")
        if loading:
            yield from _audit_load(coordinator, seq)
            if seq not in scheduler.roster.watched:
                yield Violation("I30", f"{seq.request!r} waits for a load whose end nobody will notice")
        if bool(t.publish[seq.row]) != (seq.epoch == coordinator.connector.epoch):
            does = "publishes" if t.publish[seq.row] else "does not publish"
            yield Violation("I13", f"{seq.request!r} {does} what it writes, admitted in epoch {seq.epoch}")
        yield from _audit_names(coordinator, seq, keys)
    yield from _audit_shared(coordinator, scheduler, chains)
    for seq in scheduler.waiting:
        if seq.row >= 0 or seq.state is not State.WAITING:
            yield Violation("I9", f"{seq.request!r} waits but holds row {seq.row}")
        if seq.twin is not None and seq.twin_until in seq.twin.branches and seq.twin not in scheduler.running:
            yield Violation("I30", f"{seq.request!r} waits for {seq.twin.request!r}, which does not run")
        yield from _audit_awaited(coordinator, seq)
    for seq in (*scheduler.running, *scheduler.waiting):
        cached = [*seq.cached_tokens.values()] if seq.cached_tokens is not None else [0]
        if min(cached) < 0 or sum(cached) >= len(seq.request.prompt_token_ids) or seq.preemptions < 0:
            yield Violation("I25", f"{seq.request!r}: {cached} tokens were cached, {seq.preemptions} preemptions")


def _audit_roster(coordinator: Coordinator, scheduler: Scheduler, rows: list[int]) -> Iterator[Violation]:
    """Every row leads to its request, and the others are free, each once."""
    roster, at = scheduler.roster, np.array(rows, np.int32)
    if sorted([*roster.free_rows, *rows]) != list(range(coordinator.tables.num_rows)):
        yield Violation("I2", f"rows {sorted(roster.free_rows)} are free, {sorted(rows)} are not")
    ids = [seq.request.request_id for seq in scheduler.running]
    holders = [roster.holders[row] for row in rows]
    if holders != list(scheduler.running) or not roster.ids(at) == roster.all_ids() == ids:
        yield Violation("I2", "rows lead to other requests than those that have them")
    if not np.array_equal(roster.rows(), at):
        yield Violation("I9", f"rows in service order are {rows}, not {roster.rows().tolist()}")


def _audit_load(coordinator: Coordinator, seq: Tracked) -> Iterator[Violation]:
    """What a LOADING request waits for is what its own load brings."""
    connector, a = coordinator.connector, coordinator.pools.arrays
    load = next((x for x in connector.live() if x.ticket == seq.ticket), None)
    if load is not None and load.direction is not Direction.LOAD:
        yield Violation("I19", f"{seq.request!r} waits for store {seq.ticket}")
    elif seq.ticket not in connector.books.failed_loads:
        brought = set(zip(load.groups.tolist(), load.device.tolist(), strict=True)) if load is not None else set()
        for g, group in enumerate(coordinator.spec.groups):
            lo, end = int(coordinator.tables.arrays.lo[g, seq.row]), int(coordinator.tables.arrays.computed[seq.row])
            blocks = coordinator.tables.table(g)[seq.row, lo : end // group.block_tokens]
            marks = a.mark[a.meta[g, _BASE] + blocks]
            if any(m != _READY and (g, b) not in brought for m, b in zip(marks.tolist(), blocks.tolist(), strict=True)):
                yield Violation("I19", f"{seq.request!r} waits for blocks of group {group.name} that no load brings")


def _audit_awaited(coordinator: Coordinator, seq: Tracked) -> Iterator[Violation]:
    """Who waits for a transfer waits for one that brings its prefix, or looks again."""
    connector = coordinator.connector
    if seq.wait_settled > connector.num_settled:
        yield Violation("I30", f"{seq.request!r} waits until more transfers have ended than have")
    elif seq.wait_settled == connector.num_settled and connector.num_live:
        found = [t for t in connector.live() if t.state is not TransferState.EXPIRED and t.epoch == connector.epoch]
        own = {key.tobytes() for key in seq.keys}
        if not any(key.tobytes() in own for t in found for key in t.keys):
            yield Violation("I30", f"{seq.request!r} waits for a transfer that brings nothing of its own")


def _tokens(coordinator: Coordinator, seq: Tracked) -> npt.NDArray[np.int32]:
    """All tokens that a running request has."""
    t = coordinator.tables.arrays
    return np.concatenate([seq.tokens, t.generated[seq.row, : t.num_generated[seq.row]]])


def _chain(coordinator: Coordinator, seq: Tracked) -> Keys:
    """The chain over the request's own tokens."""
    return coordinator.chain.extend(seq.text.root, _tokens(coordinator, seq), np.empty((0, 2), np.uint64))


def _audit_shared(coordinator: Coordinator, scheduler: Scheduler, chains: list[Keys]) -> Iterator[Violation]:
    """Two rows hold the same block only for the same content, whether it has a name or not."""
    t, spec = coordinator.tables.arrays, coordinator.spec
    for g, group in enumerate(spec.groups):
        units, table = group.block_tokens // spec.hash_tokens, coordinator.tables.table(g)
        blocks, names, holders = [np.empty(0, np.int32)], [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)]
        for k, (seq, keys) in enumerate(zip(scheduler.running, chains, strict=True)):
            lo, end = int(t.lo[g, seq.row]), min(int(t.hi[g, seq.row]), len(keys) // units)
            blocks.append(table[seq.row, lo:end])
            names.append(keys[units - 1 :: units][lo:end])
            holders.append(np.full(len(blocks[-1]), k))
        held, key, who = np.concatenate(blocks), np.concatenate(names), np.concatenate(holders)
        order = np.argsort(held, kind="stable")
        same = held[order[1:]] == held[order[:-1]]
        other = (key[order[1:]] != key[order[:-1]]).any(1)
        for i in np.flatnonzero(same & other):
            a, b = (scheduler.running[who[order[i + n]]].request for n in (0, 1))
            yield Violation("I14", f"{group.name} block {held[order[i]]}: {a!r} and {b!r} hold it for different tokens")


def _audit_names(coordinator: Coordinator, seq: Tracked, keys: Keys) -> Iterator[Violation]:
    """A row's counters and keys against the chain over the request's own tokens."""
    t, a, spec, row = coordinator.tables.arrays, coordinator.pools.arrays, coordinator.spec, seq.row
    tokens = _tokens(coordinator, seq)
    most = len(seq.request.prompt_token_ids) + seq.request.max_new_tokens
    eos = {*seq.request.eos_token_ids, -1}
    if t.total[row] != len(tokens) or t.limit[row] != min(most, NO_LIMIT) or {*t.eos[row].tolist(), -1} != eos:
        yield Violation("I11", f"{seq.request!r}: its row does not say how long it is, or when it ends")
    if not np.array_equal(seq.keys, keys[: len(seq.keys)]) or len(seq.keys) != len(seq.tokens) // spec.hash_tokens:
        yield Violation("I14", f"{seq.request!r}: its keys are not those of its tokens")
    if t.phase[row] == _DECODE:
        computed = int(t.computed[row])
        units, rest = computed // spec.hash_tokens, computed % spec.hash_tokens
        if computed != len(tokens) - 1 or t.last[row] != tokens[-1]:
            yield Violation("I11", f"{seq.request!r}: a decode that does not compute the last token")
        elif not (
            np.array_equal(t.chain[row], keys[units - 1] if units else seq.text.root)
            and np.array_equal(t.tail[row, :rest], tokens[computed - rest : computed])
        ):
            yield Violation("I14", f"{seq.request!r}: the next block will be named after other content")
    elif t.num_generated[row]:
        yield Violation("I2", f"{seq.request!r}: has sampled tokens, but its row is {_phase(int(t.phase[row]))}")
    for g, group in enumerate(spec.groups):
        per_block = group.block_tokens // spec.hash_tokens
        lo, hi = int(t.lo[g, row]), int(t.hi[g, row])
        logical = np.arange(lo, min(hi, len(keys) // per_block))
        entries = a.meta[g, _BASE] + coordinator.tables.table(g)[row, logical]
        named = a.mark[entries] != _NONE
        names = a.key[entries[named]]
        if not np.array_equal(names, keys[(logical[named] + 1) * per_block - 1]):
            yield Violation("I14", f"{seq.request!r}: a block of group {group.name} carries another content's key")
        if group.attention.kind is Kind.FULL and lo:
            yield Violation("I15", f"{seq.request!r}: full-attention group {group.name} has let go of {lo} blocks")


def _phase(number: int) -> str:
    """A phase, for a report."""
    return Phase(number).name if number in list(Phase) else f"in phase {number}"
