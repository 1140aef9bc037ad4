"""Going back to a state, and telling whether two states are the same.

``freeze`` and ``thaw`` copy the whole object graph of a world by pickling it; objects that never change (spec, keys,
requests, arenas) stay shared. ``canonical`` names a state. What it leaves out cannot influence what happens next:

- numbers of blocks and rows. Loops never compare them: blocks go out in the order of their lists, rows are visited in
  service order. So blocks are renamed in the order of the cached list, the empty list, transfers and rows; rows take
  the order of ``running``.
- tickets, but for the order of those that are live. A request that loads keeps the ticket of a transfer that has
  ended only until the next ``schedule``, as "landed" or "failed".
- ``num_settled``: only compared with ``ForTransfer.settled`` and ``_settled_seen``, and it only grows: "equal" or
  "not equal" says all. ``EVICTED``: only compared with what ``_laundered`` remembers, so the difference says all.
- arrival numbers, but for their order; a new arrival comes last.
- what is only reported: counters, statistics, texts of reasons, ``preemptions``, ``hit``, ``cached_tokens``.
- what is written before it is read: the step's work arrays, contents of free rows, keys of blocks that have none,
  the chain, tail and newest token of rows that are not decoding.
- the order of the boundaries that ``Boundaries`` remembers: so few are never forgotten.
- how the key index is laid out, which decides how long a lookup takes but not what it finds.
- the clock: it stands still, and a deadline lies in the past or it does not. The epoch: nobody calls ``reset``.

``test_explore.py`` checks the claim itself: states that were merged have the same successors.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import marshal
import pickle
import sys
import threading
from types import CellType, CodeType, FunctionType
from typing import Any

import inside

from kvtier import CacheSpec, Request
from kvtier.coordinator.tracked import ForTransfer, ForTwin, Tracked
from kvtier.cpu_offload.memory_guard import MemoryGuard
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction
from kvtier.geometry.keys import KeyChain
from kvtier.gpu_pool.row_state import Phase
from kvtier.machine.wakeup import Wakeup
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools, Col, Mark

from .stepwise_backend import ListedPlan, NamesOnly, seek_state, store_state
from .tiny import Config, World

# --- freeze and thaw ------------------------------------------------------------------------------

_shared: list[Any] = []
_number: dict[int, int] = {}


def _get_shared(number: int) -> Any:
    return _shared[number]


def _share(thing: Any) -> tuple[Any, ...]:
    number = _number.get(id(thing))
    if number is None:
        number = _number[id(thing)] = len(_shared)
        _shared.append(thing)
    return _get_shared, (number,)


def _new_wakeup(is_set: bool) -> Wakeup:
    wakeup = Wakeup()
    if is_set:
        wakeup.set()
    return wakeup


_TABLE: dict[type, Any] = {
    **copyreg.dispatch_table,
    **dict.fromkeys((CacheSpec, KeyChain, Arena, TierMemory, MemoryGuard, Request, Config, CodeType), _share),
    **dict.fromkeys((ListedPlan, NamesOnly), _share),
    CellType: lambda cell: (_new_cell, (cell.cell_contents,)),
    type(threading.Lock()): lambda _: (threading.Lock, ()),
    type(threading.RLock()): lambda _: (threading.RLock, ()),
    Wakeup: lambda wakeup: (_new_wakeup, (wakeup.is_set(),)),
}


def _new_cell(contents: Any) -> CellType:
    return CellType(contents)


def _new_function(code: Any, module: str, name: str, defaults: Any, cells: tuple[CellType, ...]) -> FunctionType:
    return FunctionType(code, vars(sys.modules[module]), name, defaults, cells)


class _WithClosures(pickle.Pickler):
    """Functions that were defined in others go along with what they refer to: who waits for an answer is one."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, FunctionType) and "<locals>" in thing.__qualname__:
            cells = thing.__closure__ or ()
            return _new_function, (thing.__code__, thing.__module__, thing.__name__, thing.__defaults__, cells)
        return NotImplemented


def forget_shared() -> None:
    """Drops what frozen worlds share; they can not be thawed any more."""
    _shared.clear()
    _number.clear()


