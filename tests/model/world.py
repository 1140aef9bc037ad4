"""A small world in which anything can happen to a cache: rules to change it, and what must hold after each.

``World`` is driven by a Hypothesis state machine (test_machine.py) and by a long random walk (soak.py). Every rule
takes plain numbers and is harmless where it does not apply, so that a failing walk can be cut down and printed as a
script. Every rule is followed by a full audit; every text is compared with the oracle's; every exported index array
is checked against the masks.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import inside
import numpy as np
import pytest
from core.driving import HeldEngine, check_step, check_text

from kvtier import (
    CacheClosed,
    CacheSpec,
    ChunkedLocal,
    FinishedRequest,
    FullAttention,
    KVCache,
    Request,
    RequestTooLarge,
    Scheduler,
    SlidingWindow,
    Step,
)
from kvtier.audit.run import AuditLevel
from kvtier.coordinator.seek import UNKNOWN_S
from kvtier.coordinator.tracked import State, Tracked
from kvtier.cpu_offload import store_queue
from kvtier.cpu_offload.engines import CopyEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, TransferState
from kvtier.geometry import layout
from kvtier.gpu_pool import block_table
from kvtier.gpu_pool.row_state import Phase
from kvtier.pools.block_pool import Col, Mark
from kvtier.remote.moves import SeekState
from kvtier.testing import CanaryEngine, Faults, SimulatedDevice, canary_spec

from .elsewhere import NAMES, another_engine_serves
from .metrics import JOURNAL, Metrics, findable
from .played_backend import FATES as CALL_FATES
from .played_backend import ROTS, PlayedBackend, Shelf, least_bytes
from .preemptions import Preemption, recorded
from .waits import recorded_waits

KINDS = {"full": FullAttention, "window": SlidingWindow, "chunk": ChunkedLocal}
FATES = ("ok", "fail", "tear", "corrupt")
STEMS = [[(7 * i + 31 * stem) % 89 for i in range(64)] for stem in range(3)]
SALTS: list[dict[str, Any]] = [
    {},
    {"cache_salt": "a"},
    {"adapter": "a"},
    {"extra_keys": ("a",)},
]


@dataclass(frozen=True)
class Config:
    """One world. ``groups``: name -> (kind, span_tokens, block_tokens, device blocks, host blocks).

    With ``slabs``, (device, host), the pools of a tier share an arena of so many slabs, whatever ``groups`` say; layers
    make one group's blocks larger than another's.
    """

    groups: dict[str, tuple[str, int, int, int, int]]
    host: bool = True
    slabs: tuple[int, int] | None = None
    layers: tuple[int, ...] = (1, 2, 3)
    store: str = "eager"
    verify: str = "full"
    on_load_error: str = "recompute"
    streams: bool = True
    """With a host tier: copies and forwards on a simulated device's streams; else copies that end in any order."""
    max_batched_tokens: int = 6
    max_running: int = 3
    deadline_s: float = 50.0
    lose: float = 0.0
    """On streams: the chance that a copy takes far longer than its deadline."""
    lag_s: float = 0.0
    """On streams: how late they are given their copies at most, as if by a thread of their own."""
    link: tuple[int, int] | None = None
    """Bytes that a store may have, and all that are under way; more of them wait for the link, PLANNED."""
    orders: str = "orders"
    """Without streams: the engine "orders" writers behind copies, "waits" for those in vain, or "breaks"."""
    objects: int | None = None
    """With a host tier: behind it is a store, whose objects have so many bytes at least."""
    quick: float = 0.0
    """The share of its calls that end by themselves, nearly all of them well."""
    seed: int = 0


@dataclass
class Counts:
    """What has happened, over all worlds that share it."""

    seen: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, n: int = 1) -> None:
        self.seen[name] += n


