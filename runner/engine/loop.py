"""The engine loop: schedule, forward, sample, commit. Requests in, tokens out.

Owns       the part of a request that kvtier does not know: how its tokens are drawn.
Promises   a forward that fails ends the requests of its step and no other: the step is cancelled, the engine goes on.
Does not   make text of tokens, or wait for their readers (streams.py). It decides nothing about memory (kvtier).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier import DuplicateRequest, FinishedRequest, KVCache, Request, Scheduler, Step
from kvtier.cache.kv_events.publisher import KVEventPublisher
from kvtier.machine.integers import shown
from kvtier.remote.pace import Pace
from runner.engine.shares import Shares
from runner.errors import ForwardFailed, NonFiniteLogits, NonFiniteState, RunnerError
from runner.model.graphs import DecodeGraphs
from runner.model.hybrid import HybridModel
from runner.sampling.draw import Chosen, Sampler, SamplingState
from runner.sampling.logprobs import Logprobs, PromptLogprobs, TokenLogprobs, rows_of_prompts
from runner.sampling.params import SamplingParams

IDLE_WAIT_S = 1.0
"""The longest sleep of a step without tokens before it looks again; an ended copy wakes it at once."""


class _Live(NamedTuple):
    """A request that is not reported yet."""

    sampling: SamplingState
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class _Made:
    """What a forward came to: row int32 [n], token int64 [n], and soundness bool [n] of each sampled request."""

    rows: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    token_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sound: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    chosen: Chosen | None = None
    prompt_logprobs: Sequence[tuple[str, TokenLogprobs]] = ()
    unsound: Sequence[int] = ()
    """Entries that have left a recurrent state which is not finite."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of one step. ``token_ids[i]``, int64 [n], is the next token of the request that has row ``rows[i]``,
    int32 [n]."""

    rows: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    token_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    entered: Sequence[tuple[int, str]] = ()
    """Rows that have got another request since the last result, and its id."""
    logprobs: Logprobs | None = None
    """Logprobs of the new tokens of requests that asked for them, by i."""
    prompt_logprobs: Sequence[tuple[str, TokenLogprobs]] = ()
    """Logprobs of tokens of their prompts, from the second one on, in order."""
    finished: Sequence[FinishedRequest] = ()
    errors: Mapping[str, RunnerError] = field(default_factory=dict)
    """The errors of requests in ``finished`` that have ended because of an error."""

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
        self._live: dict[str, _Live] = {}
        self._prompts: dict[str, PromptLogprobs] = {}
        self._errors: dict[str, RunnerError] = {}
        self._sampler = Sampler(scheduler.max_running)
        self._prompt_tokens = np.zeros(scheduler.max_running, np.int64)
        """[max_running], of each row's request."""
        self._entered: list[tuple[int, str]] = []
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
        live = _Live(sampling, len(request.tokens))
        if self._live.setdefault(request.request_id, live) is not live:
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
            self._enter(step)
            made = self._forward(step)
        except Exception as problem:
            self._fail(step, problem)
            return StepOutput()
        except BaseException:
            self.scheduler.cancel(step)
            raise
        entries, rows, ids = step.sample_rows, made.rows, made.token_ids
        told = None if made.chosen is None else made.chosen.logprobs
        for entry in made.unsound:
            self._distrust(step.request_ids[entry], NonFiniteState(self.model.dtype))
        if made.chosen is not None and not made.sound.all():
            self._end_unsound(step, made.sound, made.chosen)
            good = np.flatnonzero(made.sound)
            entries, rows, ids = entries[good], rows[good], ids[good]
            told = None if told is None else told.among(good)
        finished = self.scheduler.commit(step, made.token_ids)
        for place, error in self._sampler.rows.take(rows, ids):
            self._give_up(step.request_ids[entries[place]], error)
        self.generated_tokens += len(ids)
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
            self.shares.note(time.perf_counter() - began_s, step.num_tokens > len(step.rows))
        if not step.num_tokens and not resting and not finished and self.scheduler.has_work():
            self.scheduler.wait(IDLE_WAIT_S)
        entered, self._entered = self._entered, []
        return StepOutput(rows, ids, entered, told, made.prompt_logprobs, finished, errors)

    def _resting(self, shares: Shares) -> Collection[str]:
        """The requests that sit the next step out."""
        return shares.resting([name for name in self.scheduler.running_ids if name in self._live])

    def _enter(self, step: Step) -> None:
        """Notes the requests that have got a row: what a step computes first of each is a part of its prompt."""
        for entry in step.prefills.tolist():
            row, name = int(step.rows[entry]), step.request_ids[entry]
            live = self._live[name]
            if self._sampler.rows.enter(row, live.sampling):
                self._prompt_tokens[row] = live.prompt_tokens
                self._entered.append((row, name))

    def _forward(self, step: Step) -> _Made:
        """The tokens of the sampled requests, and the logprobs that prompts asked for."""
        if not step.num_tokens:
            return _Made()
        start = time.perf_counter()
        samples = step.sample_rows
        asking = rows_of_prompts(step, self._prompts) if self._prompts else []
        logits = None if self.graphs is None or asking else self.graphs.forward(step)
        if logits is None:
            also = np.concatenate([rows for _, rows in asking]) if asking else ()
            logits = self.model.forward(step, self.cache, also) if asking else self.model.forward(step, self.cache)
        of_prompts = [(name, one) for name, one in self._of_prompts(asking, logits[len(samples) :])] if asking else []
        unsound = self.model.unsound
        if unsound:  # no token is chosen for them, either
            logits[torch.from_numpy(np.flatnonzero(np.isin(samples, unsound)))] = torch.nan
        if not len(samples):
            made = _Made(prompt_logprobs=of_prompts, unsound=unsound)
        else:
            rows = step.rows[samples]
            drawn = (step.seq_lens[samples] - self._prompt_tokens[rows]).astype(np.uint64)
            chosen = self._sampler.choose(logits[: len(samples)], rows, drawn)
            made = _Made(rows, *chosen.on_host(), chosen, of_prompts, unsound)
        took_s = time.perf_counter() - start
        self.forward_s += took_s
        if step.num_tokens > len(step.rows):
            self.pace.note(np.diff(step.query_start), step.seq_lens, took_s)
        self.computed_tokens += step.num_tokens
        return made

    def _of_prompts(
        self, asking: list[tuple[str, np.ndarray]], logits: torch.Tensor
    ) -> Iterator[tuple[str, TokenLogprobs]]:
        for (name, _), mine in zip(asking, logits.split([len(rows) for _, rows in asking]), strict=True):
            for one in self._prompts[name].of(mine):
                yield name, one

    def _end_unsound(self, step: Step, sound: npt.NDArray[np.bool_], chosen: Chosen) -> None:
        """Ends the requests that have no next token."""
        for place in np.flatnonzero(~sound).tolist():
            name, error = step.request_ids[step.sample_rows[place]], chosen.why(place, self.model.dtype)
            if not isinstance(error, NonFiniteLogits):
                self._give_up(name, error)
            else:
                self._distrust(name, error)

    def _distrust(self, name: str, error: RunnerError) -> None:
        """Ends a request whose K, V or states are not to be trusted; nobody finds them."""
        if self.scheduler.fail(name):
            self._errors[name] = error

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
        self._entered.clear()
        self._prompts.clear()
        self._errors.clear()