def freeze(world: World) -> bytes:
    """A world as bytes; valid until ``forget_shared``."""
    buffer = io.BytesIO()
    pickler = (_WithClosures if world.calls is not None else pickle.Pickler)(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _TABLE
    pickler.dump(world)
    return buffer.getvalue()


def thaw(frozen: bytes) -> World:
    """A copy of the world that was frozen."""
    world: World = pickle.loads(frozen)
    inside.cut_views_again(world.scheduler)  # pickling cuts kept views off from their arrays
    return world


# --- names of states ------------------------------------------------------------------------------


def name_of(world: World) -> bytes:
    """16 bytes that two worlds share if they are in the same state."""
    return hashlib.blake2b(marshal.dumps(canonical(world), 2), digest_size=16).digest()


class _Namer:
    """New names for the blocks of one tier, in the order in which they are met."""

    def __init__(self, pools: BlockPools) -> None:
        self.meta = pools.arrays.meta.tolist()
        self.names: list[dict[int, int]] = []
        self.lists = []
        for g, meta in enumerate(self.meta):
            cached, empty = pools.coldest(g, meta[Col.ROWS]).tolist(), pools.empties(g)
            self.lists.append((len(cached), pools.num_superseded(g), len(empty)))
            self.names.append({0: 0})
            for b in cached + empty:
                self.of(len(self.names) - 1, b)

    def of(self, g: int, b: int) -> int:
        names = self.names[g]
        return names.setdefault(b, len(names))

    def state(self, pools: BlockPools, rank: dict[int, int]) -> tuple[Any, ...]:
        """Every block's state, in the order of the new names; asked for when all blocks have been met."""
        a, out = pools.arrays, []
        refs, place, mark, fence, key = (x.tolist() for x in (a.refs, a.place, a.mark, a.fence, a.key))
        for g, meta in enumerate(self.meta):
            for b in range(1, meta[Col.ROWS]):
                self.of(g, b)
            for b in self.names[g]:
                i = meta[Col.BASE] + b
                words = tuple(key[i]) if mark[i] != Mark.NONE else ()
                ticket = abs(fence[i])
                out.append(
                    (place[i], refs[i], mark[i], words, (rank.get(ticket, -2) + 1) * (1 if fence[i] > 0 else -1))
                )
        return tuple(self.lists), tuple(out)


def canonical(world: World) -> tuple[Any, ...]:
    """The state of a world as nested tuples of plain values; see the module's docstring."""
    cache, scheduler, connector, engine = world.cache, world.scheduler, world.connector, world.engine
    device, host = _Namer(inside.pools(cache)), _Namer(inside.host(cache)) if inside.host(cache) is not None else None
    live = connector.ledger.live()
    rank = {t.ticket: i for i, t in enumerate(live)}
    assert connector.ledger.epoch == 0
    transfers = tuple(
        (
            t.direction is Direction.LOAD,
            t.state.value,
            t.cold,
            None if t.superseded is None else t.superseded.tolist(),
            t.deadline_s < 0,
            t.ticket in engine.live,
            tuple(
                (g, device.of(g, d), host.of(g, h), *key)
                for g, d, h, key in zip(
                    t.groups.tolist(), t.device.tolist(), t.host.tolist(), t.keys.tolist(), strict=True
                )
            ),
        )
        for t in live
        if host is not None
    )
    roster = scheduler.roster
    assert inside.kept_rows(roster).tolist() == [s.row for s in roster.running]
    running = tuple(_running(world, seq, device, rank) for seq in roster.running)
    waiting = tuple(_tracked(world, seq, rank) for seq in roster.waiting)
    step = world.step
    seen = inside.laundered(scheduler)
    books = connector.books
    return (
        running,
        waiting,
        tuple(_tracked(world, seq, rank) for seq in inside.arrived(scheduler)),
        tuple((_tracked(world, seq, rank), reason) for seq, reason in inside.asked_to_end(scheduler)),
        tuple((r.request_id, r.finish_reason, len(r.token_ids)) for r in scheduler.reports.pending),
        None if step is None else (tuple(step.request_ids), step.seq_lens.tolist(), step.query_start.tolist()),
        (world.asleep, connector.ledger.num_settled == inside.settled_seen(scheduler), inside.woken(cache).is_set()),
        tuple(sorted(world.added)),
        tuple(sorted(world.aborted)),
        tuple(sorted(world.reported)),
        tuple(sorted(world.advanced)),
        transfers,
        tuple(rank[ticket] for ticket in books.planned),
        books.store_bytes,
        connector.stores_hang,
        *(sum(ticket <= last for ticket in rank) for last in inside.hang_tickets(cache)),
        tuple((rank[o.ticket], bool(o.error), None if o.bad is None else tuple(o.bad)) for o in engine.ended),
        sorted(inside.wanted_keys(inside.keeping(scheduler).boundaries)),
        inside.is_stale(scheduler),
        None if not seen.size else (seen[:2].tolist(), (seen[2] - inside.pools(cache).column(Col.EVICTED)).tolist()),
        None if world.calls is None else store_state(world.remote, world.calls, host.of, connector.ledger.num_settled),
        device.state(inside.pools(cache), rank),
        None if host is None else host.state(inside.host(cache), rank),
    )


def _tracked(world: World, seq: Tracked, rank: dict[int, int]) -> tuple[Any, ...]:
    connector, wait = world.connector, seq.waits_for
    ticket: Any = rank.get(seq.ticket, "failed" if seq.ticket in inside.failed_loads(world.cache) else "")
    return (
        seq.request.request_id,
        seq.state.value,
        ticket,
        seq.tokens.tolist(),
        seq.use_host,
        isinstance(wait, ForTransfer) and wait.settled == connector.ledger.num_settled,
        (wait.seq.request.request_id, wait.until, wait.is_coming) if isinstance(wait, ForTwin) else None,
        (seq.course.has_begun, *sorted(seq.course.branches)),
        seq.is_warm,
        None if world.calls is None else seek_state(world.remote, seq.seek),
    )


def _running(world: World, seq: Tracked, device: _Namer, rank: dict[int, int]) -> tuple[Any, ...]:
    tables = inside.coordinator(world.cache).tables
    t, r = tables.arrays, seq.row
    phase, computed, generated = int(t.phase[r]), int(t.computed[r]), int(t.num_generated[r])
    decoding = ()
    if phase == Phase.DECODE:
        tail = t.tail[r, : computed % t.tail.shape[1]].tolist()
        decoding = (t.chain[r].tolist(), tail, int(t.last[r]))
    held = []
    for g in range(len(device.meta)):
        lo, hi = int(t.lo[g, r]), int(t.hi[g, r])
        partings = t.span[r, g, 2:].tolist()
        held.append((lo, [device.of(g, b) for b in tables.table(g)[r, :hi].tolist()], partings))
    return (
        *_tracked(world, seq, rank),
        (phase, computed, int(t.total[r]), int(t.limit[r]), int(t.publish[r]), t.superseded[r].tolist(), decoding),
        t.generated[r, :generated].tolist(),
        held,
    )
