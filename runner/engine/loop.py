"""The engine loop: schedule, forward, sample, commit. Requests in, tokens out.

Owns       the part of a request that kvtier does not know: how its tokens are drawn.
Promises   a forward that fails ends the requests of its step and no other: the step is cancelled, the engine goes on.
Does not   make text of tokens, or wait for their readers (streams.py). It decides nothing about memory (kvtier).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch

from kvtier import DuplicateRequest, FinishedRequest, KVCache, Request, Scheduler, Step
from kvtier.cache.kv_events.publisher import KVEventPublisher
from kvtier.machine.integers import shown
from kvtier.remote.pace import Pace
from runner.engine.shares import Shares
from runner.errors import ForwardFailed, NonFiniteLogits, RunnerError
from runner.model.graphs import DecodeGraphs
from runner.model.hybrid import HybridModel
from runner.sampling.draw import Chosen, Sampler, SamplingState
from runner.sampling.logprobs import PromptLogprobs, TokenLogprobs, rows_of_prompts
from runner.sampling.params import SamplingParams

IDLE_WAIT_S = 1.0
"""The longest sleep of a step without tokens before it looks again; an ended copy wakes it at once."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of one step. ``token_ids[i]`` is the next token of ``request_ids[i]``."""

    request_ids: list[str]
    token_ids: list[int]
    finished: list[FinishedRequest]
    errors: dict[str, RunnerError]
    """The errors of requests in ``finished`` that have ended because of an error."""
    logprobs: dict[str, TokenLogprobs]
    """Logprobs of the new tokens of requests that asked for them."""
    prompt_logprobs: list[tuple[str, TokenLogprobs]]
    """Logprobs of tokens of their prompts, from the second one on, in order."""

    def check(self) -> None:
        """Raises the error of a forward, if a request has ended with it."""
        for error in self.errors.values():
            if error.__cause__ is not None:
                raise error.__cause__


