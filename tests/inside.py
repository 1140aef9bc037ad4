"""What tests look at, or damage, inside kvtier: the only place that knows the names of its private parts.

``of`` is a ``KVCache``, or what drives one: a ``Scheduler``, a ``CacheManager``, or their ``Running``. What serves
copies is in ``inside_copies``, and is found here too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from inside_copies import *  # noqa: F403

from kvtier import KVCache
from kvtier.pools.block_pool import Col, Mark
from kvtier.remote.backends.uri import SpillWhen

if TYPE_CHECKING:
    from kvtier import CacheManager, HostTier, Scheduler
    from kvtier.coordinator.boundaries import Boundaries
    from kvtier.coordinator.compactor import Compactor
    from kvtier.coordinator.coordinator import Coordinator
    from kvtier.coordinator.core import Core
    from kvtier.coordinator.extension import Extension
    from kvtier.coordinator.inbox import Inbox
    from kvtier.coordinator.keeping import Keeping
    from kvtier.coordinator.match import Matcher
    from kvtier.coordinator.request import FinishReason
    from kvtier.coordinator.returns import Before
    from kvtier.coordinator.roster import Roster
    from kvtier.coordinator.running import Running
    from kvtier.coordinator.step import GroupView, Step
    from kvtier.coordinator.tracked import Tracked
    from kvtier.cpu_offload.connector import Connector
    from kvtier.cpu_offload.ends import Bools
    from kvtier.cpu_offload.engines import Outcome
    from kvtier.cpu_offload.store_policy import StorePolicy
    from kvtier.cpu_offload.transfer import Transfer
    from kvtier.host_tier.scheduler import HostTierScheduler
    from kvtier.pools.arena import Arena
    from kvtier.pools.block_pool import BlockPools
    from kvtier.remote.tier import RemoteTier
    from kvtier.testing import Faults

    Whole = KVCache | Scheduler | CacheManager | Running


# --- a cache --------------------------------------------------------------------------------------


def core(of: Whole) -> Core:
    """The parts of the cache."""
    return of.core if isinstance(of, KVCache) else of._core


def pools(of: Whole) -> BlockPools:
    """The pools of the device."""
    return core(of).coordinator.pools


def host(of: Whole) -> BlockPools | None:
    """The pools of the host tier, if there is one."""
    return core(of).host


def arena(of: Whole) -> Arena:
    """The memory of the device."""
    return core(of).arenas[0]


def host_arena(of: Whole) -> Arena | None:
    """The memory of the host tier, if there is one."""
    return core(of).arenas[1]


def scratch(of_pools: BlockPools) -> np.ndarray:
    """Where pools note per group what they are asked for."""
    return of_pools._wanted


def blow_up(memory: np.ndarray) -> None:
    """Damage: every number in this memory, uint8 [n], is NaN or infinite, be it of 8, 16 or 32 bits."""
    memory.view(np.uint16)[:] |= 0x7F80


def blow_up_host(of: Whole, at: int | None = None) -> None:
    """Damage to blocks of the host tier that can be found: to all of them, or to one, whichever ``at`` comes to."""
    memory, pools_of_host = host_arena(of), host(of)
    assert memory is not None and pools_of_host is not None
    ready = np.flatnonzero(pools_of_host.arrays.mark == Mark.READY)
    for entry in (ready if at is None else ready[at % len(ready) :][:1]).tolist():
        bases = pools_of_host.column(Col.BASE)
        g = int(np.searchsorted(bases, entry, side="right")) - 1
        start = int(memory.origins[g] + (entry - bases[g]) * memory.strides[g])
        blow_up(memory.bytes[start : start + int(memory.block_bytes[g])])


# --- requests -------------------------------------------------------------------------------------


def coordinator(of: Whole) -> Coordinator:
    """What admits requests and lets them go."""
    return core(of).coordinator


def after_disown(of: Whole, check: Callable[[Tracked], None]) -> None:
    """``check`` is called right after a failed request's text was disowned."""
    original = coordinator(of).disown

    def disown(seq: Tracked) -> None:
        original(seq)
        check(seq)

    coordinator(of).disown = disown  # type: ignore[method-assign]


