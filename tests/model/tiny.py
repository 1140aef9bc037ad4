"""A tiny cache with its scheduler and a copy engine that does nothing unasked: one state of the explorer.

``World.do`` performs one action on the real classes and tells what happened and what was wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import inside
import numpy as np

from kvtier import (
    CacheSpec,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    KVCache,
    Part,
    RecurrentState,
    Request,
    Scheduler,
    SlidingWindow,
)
from kvtier.coordinator.tracked import State
from kvtier.cpu_offload import store_queue
from kvtier.cpu_offload.transfer import TransferState
from kvtier.pools.block_pool import Col
from kvtier.remote.moves import SeekState

from .preemptions import Preemption, recorded
from .stepwise import StepwiseEngine
from .stepwise_backend import open_stepwise

BLOCK_TOKENS = 2
SPEC = CacheSpec(
    GroupSpec(name, attention, 1, 1, 4, block_tokens=BLOCK_TOKENS)
    for name, attention in (("full", FullAttention()), ("win", SlidingWindow(3)), ("chunk", ChunkedLocal(4)))
)
STATES = CacheSpec(
    [
        GroupSpec("full", FullAttention(), 1, 1, 4, block_tokens=BLOCK_TOKENS),
        GroupSpec("state", RecurrentState((Part("recurrent0", (4,), "float32"),)), 1, block_tokens=BLOCK_TOKENS),
    ]
)
INDEXED = CacheSpec(  # a window, entries of two tokens that an index picks from, and the index's keys; K alone
    [
        GroupSpec("win", SlidingWindow(3), 1, 1, 4, block_tokens=BLOCK_TOKENS, head_dim_v=0),
        *(
            GroupSpec(name, FullAttention(), 1, 1, 4, block_tokens=BLOCK_TOKENS, head_dim_v=0, entry_tokens=2)
            for name in ("entries", "index")
        ),
    ],
    layers=[{"kv": ("win", 0), "entries": ("entries", 0), "index": ("index", 0)}],
)
Action = tuple[Any, ...]
Blocks = tuple[int, ...]
MOST_STEPS_TO_REST = 20


@dataclass(frozen=True)
class Config:
    """What is explored: two requests, pools, and what the surroundings may do to them."""

    name: str
    device: Blocks  # usable blocks of each group
    host: Blocks | None = None
    store: str = "eager"
    prompts: tuple[tuple[int, ...], ...] = ((1, 2, 3), (4, 5, 6))
    new: tuple[int, ...] = (2, 2)  # max_new_tokens
    priorities: tuple[int, ...] = (0, 0)
    batch: int = 4  # max_batched_tokens
    rows: int = 2  # max_running
    warm: tuple[int, ...] | None = None  # a prompt that the host tier has at the beginning
    order: str = "stream"  # see StepwiseEngine
    cut: bool = False  # a block a store, else all that are planned at a time
    on_load_error: str = "recompute"
    shelf: bool = False  # a remote tier
    stored: tuple[int, ...] | None = None  # a prompt that the store has at the beginning, and nobody else
    can: frozenset[str] = frozenset({"bad"})  # of abort, cancel, bad, expire
    spec: CacheSpec = SPEC

    @property
    def limits(self) -> list[int]:
        """Tokens at which each request ends."""
        return [len(prompt) + new for prompt, new in zip(self.prompts, self.new, strict=True)]


_seen: list[Preemption] = []  # since the action began


@contextmanager
def watched(cut: bool = False) -> Iterator[None]:
    """Records preemptions while it lasts, and lets one store be under way at a time.

    (More are submitted where a writer must be ordered behind a planned one.)
    """
    with (
        patch.object(store_queue, "STORE_BYTES_IN_FLIGHT", 1),
        patch.object(store_queue, "STORE_BYTES_PER_TRANSFER", 1 if cut else store_queue.STORE_BYTES_PER_TRANSFER),
        recorded(_seen),
    ):
        yield


@dataclass
class Happened:
    """What an action did."""

    tokens: int = 0  # computed by the step that was made
    reported: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    wrong: list[str] = field(default_factory=list)


class World:
    """One state, and the actions that lead on from it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        names = config.spec.names
        self.cache = KVCache(
            config.spec,
            device="meta",
            device_blocks=dict(zip(names, config.device, strict=True)),
            host_blocks=dict(zip(names, config.host, strict=True)) if config.host else None,
            store=config.store,
            on_load_error=config.on_load_error,
            key_secret=b"explorer",
            copy_engine=lambda memory: StepwiseEngine(memory, config.order),
        )
        self.engine: Any = self.cache.copy_engine or StepwiseEngine(None, config.order)
        self.calls = open_stepwise(self.cache, self.engine.now) if config.shelf else None
        self.scheduler = Scheduler(self.cache, max_batched_tokens=config.batch, max_running=config.rows)
        inside.learn_nothing(self.cache)
        self.requests = [
            Request(f"r{i}", prompt, new, priority=priority)
            for i, (prompt, new, priority) in enumerate(zip(config.prompts, config.new, config.priorities, strict=True))
        ]
        self.step: Any = None
        self.asleep = False  # the last step computed nothing, and ``wait`` had no news: an engine sleeps until there is
        self.added: set[str] = set()
        self.aborted: set[str] = set()
        self.reported: dict[str, str] = {}
        self.advanced: set[str] = set()  # running requests that have computed a token since they were admitted
        if config.warm is not None:
            self._warm(config.warm)
        if config.stored is not None:
            self._warm(config.stored)
            inside.host(self.cache).forget_all()

    def _warm(self, prompt: tuple[int, ...]) -> None:
        """Serves a prompt; then only the host tier has it, and the store, if there is one."""
        self.scheduler.add(Request("warm", prompt, 1))
        quiet = 0
        while quiet < 2:  # in lazy mode stores begin in the step after the last
            step = self.scheduler.schedule()
            self.scheduler.commit(step, [0] * len(step.sample_rows))
            self._end_all()
            quiet = 0 if self.scheduler.has_work() else quiet + 1
        inside.pools(self.cache).forget_all()

    def _end_all(self) -> None:
        for ticket in list(self.engine.live):
            self.engine.end(ticket)
        for ticket in list(self.calls.calls) if self.calls is not None else ():
            self.calls.end(ticket, "well")

    @property
    def connector(self) -> Any:
        return inside.connector(self.cache)

    @property
    def remote(self) -> Any:
        """The tier behind the host's, if there is one."""
        return inside.coordinator(self.cache).door.remote

    # --- what can happen ----------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        """Everything that can happen next. Only one transfer at a time is overdue, lest there be too many states."""
        can = self.config.can
        out: list[Action] = []
        if self.step is not None:
            out.append(("commit",))
            if "cancel" in can and self.step.num_tokens:
                out.append(("cancel",))
        elif self.scheduler.has_work():
            out.append(("schedule",))
        for request in self.requests:
            name = request.request_id
            if name not in self.added:
                out.append(("add", name))
            elif "abort" in can and name not in self.reported and name not in self.aborted:
                out.append(("abort", name))
        overdue = any(t.deadline_s < 0 for t in self.connector.ledger.live())
        for ticket, transfer in sorted(self.engine.live.items()):
            if transfer.state is TransferState.EXPIRED:
                out.append(("late", ticket))
                continue
            out.append(("end well", ticket))
            if "bad" in can:
                out.append(("end badly", ticket))
            if "expire" in can and not overdue:
                out.append(("expire", ticket))
        return out + (self._store_actions(overdue) if self.calls is not None else [])

    def _store_actions(self, overdue: bool) -> list[Action]:
        """Calls of the store that were given up only end at last."""
        can, out = self.config.can, list[Action]()
        moves, asked = {m.ticket: m for m in self.remote.moves()}, inside.questions(self.remote)
        overdue = overdue or any(m.deadline_s < 0 for m in moves.values())
        for ticket, (what, _) in sorted(self.calls.calls.items()):
            move = moves.get(ticket)
            if (move is not None and move.state is TransferState.EXPIRED) or (move is None and ticket not in asked):
                out.append(("call late", ticket))
                continue
            out.append(("call well", ticket))
            if "bad" in can:
                out.append(("call badly", ticket))
            if "bad" in can and what == "get":
                out.append(("call gone", ticket))
            if "expire" in can and not overdue and (move is not None or self._looking(ticket)):
                out.append(("call expire", ticket))
        return out

    def _looking(self, ticket: int) -> list[Any]:
        """What waits for this answer, and is not told that its time is over."""
        seeks = [seq.seek for seq in self.scheduler.waiting if seq.seek is not None]
        return [s for s in seeks if s.ticket == ticket and s.state is SeekState.LOOKING and s.until_s > 0]

    def _end_call(self, how: str, ticket: int) -> None:
        if how != "expire":
            self.calls.end(ticket, "well" if how == "late" else how)
            return
        for seek in self._looking(ticket):
            seek.until_s = -1.0
        for move in self.remote.moves():
            move.deadline_s = -1.0 if move.ticket == ticket else move.deadline_s

    def do(self, action: Action) -> Happened:
        """Performs an action; what it raises is among what is wrong."""
        _seen.clear()
        happened = Happened()
        try:
            self._do(action, happened)
        except Exception as problem:
            happened.wrong.append(f"I5: raised {type(problem).__name__}: {problem}")
        happened.preempted = tuple(e.request_id for e in _seen)
        return happened

    def _do(self, action: Action, happened: Happened) -> None:
        kind, argument = action[0], action[-1]
        if kind == "add":
            self.added.add(argument)
            self.scheduler.add(next(r for r in self.requests if r.request_id == argument))
        elif kind == "schedule":
            self._schedule(happened)
        elif kind == "commit":
            self._commit(happened)
        elif kind == "cancel":
            self.scheduler.cancel(self.step)
            self.step = None
            self.advanced &= {s.request.request_id for s in self.scheduler.running}
        elif kind == "abort":
            self.aborted.add(argument)
            self.scheduler.abort(argument)
        elif kind.startswith("call "):
            self._end_call(kind[5:], argument)
        elif kind == "expire":
            self.engine.live[argument].deadline_s = -1.0
        else:
            self.engine.end(argument, "no link" if kind == "end badly" else "")

    def _schedule(self, happened: Happened) -> None:
        scheduler, wrong = self.scheduler, happened.wrong
        asleep, landed, reports = self.asleep and not self._news(), self._landed(), len(scheduler.reports.pending)
        young = {s.request.request_id for s in scheduler.running} - self.advanced
        self.step = scheduler.schedule()
        happened.tokens = self.step.num_tokens
        if self.config.spec == STATES and self.step.num_tokens:
            self.step.group("state").states()  # built, so that the audit looks at it
        if self.config.spec == INDEXED and self.step.num_tokens:
            self.step.group("index").entries()
        running = {s.request.request_id: s for s in scheduler.running}
        wrong += [
            f"I9: the load of {name} has landed, but it does not run"
            for name in landed
            if name not in running or running[name].state is not State.RUNNING
        ]
        if asleep and (self.step.num_tokens or len(scheduler.reports.pending) > reports):
            wrong.append("I30: there was work while wait() slept without news")
        stands = not (self.step.num_tokens or scheduler.reports.pending or self._progresses())
        if stands and len(inside.inbox(scheduler)):
            wrong.append(f"I8: an empty step, nothing to report, no transfer under way: {scheduler.why_waiting()}")
        wrong += self._first_stands_still(young)
        wrong += self._wrong_preemptions()
        wrong += [
            f"I7: {r.request_id} ends with capacity, but alone it would fit"
            for r in scheduler.reports.pending
            if r.finish_reason == "capacity" and self._would_fit(r.request_id, len(r.token_ids))
        ]
        wrong += [
            f"I19: the {m.way.value} {m.ticket} is overdue, and still waited for"
            for m in (self.remote.moves() if self.calls is not None else ())
            if m.deadline_s < 0 and m.state is TransferState.IN_FLIGHT
        ]
        self.advanced &= set(running)
        self.asleep = False

    def _first_stands_still(self, young: set[str]) -> list[str]:
        """I8: the first in service order computes in every step, unless a transfer is under way or somebody behind it
        was ``young``: admitted, but not yet allowed a token, so that it cannot give way."""
        unfinished = (*self.scheduler.running, *self.scheduler.waiting)
        first = min((s.order, s.request.request_id) for s in unfinished)[1] if unfinished else None
        if first is None or first in self.step.request_ids or self._progresses() or young - {first}:
            return []
        return [f"I8: {first}, the first in service order, stands still"]

    def _progresses(self) -> bool:
        """Whether a transfer is on its way that is not overdue, or a request waits for the store."""
        asks = any(s.seek is not None and s.seek.state is not SeekState.OVER for s in self.scheduler.waiting)
        return bool(asks or inside.coordinator(self.cache).door.num_copies)

    def _news(self) -> bool:
        """Whether ``wait`` would return at once."""
        due_s = inside.coordinator(self.cache).door.due_s(self.scheduler.waiting) if self.calls is not None else 1.0
        late = any(s.seek is not None and s.seek.until_s < 0 and not s.seek.is_late for s in self.scheduler.waiting)
        return bool(
            due_s <= 0.0
            or late
            or inside.inbox(self.scheduler).has_mail
            or self.connector.ledger.num_settled != inside.settled_seen(self.scheduler)
            or inside.woken(self.cache).is_set()
            or self.engine.ended
            or any(t.deadline_s < 0 for t in self.connector.ledger.live() if t.state is TransferState.IN_FLIGHT)
        )

    def _landed(self) -> list[str]:
        """Requests whose loads have ended well and which nobody has ended."""
        good = {outcome.ticket for outcome in self.engine.ended if not outcome.error}
        return [
            s.request.request_id
            for s in self.scheduler.running
            if s.state is State.LOADING and s.ticket in good and self.connector.ledger.is_live(s.ticket)
            if s.request.request_id not in self.aborted
        ]

    def _wrong_preemptions(self) -> list[str]:
        """I10, from what ``watched`` has recorded."""
        wrong: list[str] = []
        for event in _seen:
            wrong += event.wrong()
            if event.ran and event.request_id not in self.advanced:
                wrong.append(f"I10: {event.request_id} is said to have advanced, and has not")
            self.advanced.discard(event.request_id)
        return wrong

    def _would_fit(self, name: str, num_generated: int) -> bool:
        """Whether the next token of a request that runs alone finds its blocks among those not quarantined."""
        tokens = len(next(r for r in self.requests if r.request_id == name).prompt_token_ids) + num_generated
        pools = inside.pools(self.cache)
        have = pools.usable - pools.column(Col.QUARANTINED)
        return all(g.peak_blocks(tokens) <= n for g, n in zip(self.config.spec.groups, have.tolist(), strict=True))

    def _commit(self, happened: Happened) -> None:
        step, self.step = self.step, None
        ids = [50 + int(step.seq_lens[r]) for r in step.sample_rows]
        self.advanced |= set(step.request_ids)
        finished = self.scheduler.commit(step, ids)
        for done in finished:
            name, reason = done.request_id, done.finish_reason
            if name in self.reported:
                happened.wrong.append(f"I8: {name} is reported twice")
            self.reported[name] = reason
            expected = {"length", "capacity"} | ({"abort"} if name in self.aborted else set())
            if self.config.on_load_error == "fail":
                expected.add("load_error")
            if reason not in expected:
                happened.wrong.append(f"I5: {name} ends with {reason}")
            wanted = self.requests[int(name[1:])].max_new_tokens
            if reason == "length" and len(done.token_ids) != wanted:
                happened.wrong.append(f"I24: {name} ends with {len(done.token_ids)} of {wanted} tokens")
        happened.reported = tuple(done.request_id for done in finished)
        self.advanced &= {s.request.request_id for s in self.scheduler.running}
        self.asleep = not step.num_tokens and self.scheduler.has_work() and not self._news()
        if not step.num_tokens and self.scheduler.has_work():
            self.scheduler.wait(0.0)

    # --- what must hold in every state --------------------------------------------------------------

    def wrong_here(self) -> list[str]:
        """Violations that can be read off this state."""
        wrong = [f"{v.invariant}: {v.detail}" for v in self.cache.audit()]
        if self.step is None and not self.scheduler.has_work():
            missing = self.added - set(self.reported)
            if missing:
                wrong.append(f"I30: has_work() is false, but {sorted(missing)} are not reported")
        return wrong

    @property
    def is_done(self) -> bool:
        """Everything that was added is reported, and no transfer is waited for."""
        return self.step is None and not self.scheduler.has_work()

    @property
    def waits(self) -> bool:
        """A transfer is under way that can end or become overdue."""
        asked = self.calls is not None and any(a[0] != "call late" for a in self._store_actions(True))
        return asked or any(t.state is TransferState.IN_FLIGHT for t in self.engine.live.values())

    def wrong_at_rest(self) -> list[str]:
        """I27 in a state that ``is_done``: once late transfers have ended too, nothing is held. Uses the world up.

        The steps that take note of late ends may start stores in lazy mode, hence several.
        """
        for _ in range(MOST_STEPS_TO_REST):
            self._end_all()
            self.scheduler.commit(self.scheduler.schedule(), np.empty(0, np.int64))
            if not self.connector.ledger.num_live and not (self.calls is not None and self.calls.calls):
                break
        wrong = [f"I27: transfer {t.ticket} is still there" for t in self.connector.ledger.live()]
        for tier, pools in (("device", inside.pools(self.cache)), ("host", inside.host(self.cache))):
            if pools is not None and not np.array_equal(pools.clean, pools.usable):
                wrong.append(f"I27: {tier} blocks are held at rest: {pools.clean.tolist()} of {pools.usable.tolist()}")
        return wrong + [f"{v.invariant}: {v.detail}" for v in self.cache.audit()]