class World:
    """See the module's text. ``counts`` may be shared by several worlds.

    With ``every_rule`` False, rules that no step follows (arrivals, ends of copies, ...) are not audited by themselves:
    the next step's audits see what they did.
    """

    def __init__(self, config: Config, counts: Counts | None = None, every_rule: bool = True) -> None:
        self.config = config
        self._every_rule = every_rule
        self.counts = counts or Counts()
        self._shelf = Shelf(config.seed)  # of the store; it outlives caches
        self._number = 0  # of requests so far
        self.past: list[Request] = []  # the last that were reported, by any cache
        self._unique = 0
        self._open()

    def _open(self) -> None:
        c = self.config
        spec = canary_spec(
            {
                name: (KINDS[kind]() if kind == "full" else KINDS[kind](span), block_tokens)
                for name, (kind, span, block_tokens, _, _) in c.groups.items()
            },
            num_layers=dict(zip(c.groups, c.layers if c.slabs else (1,) * len(c.groups), strict=False)),
        )
        # Without a host tier nothing tells a cache of the device: blocks move at once, so forwards run at once too.
        simulated = c.streams and c.host
        self.device = SimulatedDevice(c.seed, Faults(lose=c.lose), look_s=0.0, lag_s=c.lag_s) if simulated else None
        with (
            patch.object(layout, "FEWEST_SLABS", 1),  # arenas that are as tiny as the pools
            patch.multiple(block_table, FIRST_UNITS=2, FIRST_SAMPLED=2),  # tables that grow
            self._narrow_link(),
            least_bytes(c.objects or 1),
        ):
            self.cache = KVCache(
                spec,
                **self._memory(spec),
                store=c.store,
                verify=c.verify,
                on_load_error=c.on_load_error,
                deadline_s=c.deadline_s,
                key_secret=NAMES["key_secret"],
                copy_engine=self._make_engine,
                journal_events=JOURNAL,
                **self._behind_the_host(),
            )
            self.scheduler = Scheduler(self.cache, c.max_batched_tokens, c.max_running)
        self.cache.checks.level = AuditLevel.OFF  # every rule audits
        inside.after_disown(self.cache, self._check_disowned)
        self.canary = CanaryEngine(self.cache, device=self.device)
        self._metrics = Metrics(self.cache)
        self.step: Step | None = None
        self.ids = np.empty(0, np.int64)
        self.requests: dict[str, Request] = {}  # not reported yet
        self.asked: dict[str, str] = {}  # what somebody asked a request to end as
        self.bad_loads: set[str] = set()  # requests whose load was made to fail
        self.corrupted = 0
        self._has_rotted = False
        self._limits: dict[str, int] = {}  # tokens at which each request ends
        self._away: Counter[str] = Counter()  # preemptions that made room
        self._behind: dict[str, set[str]] = {}  # of whom each gave way
        self._restarts = 0  # resets and cancelled steps: each sends requests back
        self._totals: Counter[str] = Counter()  # at the last drain

    def _memory(self, spec: CacheSpec) -> dict[str, Any]:
        c = self.config
        if c.slabs is None:
            device = {name: group[3] for name, group in c.groups.items()}
            return {"device_blocks": device, "host_blocks": {n: g[4] for n, g in c.groups.items()} if c.host else None}
        sizes = [group.block_bytes for group in spec.groups]
        device, host = (max(sizes) + max(n, len(sizes)) * math.lcm(*sizes) for n in c.slabs)
        return {"device_bytes": device, "host_bytes": host if c.host else 0}

    def _behind_the_host(self) -> dict[str, Any]:
        has_remote = self.config.host and self.config.objects is not None
        self.calls = PlayedBackend(self._shelf, self.config.quick) if has_remote else None
        return {"remote_uri": self.calls, "model_id": NAMES["model_id"]} if has_remote else {}

    def _make_engine(self, memory: TierMemory) -> CopyEngine:
        self._bytes = memory
        return (
            self.device.engine(memory)
            if self.device
            else HeldEngine(memory, can_order=self.config.orders != "waits", breaks=self.config.orders == "breaks")
        )

    def _narrow_link(self) -> AbstractContextManager[Any]:
        if self.config.link is None:
            return nullcontext()
        a_transfer, in_flight = self.config.link
        return patch.multiple(store_queue, STORE_BYTES_PER_TRANSFER=a_transfer, STORE_BYTES_IN_FLIGHT=in_flight)

    # --- rules ------------------------------------------------------------------------------------

    def submit(
        self, stem: int, length: int, extra: int, new_tokens: int, salt: int = 0, priority: int = 0, eos: bool = False
    ) -> None:
        """A request: ``length`` tokens of a shared stem (or of nobody else's, if ``stem`` is out of range)."""
        if stem < len(STEMS):
            prompt = STEMS[stem][:length]
        else:
            self._unique += 1
            prompt = random.Random(self._unique).choices(range(97), k=length)
        prompt = prompt + [(5 * i + extra) % 97 for i in range(extra)] or [1]
        self._add(
            Request(
                f"r{self._number}",
                prompt,
                new_tokens,
                eos_token_ids=(3, 5, 7, 11) if eos else (),
                priority=priority,
                **SALTS[salt % len(SALTS)],
            )
        )

    def revisit(self, k: int, new_tokens: int) -> None:
        """Somebody asks again what was asked before, or goes on from there."""
        if self.past:
            old = self.past[k % len(self.past)]
            names = ("cache_salt", "adapter", "extra_keys")
            options = {name: getattr(old, name) for name in names}
            self._add(Request(f"r{self._number}", old.prompt_token_ids, new_tokens, **options))

    def crowd(self, stem: int, more: int, new_tokens: int) -> None:
        """Short prompts with long answers: they fit together, until they have grown."""
        for i in range(2 + more):
            self.submit(stem, 2, i, new_tokens, priority=-(i % 2))

    def urgent(self, stem: int, length: int) -> None:
        """A long prompt that comes before all others: several may have to give way to it."""
        self.submit(stem, length, 0, 2, priority=-2)

    def _add(self, request: Request) -> None:
        self._number += 1
        try:
            self.scheduler.add(request)
        except RequestTooLarge as refused:
            assert refused.needs
            assert all(refused.needs[name] > refused.have[name] for name in refused.needs)
            self.counts.add("refused")
            return
        self.counts.add("requests")
        self.canary.add(request)
        self.requests[request.request_id] = request
        self._limits[request.request_id] = len(request.prompt_token_ids) + request.max_new_tokens
        self._check()

    def schedule(self) -> None:
        """Makes the next step and runs its forward."""
        if self.step is not None:
            return
        before, under_way, gave_way = self._reported(), self._progressing(), list[Preemption]()
        begun_s, good_s = self._now(), list[float]()
        with recorded(gave_way), recorded_waits(self.cache.copy_engine, good_s):
            self.step = self.scheduler.schedule()
        self.counts.add("steps")
        self.counts.add("steps with stores that wait", bool(self.cache.core.coordinator.connector.books.planned))
        self._check_preemptions(gave_way)
        took_s = self._now() - begun_s
        vain_s = took_s - sum(good_s)  # what moves takes as long as the link does
        assert vain_s <= 2 * self.config.deadline_s + 1e-6, f"the engine stood still for {vain_s} s"
        self.counts.add("steps that waited for a copy", took_s > 0)
        check_step(self.cache, self.step)
        if self._reported() == before:
            self._check_progress(self.step, under_way or self._progressing(), begun_s)
        self.ids = self.canary.forward(self.step) if self.step.num_tokens else np.empty(0, np.int64)
        self._check(step=True)

    def commit(self) -> None:
        """Ends the step."""
        if self.step is None:
            return
        step, self.step = self.step, None
        done = self.scheduler.commit(step, self.ids)
        for each in done:
            self._report(each)
        self._check(step=True)

    def cancel(self) -> None:
        """The forward fails after it has written everything; what it sampled is forgotten."""
        if self.step is None:
            return
        step, self.step = self.step, None
        self.canary.take_back(step)
        self.scheduler.cancel(step)
        self._restarts += 1
        self.counts.add("cancelled steps")
        self._check(step=True)

    def abort(self, k: int) -> None:
        """Somebody aborts a request that goes on."""
        if self.requests:
            name = list(self.requests)[k % len(self.requests)]
            if self.scheduler.abort(name):
                self.counts.add("aborts")
                self.asked[name] = "abort"
            self._check()

    def finish(self, k: int) -> None:
        """The engine ends a request: a stop string was seen."""
        if self.requests:
            name = list(self.requests)[k % len(self.requests)]
            if self.scheduler.finish(name):
                self.asked[name] = "stop"
            self._check()

    def fail(self, k: int) -> None:
        """The engine ends a request whose forward went wrong."""
        if self.requests:
            name = list(self.requests)[k % len(self.requests)]
            if self.scheduler.fail(name):
                self.counts.add("failed requests")
                self.asked[name] = "error"
                self._restarts += 1  # whoever loads what it shares with this one starts over
            self._check()

    def end_copy(self, k: int, fate: int = 0) -> None:
        """Any copy under way ends, well or badly."""
        tickets = self._under_way()
        if not tickets:
            return
        ticket, name = tickets[k % len(tickets)], FATES[fate % len(FATES)]
        if name == "corrupt" and (self.config.verify == "off" or not self._is_load(ticket)):
            name = "ok"  # nobody could see it, or not until it is loaded
        self.counts.add(f"copies: {name}")
        self._note(ticket, name)
        if self.device is not None:
            self.device.finish(ticket, name)
        elif name == "corrupt":
            self._held.end(ticket, flip=True)
        elif name == "ok":
            self._held.end(ticket)
        else:
            self._held.end(ticket, error=name, bad=[0] if name == "tear" else None)
        self._check()

    def rot(self, k: int) -> None:
        """A bit flips in a block of host memory that can be found: nobody knows until it is loaded."""
        host = self.cache.core.host
        if host is None or self.config.verify == "off":
            return
        ready = np.flatnonzero(host.arrays.mark == Mark.READY)
        if len(ready):
            entry, bases = int(ready[k % len(ready)]), host.column(Col.BASE)
            g = int(np.searchsorted(bases, entry, side="right")) - 1
            self._bytes.flip_host_bit(g, entry - int(bases[g]))
            self._has_rotted = True
            self.counts.add("host blocks damaged")

    def end_call(self, k: int, fate: int = 0) -> None:
        """Any call of the store under way ends, well or not."""
        if self.calls is None or not self.calls.calls:
            return
        name = CALL_FATES[fate % len(CALL_FATES)]
        what = self.calls.finish(k, name)
        self.counts.add(f"store calls: {what}")
        self.counts.add("store calls that may go wrong", name != "ok")
        self._check()

    def rot_store(self, k: int, how: int) -> None:
        """Something happens to an object in the store: nobody knows until it is read."""
        if self.calls is not None and self._shelf.rot(k, ROTS[how % len(ROTS)]):
            self.counts.add("stored objects damaged")

    def elsewhere(self, stem: int, length: int, salt: int = 0) -> None:
        """Another engine, with the same store and nothing else, is asked the same."""
        if self.calls is None:
            return
        prompt = STEMS[stem % len(STEMS)][: max(1, length)]
        request = Request("elsewhere", prompt, 2, **SALTS[salt % len(SALTS)])
        with least_bytes(self.config.objects or 1):
            served = another_engine_serves(self.cache.spec, request, self._shelf)
        self.counts.seen.update(served)

    def pass_time(self, seconds: float) -> None:
        """The clock goes on; what runs on a simulated device gets further."""
        if self.device is not None:
            self.device.advance(seconds)
        elif self.config.host:
            self._held.clock_s += seconds
        self._check()

    def reset(self) -> None:
        """The weights have changed: nothing cached is valid any more."""
        loading = {seq.request.request_id for seq in self.scheduler.running if seq.state is State.LOADING}
        self._metrics.listen()
        self.cache.reset()
        if self.calls is not None:
            self.calls.is_to_be_left_alone = True
        self._metrics.listen()
        self._restarts += 1
        self.bad_loads -= loading  # those start over
        self.counts.add("resets")
        self._check(step=True)

    def fill_host(self, n: int) -> None:
        """Prompts that nobody else has: enough of them to push everything out of the host tier, or a part of it."""
        tiers = self.cache.stats().host.values()
        blocks = max((-(-pool.usable // max(1, 9 // pool.block_tokens)) for pool in tiers), default=0)
        for _ in range(1 + blocks // (1 + n % 4)):
            self.submit(len(STEMS), 9, 0, 1)

    def reopen(self) -> None:
        """The cache is closed with everything under way, and a new one takes its place."""
        step, self.step = self.step, None
        self.cache.close()
        self.cache.close()
        for call in (self.scheduler.schedule, self.cache.reset, self.cache.audit):
            with pytest.raises(CacheClosed):
                call()
        assert step is None or step.num_tokens >= 0
        assert not self.scheduler.has_work()
        self._check_order()
        self.counts.add("reopened")
        self._open()

    def drain(self, fate: int = 0, late: bool = False) -> None:
        """Nothing new comes and every copy ends: every request is reported within a bound, and nothing is held.

        ``late``: the engine is idle until copies are overdue, and none that is ends before all requests have.
        """
        self.commit()
        bound, steps, idle_steps = self._bound(), 0, 0
        while self.scheduler.has_work():
            seen = f"no end after {steps} steps, and {idle_steps} in which copies ended"
            assert steps <= bound, f"{seen}: {self.scheduler.why_waiting()}"
            assert idle_steps <= 10 * bound, f"{seen}: {self.scheduler.why_waiting()}"
            ended = self._ended()
            self.schedule()
            idle = self.step is not None and self.step.num_tokens == 0
            self.commit()
            if idle and late:
                self.pass_time(self.config.deadline_s + 1.0)
            elif idle:
                self._end_all(fate)
                fate += fate > 0
                remote = self.cache.core.coordinator.remote
                if remote is not None and remote.num_disowned and self._ended() == ended:
                    self.pass_time(1.1)  # a delete that has failed is tried again
            waited = idle and self._ended() > ended
            idle_steps += waited
            steps += not waited
        self.counts.add("drained")
        assert self.requests == {}, "a request was never reported"
        self._metrics.settle()
        self._add_totals()
        for _ in range(20):  # late ends of what was given up, and the copies that they make room for
            self._end_all()
            self.schedule()
            self.commit()
            if not self.cache.stats().transfers.live and not (self.calls is not None and self.calls.calls):
                break
        stats = self.cache.stats()
        for pool in (*stats.device.values(), *stats.host.values()):
            assert pool.empty + pool.cached + pool.quarantined + pool.lent == pool.usable, pool
        assert sum(pool.quarantined for pool in stats.device.values()) == 0
        assert sum(pool.quarantined for pool in stats.host.values()) <= stats.transfers.corrupt_blocks
        assert stats.transfers.live == 0
        assert stats.transfers.corrupt_blocks >= self.corrupted, "a damaged load went unnoticed"
        assert self.cache.audit() == []
        assert self._shelf.wrong() == []

    def _ended(self) -> int:
        """Copies and calls of the store that ended, as far as the cache knows."""
        coordinator = self.cache.core.coordinator
        calls = 0 if self.calls is None else self.calls.num_told + coordinator.remote.counts.expired
        return coordinator.connector.ledger.num_settled + calls

    def _end_all(self, fate: int = 0) -> None:
        """All copies that are under way end, one after the other."""
        if self.config.lag_s:
            self.pass_time(self.config.lag_s)  # those that no stream has been given yet
        for _ in self._under_way():
            self.end_copy(0, fate)
            fate += fate > 0
        while self.calls is not None and self.calls.calls:
            self.end_call(0, fate)
            fate += fate > 0

    def _add_totals(self) -> None:
        """What the cache has counted since the last drain."""
        stats = self.cache.stats()
        now = Counter(
            {
                "blocks moved": self.cache.core.coordinator.compactor.num_moved,
                "host blocks evicted": sum(pool.evicted for pool in stats.host.values()),
                "copies given up": stats.transfers.expired,
            }
        )
        if stats.remote is not None:
            names = ("spilled_objects", "fetched_objects", "missed_objects", "damaged_objects", "expired", "late_looks")
            now.update({f"store: {name}": getattr(stats.remote, name) for name in names})
        self.counts.seen.update(now - self._totals)
        self._totals = now

    # --- what must hold ---------------------------------------------------------------------------

    @property
    def _held(self) -> HeldEngine:
        engine = self.cache.copy_engine
        assert isinstance(engine, HeldEngine)
        return engine

    def _now(self) -> float:
        """On the copy engine's clock."""
        engine = self.cache.copy_engine
        return engine.now() if engine is not None else 0.0

    def _under_way(self) -> list[int]:
        if self.device is not None:
            return [copy.transfer.ticket for copy in self.device.under_way()]
        return list(self._held.live) if self.config.host else []

    def _is_load(self, ticket: int) -> bool:
        of = (
            {copy.transfer.ticket: copy.transfer for copy in self.device.under_way()}
            if self.device
            else self._held.live
        )
        return of[ticket].direction is Direction.LOAD

    def _note(self, ticket: int, fate: str) -> None:
        """What must come of this end of a load."""
        live = {t.ticket: t for t in self.cache.core.coordinator.connector.ledger.live()}
        if ticket not in live or live[ticket].direction is not Direction.LOAD or fate == "ok":
            return
        self.counts.add(f"loads: {fate}")
        self.corrupted += fate == "corrupt"
        if live[ticket].state is not TransferState.EXPIRED:
            self.bad_loads |= {seq.request.request_id for seq in self.scheduler.running if seq.ticket == ticket}

    def _reported(self) -> int:
        return self.scheduler.reports.num_finished

    def _check(self, step: bool = False) -> None:
        if not (step or self._every_rule):
            return
        violations = self.cache.audit()
        assert violations == [], violations
        self._metrics.read()
        assert self.scheduler.has_work() or not self.requests
        self._check_order()

    def _check_order(self) -> None:
        if self.device is not None:
            assert self.device.missing_edges == [], self.device.missing_edges

    def _check_progress(self, step: Step, progressing: bool, begun_s: float) -> None:
        """I8, and the first in service order advances unless a copy was on its way, somebody behind it who was just
        admitted has the right to a first token (I10), or it waits for what a copy that never ends holds fast."""
        scheduler, live = self.scheduler, self.cache.stats().transfers.live
        going_on = [*scheduler.running, *scheduler.waiting]
        asks = self._check_store_waits(begun_s)
        if step.num_tokens == 0 and going_on:
            assert live or asks, f"nothing is under way: {scheduler.why_waiting()}"
        if going_on and not progressing:
            first = min(going_on, key=lambda seq: seq.order)
            has_run = inside.coordinator(self.cache).has_run
            fresh = any(not has_run(other) for other in scheduler.running if other is not first)
            held = first.row < 0 and live and not self._would_fit(first)
            assert first.request.request_id in step.request_ids or fresh or held, "the first could run, and does not"
        if not live and not asks:
            phase, ids = inside.coordinator(self.cache).tables.arrays.phase, step.request_ids
            late = [s for s in scheduler.running if phase[s.row] == Phase.FRESH and s.request.request_id not in ids]
            assert not late or np.all(phase[step.rows] == Phase.FRESH), f"{late} were admitted, and others go on"
        for name, n in zip(step.request_ids, np.diff(step.query_start), strict=True):
            assert n > 0, name

    def _check_store_waits(self, begun_s: float) -> bool:
        """Whether somebody waits for the remote tier; the first who waits does not if the answer's time, or the
        fetch's, was over as the step began. (Time passes in a step that waits for copies.)"""
        coordinator = self.cache.core.coordinator
        if coordinator.remote is None:
            return False
        until = {move.ticket: move.deadline_s for move in coordinator.remote.moves()}
        found = [seq for seq in self.scheduler.waiting if "the remote tier" in seq.wait_reason]
        for seq in (seq for seq in found if seq is self.scheduler.waiting[0]):  # a step may end before it meets others
            looks = seq.seek.state is SeekState.LOOKING
            at = seq.seek.until_s if looks else until[seq.seek.ticket]
            assert begun_s <= at, f"{seq.request.request_id} still waits, {begun_s - at} s after its time"
            assert at - self._now() <= (UNKNOWN_S if looks else self.config.deadline_s) + 1e-6, seq
        return bool(found)

    def _would_fit(self, seq: Tracked) -> bool:
        """Whether all that a request that waits knows fits beside what others hold and are promised."""
        coordinator, rows = self.cache.core.coordinator, self.scheduler.roster.rows()
        _, need = coordinator.room.admission_need(seq, coordinator.match(seq))
        return coordinator.pools.fits(coordinator.pools.live + coordinator.room.promised(rows) + need)

    def _progressing(self) -> bool:
        """Whether a copy is on its way that is not overdue."""
        coordinator = self.cache.core.coordinator
        asks = any(seq.seek is not None and seq.seek.state is not SeekState.OVER for seq in self.scheduler.waiting)
        return asks or any(t.state is not TransferState.EXPIRED for t in coordinator.connector.ledger.live())

    def _check_preemptions(self, gave_way: list[Preemption]) -> None:
        """I10: each victim has advanced and is not the first, a set of them makes room for what was lacking, and all
        that a request gives way to is admissions of requests before it, and blocks that they then take."""
        for event in gave_way:
            assert event.wrong() == [], event
            self._away[event.request_id] += 1
            before = self._behind.setdefault(event.request_id, set())
            before |= event.before
            most = sum(self._admissions(name) * (1 + self._blocks(name)) for name in before)
            assert self._away[event.request_id] <= most + self.cache.stats().transfers.expired, (event, before)

    def _admissions(self, name: str) -> int:
        """How often it can have been admitted: at first, after each preemption, a failed load, a reset, a cancel."""
        return 2 + self._away[name] + self._restarts

    def _blocks(self, name: str) -> int:
        tokens = self._limits[name]
        return sum(-(-tokens // group.block_tokens) for group in self.cache.spec.groups)

    def _report(self, done: FinishedRequest) -> None:
        request = self.requests.pop(done.request_id)
        self.canary.forget(done.request_id)
        check_text(self.cache, request, done)
        self._check_reason(request, done)
        self._metrics.report(request, done)
        self.past = [*self.past[-5:], request]
        self.counts.add(f"finished: {done.finish_reason}")
        self.counts.add("preemptions", done.preemptions)
        self.counts.seen["most preemptions of one request"] = max(
            done.preemptions, self.counts.seen["most preemptions of one request"]
        )
        for tier, n in done.cached_tokens.items():
            self.counts.add(f"prompt tokens from {tier}", n)

    def _check_reason(self, request: Request, done: FinishedRequest) -> None:
        """Nobody is ended without a reason, and none for another one."""
        reason, asked, text = done.finish_reason, self.asked.pop(done.request_id, None), done.token_ids
        at_eos = bool(text) and text[-1] in request.eos_token_ids
        expired = self.cache.stats().transfers.expired
        if reason == "length":
            assert len(text) == request.max_new_tokens
        elif reason == "stop":
            assert asked == "stop" or at_eos
        elif reason == "abort":
            assert asked == "abort"
        elif reason == "error":
            assert asked == "error"
        elif reason == "load_error":
            assert self.config.on_load_error == "fail"
            assert done.request_id in self.bad_loads or expired or self._has_rotted
        else:
            known = len(request.prompt_token_ids) + len(text)
            need = np.array([group.peak_blocks(known) for group in self.cache.spec.groups])
            assert reason == "capacity"
            assert expired or not self.cache.core.coordinator.pools.fits(need), "it would have fitted alone"
        if done.request_id in self.bad_loads and self.config.on_load_error == "fail":
            assert reason == "load_error" or asked, "its load failed, and it was not told"
        self.bad_loads.discard(done.request_id)

    def _check_disowned(self, seq: Tracked) -> None:
        """Right after a failed request's text was disowned: nothing under its keys is found, and none of its objects is
        known to be stored. (Others who run on the same tokens may publish theirs after that.)"""
        coordinator = self.cache.core.coordinator
        keys = {key.tobytes() for key in seq.keys}
        found = {key for _, _, key in findable(self.cache)}
        assert not found & keys, f"{seq.request!r} has failed and is found"
        known = inside.known_objects(coordinator.remote) if coordinator.remote is not None else set()
        assert not {key for _, key in known} & keys, f"{seq.request!r} has failed and counts as stored"

    def _bound(self) -> int:
        """Steps within which all open requests end if copies do.

        The first in service order computes a token in each step that is not idle, and nobody later can take that from
        it. It starts over at most once more than its loads fail, which is once; an idle step waits for a copy of one
        of the admissions, of which each request has one more than preemptions.
        """
        tokens = sum(len(r.prompt_token_ids) + min(r.max_new_tokens, 1000) for r in self.requests.values())
        calls = 0 if self.calls is None else len(self.calls.calls) + 2 * len(self.requests)
        return 2 * tokens + 6 * len(self.requests) + 2 * len(self._under_way()) + 2 * calls + 8