def matcher(of: Whole) -> Matcher:
    """What finds the prefixes of prompts in both tiers."""
    return coordinator(of)._matcher


def stores(of: Whole) -> StorePolicy:
    """What decides which blocks are stored."""
    return coordinator(of)._stores


def wanted_keys(boundaries: Boundaries) -> set[bytes]:
    """Boundaries that somebody has wanted."""
    return set(boundaries._wanted)


def keeping(of: Whole) -> Keeping:
    """What decides what stays."""
    return coordinator(of).retention.keeping


def num_marks(of: Whole) -> int:
    """Marks that texts have left for explanations."""
    return len(coordinator(of)._trail._marks)


def _learn_nothing(*_: object) -> None:
    pass


def _never_seen(*_: object) -> tuple[bool, Before]:
    from kvtier.coordinator.returns import Before

    return False, Before()


def _nothing_known(_: object) -> Before:
    return _never_seen()[1]


def learn_nothing(of: Whole) -> None:
    """Which ends pay never changes, and nobody comes back: no two states would have these numbers in common."""
    keeping(of).boundaries.learn = _learn_nothing  # type: ignore[method-assign]
    known = keeping(of).returns
    known.begin, known.end = _never_seen, _learn_nothing  # type: ignore[method-assign]
    known.known = _nothing_known  # type: ignore[method-assign]
    known._places = known._places[:0].copy()  # it would be copied with each state


def pass_nothing(of: Whole) -> None:
    """What windows pass has not paid."""
    from kvtier.coordinator.boundaries import End

    keeping(of).boundaries._credits[End.PASSED] = 0.0
    keeping(of).boundaries._apps.clear()
    keeping(of).boundaries._newest = None


def touch_nothing(of: Scheduler) -> None:
    """What waits is not kept warm."""
    of._coming._touch = lambda requests: None  # type: ignore[method-assign]


def is_stale(of: Scheduler) -> bool:
    """Whether a request has left since the hits of those that wait were touched."""
    return of._coming.is_stale


def laundered(of: Whole) -> np.ndarray:
    """The pools' counts when the margin of clean blocks was last seen to."""
    return coordinator(of).retention._laundered