class Engine:
    """Serves requests with one model on one cache. ``step`` runs on one thread; ``abort`` on any, and ``add`` too
    without ``shares``."""

    def __init__(
        self,
        model: HybridModel,
        cache: KVCache,
        scheduler: Scheduler,
        graphs: DecodeGraphs | None = None,
        kv_events: KVEventPublisher | None = None,
        shares: Shares | None = None,
    ) -> None:
        """``graphs``: captured decode steps, used if they can be. ``kv_events``: for routers. ``shares``: callers have
        their share of the steps; without, every step has all requests."""
        self.model = model
        self.graphs = graphs
        self.cache = cache
        self.scheduler = scheduler
        self.kv_events = kv_events
        self.shares = shares
        self._live: dict[str, SamplingState] = {}
        self._prompts: dict[str, PromptLogprobs] = {}
        self._errors: dict[str, RunnerError] = {}
        self._sampler = Sampler()
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.forward_s = 0.0
        self.pace = Pace()
        """How long prompts take to compute."""

    def add(self, request: Request, sampling: SamplingParams | SamplingState, share: str = "") -> None:
        """Queues a request; raises the errors of ``Scheduler.add``. ``share``: of the steps, which it may
        have in common with others."""
        self.scheduler.check(request)
        if isinstance(sampling, SamplingParams):
            sampling = SamplingState.of(sampling, request.tokens, request.eos_token_ids)
        if self._live.setdefault(request.request_id, sampling) is not sampling:
            name = shown(request.request_id)
            raise DuplicateRequest(f"a request {name} is already waiting or running; use another id")
        try:
            self.scheduler.add(request)
        except BaseException:
            del self._live[request.request_id]
            raise
        if self.shares is not None:
            self.shares.add(request.request_id, share or request.request_id)
        if self.kv_events is not None:
            self.kv_events.add(request)
        if sampling.params.prompt_logprobs is not None:
            self._prompts[request.request_id] = PromptLogprobs(request.tokens, sampling.params.prompt_logprobs)

    def abort(self, request_id: str) -> bool:
        """Ends a request early, reported as far as it has come; False if it has ended already."""
        return self.scheduler.abort(request_id)

    def finish(self, request_id: str) -> bool:
        """Ends a request because its text is complete; False if it has ended already."""
        return self.scheduler.finish(request_id)

    def has_work(self) -> bool:
        """True while a request is not reported or a copy is under way."""
        return self.scheduler.has_work()

    def has_requests(self) -> bool:
        """True while a request is not reported; copies may outlast it and go on beside the next requests."""
        return bool(self._live)

    def step(self) -> StepOutput:
        """One forward pass, or a short sleep if only copies can make progress."""
        began_s = time.perf_counter()
        resting = () if self.shares is None or self.shares.are_even else self._resting(self.shares)
        step = self.scheduler.schedule(resting) if resting else self.scheduler.schedule()
        try:
            names, ids, sound, chosen, of_prompts = self._forward(step)
        except Exception as problem:
            self._fail(step, problem)
            return StepOutput([], [], [], {}, {}, [])
        except BaseException:
            self.scheduler.cancel(step)
            raise
        tokens, told = ids.tolist(), {}
        if chosen is not None:
            if chosen.logprobs is not None:
                told = {names[row]: one for row, one in chosen.logprobs.by_row()}
            if not sound.all():
                names, tokens = self._drop_unsound(names, tokens, sound, chosen)
        finished = self.scheduler.commit(step, ids)
        for name, token in zip(names, tokens, strict=True):
            state = self._live[name]
            state.take(token)
            if state.error is not None:
                self._give_up(name, state.error)
        self.generated_tokens += len(names)
        if self.kv_events is not None:
            self.kv_events.step(finished)
        errors = {}
        for report in finished:
            name = report.request_id
            del self._live[name]
            if self.shares is not None:
                self.shares.drop(name)
            self._prompts.pop(name, None)
            if name in self._errors:
                errors[name] = self._errors.pop(name)
        if self.shares is not None:
            self.shares.note(time.perf_counter() - began_s, step.num_tokens > len(step.request_ids))
        if not step.num_tokens and not resting and not finished and self.scheduler.has_work():
            self.scheduler.wait(IDLE_WAIT_S)
        return StepOutput(names, tokens, finished, errors, told, of_prompts)

    def _resting(self, shares: Shares) -> Collection[str]:
        """The requests that sit the next step out."""
        return shares.resting([name for name in self.scheduler.running_ids if name in self._live])

    def _forward(
        self, step: Step
    ) -> tuple[list[str], np.ndarray, np.ndarray, Chosen | None, list[tuple[str, TokenLogprobs]]]:
        """The sampled requests, their tokens int64 and whether they can be taken, how they were chosen, and the
        logprobs that prompts asked for."""
        ids, sound = np.empty(0, np.int64), np.empty(0, np.bool_)
        if not step.num_tokens:
            return [], ids, sound, None, []
        start = time.perf_counter()
        names = [step.request_ids[r] for r in step.sample_rows]
        asking = rows_of_prompts(step, self._prompts) if self._prompts else []
        logits = None if self.graphs is None or asking else self.graphs.forward(step)
        if logits is None:
            also = np.concatenate([rows for _, rows in asking]) if asking else ()
            logits = self.model.forward(step, self.cache, also) if asking else self.model.forward(step, self.cache)
        of_prompts = [(name, one) for name, one in self._of_prompts(asking, logits[len(names) :])] if asking else []
        chosen = None
        if names:
            chosen = self._sampler.choose(logits[: len(names)], [self._live[name] for name in names])
            ids, sound = chosen.on_host()
        took_s = time.perf_counter() - start
        self.forward_s += took_s
        if step.num_tokens > len(step.request_ids):
            self.pace.note(np.diff(step.query_start), step.seq_lens, took_s)
        self.computed_tokens += step.num_tokens
        return names, ids, sound, chosen, of_prompts

    def _of_prompts(
        self, asking: list[tuple[str, np.ndarray]], logits: torch.Tensor
    ) -> Iterator[tuple[str, TokenLogprobs]]:
        for (name, _), mine in zip(asking, logits.split([len(rows) for _, rows in asking]), strict=True):
            for one in self._prompts[name].of(mine):
                yield name, one

    def _drop_unsound(
        self, names: list[str], tokens: list[int], sound: np.ndarray, chosen: Chosen
    ) -> tuple[list[str], list[int]]:
        """Ends the requests that have no next token; returns the others."""
        for row in np.flatnonzero(~sound).tolist():
            error = chosen.why(row, self.model.dtype)
            if not isinstance(error, NonFiniteLogits):
                self._give_up(names[row], error)
            elif self.scheduler.fail(names[row]):  # its K and V are not to be trusted
                self._errors[names[row]] = error
        return list(compress(names, sound)), list(compress(tokens, sound))

    def _give_up(self, name: str, error: RunnerError) -> None:
        """Ends a request that cannot go on, though its K and V are right."""
        if self.scheduler.abort(name):
            self._errors[name] = error

    def _fail(self, step: Step, problem: Exception) -> None:
        """Takes a step back; its requests end with the next commit. Raises an error that leaves no device to go on
        with."""
        self.scheduler.cancel(step)
        if isinstance(problem, torch.AcceleratorError):
            raise problem
        for name in step.request_ids:
            error = ForwardFailed(f"the forward raised {type(problem).__name__}: {problem}")
            error.__cause__ = problem
            self._give_up(name, error)

    def rest(self) -> None:
        """There is nothing to do for now: routers hear of the last step at once."""
        if self.kv_events is not None:
            self.kv_events.poll()

    def drop_all(self) -> None:
        """Aborts everything and drains it: whatever has ended a step too early, the engine is empty and usable."""
        if self.scheduler.step is not None:
            self.scheduler.cancel(self.scheduler.step)
        for request_id in self.scheduler.request_ids:
            self.scheduler.abort(request_id)
        while self.scheduler.request_ids:
            step = self.scheduler.schedule()
            finished = self.scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))
            if self.kv_events is not None:
                self.kv_events.step(finished)
        self._live.clear()
        self._prompts.clear()
        self._errors.clear()
