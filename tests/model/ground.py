"""The ground that a world stands on: its cache, its engine and its store, and what must hold after each rule.

Every rule is followed by a full audit; every text is compared with the oracle's; every exported index array is checked
against the masks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import inside
import numpy as np
from core.driving import HeldEngine, check_text

from kvtier import (
    CacheSpec,
    ChunkedLocal,
    FinishedRequest,
    FullAttention,
    KVCache,
    Request,
    Scheduler,
    SlidingWindow,
    Step,
)
from kvtier.audit.run import AuditLevel
from kvtier.coordinator.seek import UNKNOWN_S
from kvtier.coordinator.tracked import Tracked
from kvtier.cpu_offload import store_queue
from kvtier.cpu_offload.engines import CopyEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, TransferState
from kvtier.geometry import layout
from kvtier.geometry.kinds import Attention
from kvtier.gpu_pool import block_table
from kvtier.gpu_pool.row_state import Phase
from kvtier.remote.moves import SeekState
from kvtier.testing import CanaryEngine, Faults, SimulatedDevice, canary_spec
from kvtier.testing.oracle import STATE

from .elsewhere import NAMES
from .metrics import JOURNAL, Metrics, findable
from .played_backend import PlayedBackend, Shelf, least_bytes
from .preemptions import Preemption

KINDS: dict[str, Callable[[int], Attention]] = {
    "full": lambda span: FullAttention(),
    "window": SlidingWindow,
    "chunk": ChunkedLocal,
    "state": lambda span: STATE,
}
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


class Ground:
    """A cache that is opened, and looked at after each rule. ``counts`` may be shared by several worlds.

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
            {name: (KINDS[kind](span), block_tokens) for name, (kind, span, block_tokens, _, _) in c.groups.items()},
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
        least = 3 * sum(sizes)  # of separate pools, if the arena is too small to share
        device, host = (max(least, max(sizes) + max(n, len(sizes)) * math.lcm(*sizes)) for n in c.slabs)
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
        """Whether somebody waits for the store; the first who waits does not if the answer's time, or the fetch's, was
        over as the step began. (Time passes in a step that waits for copies.)"""
        coordinator = self.cache.core.coordinator
        if coordinator.door.remote is None:
            return False
        until = {move.ticket: move.deadline_s for move in coordinator.door.remote.moves()}
        found = [seq for seq in self.scheduler.waiting if "the remote tier" in seq.wait_reason]
        for seq in (seq for seq in found if seq is self.scheduler.waiting[0]):  # a step may end before it meets others
            looks = seq.seek.state is SeekState.LOOKING
            at = seq.seek.until_s if looks else until[seq.seek.ticket]
            assert begun_s <= at, f"{seq.request.request_id} waits for the remote, {begun_s - at} s after its time"
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
        known = inside.known_objects(coordinator.door.remote) if coordinator.door.remote is not None else set()
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
