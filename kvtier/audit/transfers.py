"""The audit of transfers (I1, I13, I14, I17 - I19, I22): the blocks of all of them at once, whatever their number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.audit.pools import Int64s, Tier, Violation, distinct, indices
from kvtier.coordinator.coordinator import Coordinator
from kvtier.cpu_offload.books import Books
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.gpu_pool.row_state import Phase
from kvtier.pools.block_pool import Ids, Mark, Place, Words, fence_of

Bools = npt.NDArray[np.bool_]

_NONE, _PENDING, _READY = (int(m) for m in Mark)
_FREE = int(Phase.FREE)
_EMPTY, _CACHED, _FENCED, _QUARANTINED = (int(p) for p in (Place.EMPTY, Place.CACHED, Place.FENCED, Place.QUARANTINED))
_NOBODY = np.empty(0, np.int64)
_NOT_ENDED = (TransferState.PLANNED, TransferState.IN_FLIGHT)


@dataclass(frozen=True)
class Copies:
    """The blocks of all live transfers, one transfer after another; [n] each."""

    transfers: list[Transfer]
    of: npt.NDArray[np.intp]
    """The transfer of each block, by index."""
    groups: Ids
    device: Ids
    host: Ids
    keys: Words
    is_store: Bools
    is_overdue: Bools
    is_current: Bools
    """Blocks of transfers of this epoch that are not overdue."""
    is_ordered: Bools
    """Blocks of a store with all writers ordered behind it."""

    @classmethod
    def of_all(cls, transfers: list[Transfer], epoch: int) -> Copies:
        sizes = [len(t.groups) for t in transfers]
        of, none = np.repeat(np.arange(len(sizes)), sizes), np.empty(0, np.int32)
        overdue = np.array([t.state is TransferState.EXPIRED for t in transfers], bool)
        return cls(
            transfers,
            of,
            np.concatenate([none, *(t.groups for t in transfers)]),
            np.concatenate([none, *(t.device for t in transfers)]),
            np.concatenate([none, *(t.host for t in transfers)]),
            np.concatenate([np.empty((0, 2), np.uint64), *(t.keys for t in transfers)]),
            np.array([t.direction is Direction.STORE for t in transfers], bool)[of],
            overdue[of],
            np.array([t.epoch == epoch for t in transfers], bool)[of] & ~overdue[of],
            np.array([t.ordered for t in transfers], bool)[of],
        )

    def ids(self, tier: Tier) -> Ids:
        """The blocks of one tier."""
        return self.host if tier.name == "host" else self.device

    def on(self, tier: Tier, which: Bools) -> Int64s:
        """Entries of the blocks that lie inside their pools; other blocks are reported separately (I22)."""
        return tier.entries(self.groups[which], self.ids(tier)[which])

    def tickets(self, blocks: npt.NDArray[np.intp]) -> list[int]:
        """Tickets of the transfers with any of these blocks."""
        return [self.transfers[k].ticket for k in distinct(self.of[blocks])]


def device_owners(tier: Tier, coordinator: Coordinator, copies: Copies) -> Int64s:
    """Entries once per row that holds them and once per load that writes them."""
    t, owners = coordinator.tables.arrays, [copies.on(tier, ~copies.is_store)]
    for g in range(len(coordinator.spec.groups)):
        table, at = coordinator.tables.table(g), np.arange(coordinator.tables.table(g).shape[1])
        inside = (at >= t.span[:, g, :1]) & (at < t.span[:, g, 1:2]) & (t.phase != _FREE)[:, None]
        held = table[inside & (table > 0)]  # states have gaps
        owners.append(tier.entries(np.full(len(held), g, np.int32), held))
    return np.concatenate(owners)


def host_owners(tier: Tier, copies: Copies, beside: Int64s = _NOBODY) -> Int64s:
    """Entries once per transfer that reads or writes them, and ``beside``, which moves to and from a remote hold."""
    return np.concatenate([tier.entries(copies.groups, copies.host), beside])


def audit_fences(tier: Tier, copies: Copies | None) -> Iterator[Violation]:
    """The fences match the live stores without a writer ordered behind them, negative once overdue."""
    a = tier.pools.arrays
    expected = np.zeros_like(a.fence)
    if copies is not None:
        fences = np.array([fence_of(t.ticket) for t in copies.transfers], expected.dtype)[copies.of]
        which = copies.is_store & ~copies.is_ordered & tier.has(copies.groups, copies.device)
        expected[copies.on(tier, which)] = np.where(copies.is_overdue, -fences, fences)[which]
    fence, place = a.fence, a.place
    for i in indices(fence != expected):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: fence {fence[i]}, the live stores ask for {expected[i]}")
    for i in indices((place == _FENCED) & (fence <= 0)):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: FENCED without a fence")
    for i in indices((fence != 0) & ((place == _EMPTY) | (place == _CACHED))):
        g, b = tier.block_of(i)
        yield Violation("I17", f"{tier.where(g)} block {b}: could be handed out while a store reads it")


def audit_quarantine(tier: Tier, books: Books, copies: Copies, overdue: Int64s = _NOBODY) -> Iterator[Violation]:
    """Blocks are out of circulation only as long as an overdue copy, or a changed byte, keeps them there.

    ``overdue``: entries of overdue fetches from a remote.
    """
    a = tier.pools.arrays
    reasons = np.zeros(len(a.place), bool)
    reasons[overdue] = True
    if tier.name == "host":
        reasons[copies.on(tier, copies.is_overdue)] = True
        for groups, blocks in books.corrupt:
            reasons[tier.entries(groups, blocks)] = True
    else:
        reasons[copies.on(tier, copies.is_overdue & ~copies.is_store)] = True
        reasons |= (a.fence < 0) & (a.refs == 0)
    for i in indices((a.place == _QUARANTINED) != reasons):
        g, b = tier.block_of(i)
        what = "should be QUARANTINED" if reasons[i] else "QUARANTINED for no reason"
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
    counted = coordinator.connector.ledger.num_progressing
    if progressing != counted:
        yield Violation("I18", f"{progressing} transfers progress, {counted} are counted")
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


def audit_transfers(
    coordinator: Coordinator, device: Tier, host: Tier, copies: Copies, fetched: Int64s = _NOBODY
) -> Iterator[Violation]:
    """Each transfer by itself, then all of them against each other and against the marks.

    ``fetched``: entries of the host that a remote is bringing.
    """
    c, tickets = copies, [t.ticket for t in copies.transfers]
    if tickets != sorted(set(tickets)):
        yield Violation("I18", f"transfers {tickets} are not in the order of their plans")
    block_bytes = np.array([group.block_bytes for group in coordinator.spec.groups])
    for t, num_bytes in zip(c.transfers, np.bincount(c.of, block_bytes[c.groups], len(tickets)), strict=True):
        if t.num_bytes != num_bytes:
            yield Violation("I18", f"transfer {t.ticket}: {t.num_bytes:,} bytes are not those of its blocks")
        if t.state is not TransferState.EXPIRED and t.state not in _NOT_ENDED:
            yield Violation("I18", f"transfer {t.ticket} is {t.state.value} and still listed")
        if t.direction is Direction.LOAD and t.state is TransferState.PLANNED:
            yield Violation("I18", f"load {t.ticket} was never submitted")
    for tier, writes in ((device, ~c.is_store), (host, c.is_store)):
        ids, inside = c.ids(tier), tier.has(c.groups, c.ids(tier))
        for ticket in c.tickets(indices(~inside | (ids == 0))):
            yield Violation("I22", f"transfer {ticket} names a block outside its pool")
        written = np.bincount(c.on(tier, writes), minlength=len(tier.pools.arrays.blocks))
        for i in indices(written > 1).tolist():
            yield Violation("I17", f"{_block(tier, i)}: {written[i]} transfers write it at once")
        if tier is device:
            for i in indices((written > 0) & (tier.pools.arrays.fence != 0)).tolist():
                yield Violation("I17", f"{_block(device, i)}: a load writes what a store reads")
        else:
            read = c.on(tier, ~writes)
            for i in distinct(read[written[read] > 0]):
                yield Violation("I17", f"{_block(host, i)}: a load reads what a store writes")
        brought = c.on(tier, writes & c.is_current)
        yield from _audit_pending(tier, np.concatenate([brought, fetched]) if tier is host else brought)
        named = inside & (ids > 0) & c.is_current
        yield from _audit_keys(tier, c, writes & named, is_read=False)
        # behind a store that writers were ordered after, the source may have its next owner already
        yield from _audit_keys(tier, c, ~writes & named & ~c.is_ordered, is_read=True)


def _block(tier: Tier, entry: int) -> str:
    """A block, for a report."""
    g, b = tier.block_of(entry)
    return f"{tier.where(g)} block {b}"


def _audit_keys(tier: Tier, copies: Copies, which: Bools, is_read: bool) -> Iterator[Violation]:
    """The blocks carry their transfer's keys: PENDING or READY if it writes, READY if it reads."""
    a, at = tier.pools.arrays, indices(which)
    if not len(at):
        return
    entries = tier.base[copies.groups[at]] + copies.ids(tier)[at]
    mark, key, expected = a.mark[entries], a.key[entries], copies.keys[at]
    lost = mark != _READY if is_read else mark == _NONE
    for ticket in copies.tickets(at[lost]):
        yield Violation("I19", f"{tier.name} blocks of transfer {ticket} are not found by anybody")
    other = (key[:, 0] != expected[:, 0]) | (key[:, 1] != expected[:, 1])
    for ticket in copies.tickets(at[other & ~lost]):
        yield Violation("I14", f"{tier.name} blocks of transfer {ticket} carry other keys than its content's")


def _audit_pending(tier: Tier, brought: Int64s) -> Iterator[Violation]:
    """PENDING keys are exactly the keys that a live transfer of this epoch is bringing."""
    mark = tier.pools.arrays.mark
    is_brought = np.zeros(len(mark), bool)
    is_brought[brought] = True
    for i in indices((mark == _PENDING) & ~is_brought).tolist():
        yield Violation("I19", f"{_block(tier, i)}: PENDING, but no transfer brings it")
    for i in indices((mark == _READY) & is_brought).tolist():
        yield Violation("I13", f"{_block(tier, i)}: findable while a transfer writes it")
