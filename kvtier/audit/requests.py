"""The audit of requests: their queues, their waits, and the names of their blocks.

It covers I2, I7, I9, I11, I13, I14, I15, I19, I25, I30 and I31.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, assert_never

import numpy as np
import numpy.typing as npt

from kvtier.audit.pools import Violation, indices
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.room import NO_LIMIT
from kvtier.coordinator.tracked import ForTransfer, ForTwin, State, Tracked
from kvtier.cpu_offload.transfer import Direction, TransferState
from kvtier.geometry.kinds import Attention, Kind
from kvtier.gpu_pool.row_state import Phase
from kvtier.pools.block_pool import Col, Mark

if TYPE_CHECKING:
    from kvtier.coordinator.core import Driver

Keys = npt.NDArray[np.uint64]

_FREE, _LOADING, _DECODE = int(Phase.FREE), int(Phase.LOADING), int(Phase.DECODE)
_NONE, _READY, _BASE = int(Mark.NONE), int(Mark.READY), int(Col.BASE)


def audit_requests(coordinator: Coordinator, driver: Driver) -> Iterator[Violation]:
    t = coordinator.tables.arrays
    for name, order in (("running", driver.roster.running), ("waiting", driver.roster.waiting)):
        if [seq.order for seq in order] != sorted({seq.order for seq in order}):
            yield Violation("I9", f"the {name} requests are not in service order")
    rows = [seq.row for seq in driver.roster.running]
    if len(set(rows)) != len(rows) or set(rows) != set(indices(t.phase != _FREE).tolist()):
        yield Violation("I2", f"running requests have rows {sorted(rows)}, the tables say otherwise")
    else:
        yield from _audit_roster(coordinator, driver, rows)
    if driver.astray():
        yield Violation("I30", f"nobody will report {sorted(driver.astray())}, or they were reported and go on")
    tokens = [_tokens(coordinator, seq) for seq in driver.roster.running]
    chains = [_chain(coordinator, seq, known) for seq, known in zip(driver.roster.running, tokens, strict=True)]
    for seq, known, keys in zip(driver.roster.running, tokens, chains, strict=True):
        phase, computed, publish = (int(of[seq.row]) for of in (t.phase, t.computed, t.publish))
        loading = phase == _LOADING
        if loading != (seq.state is State.LOADING):
            yield Violation("I2", f"{seq.request!r} is {seq.state.value} but its row is {_phase(phase)}")
        if seq.state not in (State.LOADING, State.RUNNING):
            yield Violation("I2", f"{seq.request!r} has row {seq.row} but is {seq.state.value}")
        if not 0 <= computed < t.total[seq.row] <= t.limit[seq.row]:
            yield Violation("I11", f"{seq.request!r}: {computed} computed of {t.total[seq.row]} tokens")
        if not coordinator.has_run(seq) and computed % coordinator.spec.hit_tokens:
            yield Violation("I11", f"{seq.request!r}: a hit of {computed} tokens")
        if loading:
            yield from _audit_load(coordinator, seq)
            if seq not in driver.roster.watched:
                yield Violation("I30", f"{seq.request!r} waits for a load whose end nobody will notice")
        if bool(publish) != (seq.epoch == coordinator.connector.ledger.epoch):
            does = "publishes" if publish else "does not publish"
            yield Violation("I13", f"{seq.request!r} {does} what it writes, admitted in epoch {seq.epoch}")
        yield from _audit_names(coordinator, seq, known, keys)
        if seq.state is State.RUNNING and publish:
            yield from _audit_kept(coordinator, seq)
    yield from _audit_blocks(coordinator, driver.roster.running, chains)
    yield from _audit_possible(coordinator, driver.roster.waiting)
    for seq in driver.roster.waiting:
        if seq.row >= 0 or seq.state is not State.WAITING:
            yield Violation("I9", f"{seq.request!r} waits but holds row {seq.row}")
        twin = seq.waits_for
        if isinstance(twin, ForTwin) and twin.is_coming and twin.seq not in driver.roster.running:
            yield Violation("I30", f"{seq.request!r} waits for {twin.seq.request!r}, which does not run")
        yield from _audit_awaited(coordinator, seq)
    for seq in (*driver.roster.running, *driver.roster.waiting):
        cached = [*seq.cached_tokens.values()] if seq.cached_tokens is not None else [0]
        if min(cached) < 0 or sum(cached) >= len(seq.request.tokens) or seq.preemptions < 0:
            yield Violation("I25", f"{seq.request!r}: {cached} tokens were cached, {seq.preemptions} preemptions")


def _audit_kept(coordinator: Coordinator, seq: Tracked) -> Iterator[Violation]:
    """What hits at a kept boundary of the request's text need is not superseded in its row."""
    start, stop, _ = coordinator.tables.arrays.superseded[seq.row].tolist()
    for group in coordinator.spec.groups:
        if group.attention.kind is not Kind.FULL:
            bt, see = group.block_tokens, group.attention.first_visible
            for kept in seq.course.kept:
                first, end = max(see(kept) // bt, start // bt), min(-(-kept // bt), stop // bt)
                if first < end:
                    what = f"blocks {first} to {end} of group {group.name}"
                    yield Violation("I31", f"{seq.request!r}: {what} are superseded, and its hit at {kept} needs them")


def _audit_roster(coordinator: Coordinator, driver: Driver, rows: list[int]) -> Iterator[Violation]:
    """Every row leads to its request, and the other rows are free, each once."""
    roster, at = driver.roster, np.array(rows, np.int32)
    if sorted([*roster.free_rows, *rows]) != list(range(coordinator.tables.num_rows)):
        yield Violation("I2", f"rows {sorted(roster.free_rows)} are free, {sorted(rows)} are not")
    ids = [seq.request.request_id for seq in driver.roster.running]
    holders = [roster.holders[row] for row in rows]
    if holders != driver.roster.running or not roster.ids(at) == roster.names() == ids:
        yield Violation("I2", "rows lead to other requests than those that have them")
    if not np.array_equal(roster.rows(), at):
        yield Violation("I9", f"rows in service order are {rows}, not {roster.rows().tolist()}")


def _audit_load(coordinator: Coordinator, seq: Tracked) -> Iterator[Violation]:
    """A LOADING request waits for exactly the content of its own load."""
    connector, a = coordinator.connector, coordinator.pools.arrays
    load = next((x for x in connector.ledger.live() if x.ticket == seq.ticket), None)
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


def _audit_possible(coordinator: Coordinator, waiting: Sequence[Tracked]) -> Iterator[Violation]:
    """A waiting request would fit into empty pools, one token a step: each group's fullest state, all at once."""
    layout, kinds = coordinator.pools.layout, [(g.attention, g.block_tokens) for g in coordinator.spec.groups]
    blocks = [[_fullest(*kind, len(seq.tokens)) for kind in kinds] for seq in waiting]
    slabs = -(-np.array(blocks, np.int64).reshape(-1, len(kinds)) // layout.per_slab)
    for i in indices((slabs.sum(1) > layout.num_slabs) | (slabs > layout.most_slabs).any(1)):
        needs = slabs[i].tolist()
        yield Violation("I7", f"{waiting[i].request!r} waits for {needs} slabs, which are more than the pools have")


@lru_cache(maxsize=256)
def _fullest(attention: Attention, block_tokens: int, num_tokens: int) -> int:
    """The most blocks that any of the last tokens sees and lies in, looked at one by one."""
    span = attention.span_tokens
    if attention.kind is Kind.FULL:
        return -(-num_tokens // block_tokens)
    at = np.arange(max(0, num_tokens - 2 * (span + block_tokens)), num_tokens)
    if attention.kind is Kind.WINDOW or attention.kind is Kind.STATE:
        seen = np.maximum(0, at - span + 1)
    elif attention.kind is Kind.CHUNK:
        seen = at // span * span
    else:
        assert_never(attention.kind)
    return int((at // block_tokens - seen // block_tokens + 1).max())


def _audit_awaited(coordinator: Coordinator, seq: Tracked) -> Iterator[Violation]:
    """A request that waits for a transfer waits for one that brings its prefix, or looks again."""
    ledger = coordinator.connector.ledger
    settled = seq.waits_for.settled if isinstance(seq.waits_for, ForTransfer) else -1
    if settled > ledger.num_settled:
        yield Violation("I30", f"{seq.request!r} waits until more transfers have ended than have")
    elif settled == ledger.num_settled and ledger.num_live:
        found = [t for t in ledger.live() if t.state is not TransferState.EXPIRED and ledger.is_current(t)]
        remote = coordinator.door.remote
        fetched = [m.keys for m in remote.moves() if remote.is_live(m.ticket)] if remote is not None else []
        own = {key.tobytes() for key in seq.keys}
        if not any(key.tobytes() in own for keys in [*(t.keys for t in found), *fetched] for key in keys):
            yield Violation("I30", f"{seq.request!r} waits for a transfer that brings nothing of its own")


def _tokens(coordinator: Coordinator, seq: Tracked) -> npt.NDArray[np.int32]:
    """All tokens that a running request has."""
    t = coordinator.tables.arrays
    return np.concatenate([seq.tokens, t.generated[seq.row, : t.num_generated[seq.row]]])


def _chain(coordinator: Coordinator, seq: Tracked, tokens: npt.NDArray[np.int32]) -> Keys:
    """The chain over the request's own tokens."""
    return coordinator.chain.extend(seq.text.root, tokens, np.empty((0, 2), np.uint64))


def _audit_blocks(coordinator: Coordinator, running: Sequence[Tracked], chains: list[Keys]) -> Iterator[Violation]:
    """The blocks that rows hold against the chains over the requests' own tokens.

    A block with a name has that of its content. Two rows hold the same block only for the same content, whether it has
    a name or not.
    """
    t, a, spec = coordinator.tables.arrays, coordinator.pools.arrays, coordinator.spec
    all_marks, all_keys = a.mark, a.key
    for g, group in enumerate(spec.groups):
        units, table = group.block_tokens // spec.hash_tokens, coordinator.tables.table(g)
        blocks, names, holders = [np.empty(0, np.int32)], [np.empty((0, 2), np.uint64)], list[int]()
        for k, (seq, keys) in enumerate(zip(running, chains, strict=True)):
            lo, hi = t.span[seq.row, g, :2].tolist()
            end = min(hi, len(keys) // units)
            there = table[seq.row, lo:end] > 0  # states have gaps
            blocks.append(table[seq.row, lo:end][there])
            names.append(keys[units - 1 :: units][lo:end][there])
            holders += [k] * len(blocks[-1])
            if group.attention.kind is Kind.FULL and lo:
                yield Violation("I15", f"{seq.request!r}: full-attention group {group.name} has let go of {lo} blocks")
        held, key = np.concatenate(blocks), np.concatenate(names)
        entries = int(a.meta[g, _BASE]) + held
        wrong = (all_marks[entries] != _NONE) & _differ(all_keys[entries], key)
        for k in sorted({holders[i] for i in indices(wrong)}):
            whose = repr(running[k].request)
            yield Violation("I14", f"{whose}: a block of group {group.name} carries another content's key")
        order = np.argsort(held, kind="stable")
        held, key = held[order], key[order]
        for i in indices((held[1:] == held[:-1]) & _differ(key[1:], key[:-1])):
            x, y = (running[holders[order[i + n]]].request for n in (0, 1))
            yield Violation("I14", f"{group.name} block {held[i]}: {x!r} and {y!r} hold it for different tokens")


def _differ(some: Keys, others: Keys) -> npt.NDArray[np.bool_]:
    """Which of the keys are not the same."""
    differ: npt.NDArray[np.bool_] = (some[:, 0] != others[:, 0]) | (some[:, 1] != others[:, 1])
    return differ


def _audit_names(
    coordinator: Coordinator, seq: Tracked, tokens: npt.NDArray[np.int32], keys: Keys
) -> Iterator[Violation]:
    """A row's counters and keys against the chain over the request's own tokens."""
    t, spec, row = coordinator.tables.arrays, coordinator.spec, seq.row
    most = len(seq.request.tokens) + seq.request.max_new_tokens
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


def _phase(number: int) -> str:
    """A phase, for a report."""
    return Phase(number).name if number in list(Phase) else f"in phase {number}"
