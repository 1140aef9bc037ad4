"""Serves the plan's prompts on one cache, one after the other or at once, interrupted or not, and keeps the books."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from kvtier import FinishedRequest, KVCache, Request, Scheduler, Step
from kvtier.geometry.kinds import Kind
from kvtier.machine.stats import TransferStats
from kvtier.testing import SimulatedEngine
from runner.model.graphs import DecodeGraphs
from runner.model.hybrid import HybridModel
from runner.verify.cold import Entry, bounds, new_slots
from runner.verify.plan import Plan

IDLE_WAIT_S = 1.0
_URGENT = -1


class Observer(Protocol):
    """Sees every forward that computes a prompt."""

    def watch(self, step: Any, cache: Any, logits: Tensor, ids: np.ndarray, entries: list[Entry]) -> None:
        """``ids`` [sample rows] are committed next; ``entries`` leaves out what is not one of the prompts."""


@dataclass
class Outcome:
    """How one prompt was served."""

    prompt: int
    salt: str | None = None
    finish_reason: str = ""
    device: int = 0
    """Prompt tokens found on the device by the first admission."""
    host: int = 0
    """Prompt tokens found in the host tier."""
    preemptions: int = 0
    loaded_blocks: int = 0
    """Blocks loaded while it was served, by all requests served at the time."""
    recomputed: int = 0
    """Tokens computed more than once."""
    beside: int = 0
    """Other requests that shared a step with it, at most."""
    _computed: int = 0

    def advance(self, start: int, end: int, beside: int) -> None:
        """A step computed [start, end) of it."""
        self.recomputed += max(0, min(end, self._computed) - start)
        self._computed = max(end, self._computed)
        self.beside = max(self.beside, beside)

    def finish(self, report: FinishedRequest) -> None:
        """Notes that the request has ended."""
        self.finish_reason = report.finish_reason
        self.device, self.host = report.cached_tokens["device"], report.cached_tokens["host"]
        self.preemptions = report.preemptions


def most_running(plan: Plan) -> int:
    """All prompts, and a flood."""
    return len(plan.prompts) + 1


class Serving:
    """One cache and scheduler. A call returns when its requests have ended: their stores go on beside the next ones."""

    def __init__(
        self,
        model: HybridModel,
        cache: KVCache,
        plan: Plan,
        observer: Observer,
        engine: Any = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """``engine``: the cache's copy engine, if it is a simulated one. ``graphs``: used where they can be."""
        self.plan = plan
        self._graphs = graphs
        self._model = model
        self._cache = cache
        self._observer = observer
        self._engine = engine if isinstance(engine, SimulatedEngine) else None
        self._scheduler = Scheduler(cache, plan.chunk_tokens, max_running=most_running(plan))
        self._numbers = itertools.count()
        self._live: dict[str, Outcome] = {}  # prompts
        self._unreported = 0  # requests
        self.forgotten: list[Outcome] = []
        """What the tiers had just before a reset, if the scenario has looked."""

    def transfers(self) -> TransferStats:
        """What was copied so far."""
        return self._cache.stats().transfers

    # --- what a scenario does ---------------------------------------------------------------------

    def serve(self, prompt: int, salt: str | None = None) -> Outcome:
        """One prompt, alone."""
        return self._serve([prompt], salt=salt)[0]

    def each(self) -> list[Outcome]:
        """Every prompt, one after the other."""
        return [self.serve(i) for i in range(len(self.plan.prompts))]

    def together(self) -> list[Outcome]:
        """All prompts at once."""
        return self._serve(range(len(self.plan.prompts)))

    def interrupted(self) -> list[Outcome]:
        """Every prompt; one that goes before takes its memory, once amid the prompt and once amid the answer."""
        return [self._serve([i], self.plan.interrupts(i))[0] for i in range(len(self.plan.prompts))]

    def flood(self) -> None:
        """Entirely new content fills the device pools."""
        self._add_flood()
        self._drain()

    def read(self, prompt: int) -> None:
        """One prompt, answered with one token: windows do not move past the blocks of its hit, which stay in place."""
        self._add(Request(f"read-{next(self._numbers)}", self.plan.prompts[prompt], 1))
        self._drain()

    def settle(self) -> None:
        """All copies end."""
        while self._scheduler.has_work():
            self._step()

    def reset(self) -> None:
        """Forgets all that is cached."""
        self._cache.reset()

    # --- how --------------------------------------------------------------------------------------

    def _serve(
        self, prompts: Sequence[int], interrupt_at: Sequence[int] = (), salt: str | None = None
    ) -> list[Outcome]:
        before, outcomes = self.transfers().loaded_blocks, []
        for prompt in prompts:
            name = f"prompt-{prompt}/{next(self._numbers)}"
            outcomes.append(Outcome(prompt, salt))
            self._live[name] = outcomes[-1]
            self._add(Request(name, self.plan.prompts[prompt], self.plan.new_tokens, cache_salt=salt))
        self._drain(name, list(interrupt_at))
        for outcome in outcomes:
            outcome.loaded_blocks = self.transfers().loaded_blocks - before
        return outcomes

    def _add_flood(self, priority: int = 0) -> None:
        name = f"flood-{next(self._numbers)}"
        new_tokens = self.plan.new_tokens
        self._add(Request(name, self.plan.flood, new_tokens, cache_salt=name, priority=priority))

    def _add(self, request: Request) -> None:
        self._scheduler.add(request)
        self._unreported += 1

    def _drain(self, request: str = "", interrupt_at: list[int] | None = None) -> None:
        """Until all is reported; a flood goes before ``request`` when it has computed so many tokens."""
        while self._unreported:
            self._step()
            at = self._scheduler.progress(request)
            if interrupt_at and at is not None and at[0] >= interrupt_at[0]:
                del interrupt_at[0]
                self._add_flood(_URGENT)

    def _step(self) -> None:
        step = self._scheduler.schedule()
        ids = np.empty(0, np.int64)
        if step.num_tokens:
            if self._engine is not None:
                self._engine.compute(*_touched(step, self._cache))
            logits = None if self._graphs is None else self._graphs.forward(step)
            if logits is None:
                logits = self._model.forward(step, self._cache)
            ids = logits.argmax(-1).cpu().numpy()
            known = [(row, self._live[name]) for row, name in enumerate(step.request_ids) if name in self._live]
            for row, outcome in known:
                outcome.advance(*bounds(step, row), len(step.request_ids) - 1)
            self._observer.watch(step, self._cache, logits, ids, [(row, outcome.prompt) for row, outcome in known])
        finished = self._scheduler.commit(step, ids)
        self._unreported -= len(finished)
        for report in finished:
            if report.request_id in self._live:
                self._live.pop(report.request_id).finish(report)
        if not step.num_tokens and not finished and self._scheduler.has_work():
            self._scheduler.wait(IDLE_WAIT_S)


def _touched(step: Step, cache: KVCache) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(group index, block id) that a forward of ``step`` reads and writes."""
    reads, writes = set(), set()
    for g, group in enumerate(cache.spec.groups):
        view = step.group(group.name)
        reads |= {(g, int(b)) for b in np.unique(view.block_table) if b}
        if group.attention.kind is Kind.STATE:
            writes |= {(g, int(b)) for b in view.states().target}
            continue
        writes |= {(g, int(b)) for b in np.unique(new_slots(step, group) // group.block_entries)}
    return reads, writes