def around_moves(compactor: Compactor, around: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """From now on the compactor moves blocks by ``around(move)``."""
    compactor._move = around(compactor._move)


def around_movable(compactor: Compactor, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """From now on the compactor asks ``around(movable)`` which blocks of a slab can be moved."""
    compactor._movable = around(compactor._movable)


def running(of: Scheduler | CacheManager | Extension) -> Running:
    """The rows in service and the step under way."""
    return of._running


def inbox(scheduler: Scheduler) -> Inbox:
    """What other threads have asked for."""
    return scheduler._inbox


def forget_requests(scheduler: Scheduler) -> None:
    """Damage: nobody knows the ids of the requests any more."""
    scheduler._inbox._known.clear()


def arrived(scheduler: Scheduler) -> list[Tracked]:
    """Requests that were added and that no step has looked at."""
    return scheduler._inbox._arrived


def asked_to_end(scheduler: Scheduler) -> list[tuple[Tracked, FinishReason]]:
    """Requests that somebody has asked to end."""
    return scheduler._inbox._ended


def settled_seen(scheduler: Scheduler) -> int:
    """Transfers that had ended when the last step was made."""
    return scheduler._settled_seen


def finish(scheduler: Scheduler, seq: Tracked, reason: FinishReason) -> None:
    """The scheduler ends a request."""
    scheduler._finish(seq, reason)


def cut_views_again(scheduler: Scheduler) -> None:
    """A scheduler that was pickled has views that no longer belong to their arrays; it makes new ones."""
    entries = scheduler._entries
    entries._handed_out = (-1, 0, 0, 0), entries._arrays
    entries._exports._shape, entries._exports._slot_views = (-1, -1), (-1, [])


def step_of(view: GroupView) -> Step:
    """The step that a view of one group belongs to."""
    return view._step


def loading(roster: Roster) -> list[Tracked]:
    """Requests whose loads are looked after."""
    return roster._loading


def by_row(roster: Roster) -> list[Tracked | None]:
    """Who has each row."""
    return roster._by_row


def free_rows(roster: Roster) -> list[int]:
    """Rows that nobody has."""
    return roster._free_rows


def kept_rows(roster: Roster) -> np.ndarray:
    """The rows in service order, if they are kept since the last change."""
    return roster._rows


def keep_rows(roster: Roster, rows: np.ndarray) -> None:
    """Damage: the roster keeps these rows."""
    roster._rows = rows


def keep_names(roster: Roster, names: list[str]) -> None:
    """Damage: the roster keeps these names."""
    roster._names = names


# --- transfers ------------------------------------------------------------------------------------


def connector(of: Whole) -> Connector:
    """The owner of the transfers."""
    return core(of).coordinator.connector


def woken(of: Whole) -> Any:
    """What ends a ``wait``."""
    return connector(of)._woken


def sleep_on(of: Whole, wakeup: Any) -> None:
    """A ``wait`` sleeps on ``wakeup`` from now on."""
    connector(of)._woken = wakeup


def planned(of: Whole) -> deque[Transfer]:
    """Stores that are not submitted yet."""
    return connector(of)._queue.planned


def fencing(of: Whole) -> dict[int, Transfer]:
    """Stores that fence their source, by ticket."""
    return connector(of)._fencing


def failed_loads(of: Whole) -> dict[int, str]:
    """Why loads have failed that the scheduler has not been told of, by ticket."""
    return connector(of)._ends.failed_loads


def at_end_of_loads(of: Whole | HostTier, look: Callable[[Transfer, Bools], None]) -> None:
    """``look(load, good)`` is called whenever a load's end is taken note of, given up or not, and nothing is told or
    free yet."""
    ends = (connector(of) if hasattr(of, "core") or hasattr(of, "_core") else of._connector)._ends
    load, late = ends.load, ends.late

    def ended(t: Transfer, good: Bools, *rest: Any) -> None:
        look(t, good)
        load(t, good, *rest)

    def ended_late(t: Transfer, outcome: Outcome, *rest: Any) -> None:
        if t.direction.value == "load":
            good = np.full(len(t.groups), not outcome.error)
            if outcome.bad is not None:
                good = ~np.isin(np.arange(len(good)), outcome.bad)
            look(t, good)
        late(t, outcome, *rest)

    ends.load, ends.late = ended, ended_late  # type: ignore[method-assign]


def hang_tickets(of: Whole) -> tuple[int, int]:
    """The last stores that were overdue and that have ended."""
    return connector(of)._last_overdue, connector(of)._last_ended


def most_in_flight(of: Whole) -> int:
    """Bytes of stores up to which further ones are submitted."""
    return connector(of)._queue.most_in_flight


def lift_most_in_flight(of: Whole, num_bytes: int) -> None:
    """Submits stores up to so many bytes from now on."""
    connector(of)._queue.most_in_flight = num_bytes


def count_store_bytes(of: Whole, num_bytes: int) -> None:
    """Damage: so many bytes more are said to be on the link."""
    connector(of)._queue.num_bytes += num_bytes


def count_overdue(of: Whole, num: int) -> None:
    """Damage: so many transfers more are said to be overdue."""
    connector(of).ledger._num_expired += num


def say_that_stores_hang(of: Whole) -> None:
    """Damage: a store of a late ticket is said to be overdue."""
    connector(of)._last_overdue = 10**6


# --- a host tier of its own -----------------------------------------------------------------------


def tier_pools(tier: HostTier) -> BlockPools:
    """Its pools."""
    return tier._pools


def tier_keeping(tier: HostTier | HostTierScheduler) -> Keeping:
    """What decides what stays."""
    return tier._parts.keeping


def tier_arena(tier: HostTier) -> Arena:
    """Its memory."""
    return tier._bytes._guard._arenas[0]


def everything(of: Any, seen: set[int] | None = None) -> Any:
    """All that an object has and what its parts have, as plain values: equal ones show that nothing has changed."""
    seen = set() if seen is None else seen
    if isinstance(of, np.ndarray):
        return of.dtype.str, of.shape, of.tobytes()
    if of is None or isinstance(of, (bool, int, float, str, bytes, Enum, np.generic)):
        return repr(of)
    if id(of) in seen:
        return "..."
    seen.add(id(of))
    if isinstance(of, Mapping):
        return [(repr(key), everything(value, seen)) for key, value in of.items()]
    if isinstance(of, (set, frozenset)):
        return sorted(map(repr, of))
    if isinstance(of, (list, tuple, deque)):
        return [everything(value, seen) for value in of]
    if callable(of) or not hasattr(of, "__dict__"):
        return type(of).__name__
    return {name: everything(value, seen) for name, value in vars(of).items()}


def use_faults(engine: Any, faults: Faults) -> None:
    """The copies of a ``SimulatedEngine``, or of a ``FaultyEngine``, have these from now on."""
    engine._faults = faults
    engine._chances = [faults.fail, faults.tear, faults.corrupt]


def vllm_books(connector: Any) -> HostTierScheduler:
    """The books of a ``KvtierConnector`` in the scheduler's role."""
    return connector._scheduler.books


def vllm_side(connector: Any) -> Any:
    """The scheduler's side of a ``KvtierConnector``."""
    return connector._scheduler


def vllm_clock(connector: Any, now: Callable[[], float]) -> None:
    """The scheduler's side tells the time by this clock, and with it what it measures of a step."""
    side = connector._scheduler
    for one in (side, side._behind):
        if one is not None:
            one._clock = now


def tracing_thread(traces: Any) -> threading.Thread:
    """That reads the journal and sends spans."""
    return traces._thread


def forget_hashes(connector: Any) -> None:
    """Of the blocks that may be stored."""
    connector._scheduler._events._hashes._at.clear()


def vllm_worker(connector: Any) -> Any:
    """The ``HostTierWorker`` of a ``KvtierConnector``."""
    return connector._worker.worker


def relay_clock(books: HostTierScheduler, now: Callable[[], float]) -> None:
    """Deadlines use this clock."""
    books._relay._clock = now


def behind_tier(tier: HostTier) -> RemoteTier:
    """The tier of the remote tier."""
    remote = tier._parts.door.remote
    assert remote is not None
    return remote


def host_memories(engine: Any) -> list[np.ndarray]:
    """Of the tests' engine with memory of its own, or of its workers."""
    return [of._bytes.blocks.arenas[1].bytes for of in getattr(engine, "workers", [engine.tier])]


def forget_facts(workers: list[Any]) -> None:
    """Workers of vLLM that do not say what the names in a store depend on."""
    for worker in workers:
        worker.connector._worker_side._facts.clear()


def remote_due_s(tier: HostTier) -> float:
    """How long it sleeps at most for the sake of the remote tier."""
    return tier._parts.door.due_s(tier._parts.asking)


def compute_seconds(tier: HostTier) -> Callable[[int, int], float | None]:
    """What the store's fetches are compared with."""
    seeker = tier._parts.door._seeker
    assert seeker is not None
    return seeker.compute_s


def tier_connector(tier: HostTier) -> Connector:
    """The owner of its transfers."""
    return tier._connector


def spill_at_eviction(of: Whole) -> None:
    """As ``spill=eviction`` in a store's URI, of a cache that was given a store itself."""
    remote = coordinator(of).door.remote
    remote._when = remote._spills._when = SpillWhen.EVICTION


def waiting_to_be_spilled(of: Whole) -> list[Any]:
    """Texts that wait for evictions from the host."""
    return list(coordinator(of).door.remote._spills._later)
