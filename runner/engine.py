"""The engine loop: schedule, forward, sample, commit. Requests in, tokens out.

Owns       what kvtier does not know of a request: how its tokens are drawn.
Promises   a forward that fails ends the requests of its step and no other: the step is cancelled, the engine goes on.
Does not   make text of tokens, or wait for who reads them (streams.py), and decides nothing about memory (kvtier).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch

from kvtier import DuplicateRequest, FinishedRequest, KVCache, Request, Scheduler, Step
from kvtier._integers import shown
from runner.draw import Sampler, SamplingState
from runner.errors import ForwardFailed, NonFiniteLogits, RunnerError
from runner.graphs import DecodeGraphs
from runner.model import HybridModel
from runner.sampling import SamplingParams

IDLE_WAIT_S = 1.0
"""How long a step without tokens sleeps at most before it looks again; an ended copy wakes it at once."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step has brought. ``token_ids[i]`` is the next token of ``request_ids[i]``."""

    request_ids: list[str]
    token_ids: list[int]
    finished: list[FinishedRequest]
    errors: dict[str, RunnerError]
    """Why those of ``finished`` ended that have "error" as their reason."""


class Engine:
    """Serves requests with one model on one cache. ``step`` runs on one thread; ``add`` and ``abort`` on any."""

    def __init__(
        self, model: HybridModel, cache: KVCache, scheduler: Scheduler, graphs: DecodeGraphs | None = None
    ) -> None:
        """``graphs``: captured decode steps, used where they can be."""
        self.model = model
        self.graphs = graphs
        self.cache = cache
        self.scheduler = scheduler
        self._live: dict[str, SamplingState] = {}
        self._errors: dict[str, RunnerError] = {}
        self._sampler = Sampler()
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.forward_s = 0.0

    def add(self, request: Request, params: SamplingParams) -> None:
        """Queues a request; raises what ``Scheduler.add`` raises."""
        self.scheduler.check(request)
        state = SamplingState.of(params)
        if self._live.setdefault(request.request_id, state) is not state:
            name = shown(request.request_id)
            raise DuplicateRequest(f"a request {name} is already waiting or running; use another id")
        try:
            self.scheduler.add(request)
        except BaseException:
            del self._live[request.request_id]
            raise

    def abort(self, request_id: str) -> bool:
        """Ends a request early; it is reported with what it has. False if it has ended already."""
        return self.scheduler.abort(request_id)

    def finish(self, request_id: str) -> bool:
        """Ends a request because its text is complete; False if it has ended already."""
        return self.scheduler.finish(request_id)

    def has_work(self) -> bool:
        """True while a request is not reported or a copy is under way."""
        return self.scheduler.has_work()

    def has_requests(self) -> bool:
        """True while a request is not reported; copies may outlast that and go on beside the next requests."""
        return bool(self._live)

    def step(self) -> StepOutput:
        """One forward pass, or a short sleep if only copies can make progress."""
        step = self.scheduler.schedule()
        try:
            ids, sound = self._forward(step)
        except Exception as problem:
            self._fail(step, problem)
            return StepOutput([], [], [], {})
        except BaseException:
            self.scheduler.cancel(step)
            raise
        names = [step.request_ids[r] for r in step.sample_rows]
        for name in compress(names, ~sound):
            self._errors[name] = NonFiniteLogits(self.model.dtype)
            self.scheduler.fail(name)
        finished = self.scheduler.commit(step, ids)
        tokens = ids.tolist()
        if not sound.all():
            names, tokens = list(compress(names, sound)), list(compress(tokens, sound))
        for name, token in zip(names, tokens, strict=True):
            self._live[name].take(token)
        self.generated_tokens += len(names)
        for report in finished:
            del self._live[report.request_id]
        errors = {r.request_id: e for r in finished if (e := self._errors.pop(r.request_id, None)) is not None}
        if not step.num_tokens and not finished and self.scheduler.has_work():
            self.scheduler.wait(IDLE_WAIT_S)
        return StepOutput(names, tokens, finished, errors)

    def _forward(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """The token of each entry that is sampled, int64, and whether its logits allow for one, bool."""
        ids, sound = np.empty(0, np.int64), np.empty(0, bool)
        if not step.num_tokens:
            return ids, sound
        start = time.perf_counter()
        logits = None if self.graphs is None else self.graphs.forward(step)
        if logits is None:
            logits = self.model.forward(step, self.cache)
        live = [self._live[step.request_ids[r]] for r in step.sample_rows]
        if live:
            chosen = self._sampler.choose(logits, live)
            ids, sound = chosen.ids.cpu().numpy(), chosen.sound.cpu().numpy()
        self.forward_s += time.perf_counter() - start
        self.computed_tokens += step.num_tokens
        return ids, sound

    def _fail(self, step: Step, problem: Exception) -> None:
        """Takes a step back; its requests end with the next commit. Raises what leaves no device to go on with."""
        self.scheduler.cancel(step)
        if isinstance(problem, torch.AcceleratorError):
            raise problem
        for name in step.request_ids:
            error = ForwardFailed(f"the forward raised {type(problem).__name__}: {problem}")
            error.__cause__ = problem
            if self.scheduler.fail(name):
                self._errors[name] = error

    def drop_all(self) -> None:
        """Aborts everything and drains it: whatever has ended a step too early, the engine is empty and usable."""
        if self.scheduler.step is not None:
            self.scheduler.cancel(self.scheduler.step)
        for request_id in self.scheduler.request_ids:
            self.scheduler.abort(request_id)
        while self.scheduler.request_ids:
            step = self.scheduler.schedule()
            self.scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
        self._live.clear()
        self._errors.clear()
