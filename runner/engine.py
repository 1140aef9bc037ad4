"""The engine loop: schedule, forward, sample, commit. One request in, one output back.

Owns       what kvtier does not know of a request: its sampling, its text, its clock.
Promises   a forward that fails takes no other request along: the step is cancelled and the engine stays usable. What
           interrupts a call does so in a forward, never in the bookkeeping.
Does not   load models or parse arguments (llm.py), and decides nothing about memory (kvtier).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import compress

import numpy as np

from kvtier import DuplicateRequest, FinishedRequest, KVCache, Request, Scheduler, Step
from kvtier._integers import shown
from runner.draw import Sampler, SamplingState
from runner.errors import NonFiniteLogits
from runner.graphs import DecodeGraphs
from runner.interrupts import Interrupts
from runner.model import HybridModel
from runner.outputs import RequestOutput, TextStream
from runner.sampling import SamplingParams

IDLE_WAIT_S = 1.0
"""How long a step without tokens sleeps at most before it looks again; an ended copy wakes it at once."""


@dataclass(slots=True)
class _Live:
    request: Request
    params: SamplingParams
    sampling: SamplingState
    stream: TextStream
    arrived_s: float
    first_token_s: float | None = None


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
        self.interrupts = Interrupts()
        """Held by whoever calls ``step`` in a loop; ``step`` allows them in its forward."""
        self._live: dict[str, _Live] = {}
        self._sampler = Sampler()
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.forward_s = 0.0

    def add(self, request: Request, params: SamplingParams, arrived_s: float | None = None) -> None:
        """Queues a request; raises what ``Scheduler.add`` raises.

        ``arrived_s``: what its times count from, on ``time.perf_counter``'s clock; None is now.
        """
        self.scheduler.check(request)
        stream = TextStream(self.model.tokenizer, params.stop_strings)
        arrived_s = time.perf_counter() if arrived_s is None else arrived_s
        live = _Live(request, params, SamplingState.of(params), stream, arrived_s)
        if self._live.setdefault(request.request_id, live) is not live:
            name = shown(request.request_id)
            raise DuplicateRequest(f"a request {name} is already waiting or running; use another id")
        try:
            self.scheduler.add(request)
        except BaseException:
            del self._live[request.request_id]
            raise

    def abort(self, request_id: str) -> bool:
        """Ends a request early; it is reported with what it has."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """True while a request is not reported or a copy is under way."""
        return self.scheduler.has_work()

    def has_requests(self) -> bool:
        """True while a request is not reported; copies may outlast that and go on beside the next requests."""
        return bool(self._live)

    def step(self) -> list[RequestOutput]:
        """One forward pass, or a short sleep if only copies can make progress; returns the requests that ended."""
        step = self.scheduler.schedule()
        try:
            with self.interrupts.allowed():
                ids, sound = self._forward(step)
        except BaseException:
            self.scheduler.cancel(step)
            raise
        names = [step.request_ids[r] for r in step.sample_rows]
        for name in compress(names, ~sound):
            self.scheduler.fail(name)
        finished = self.scheduler.commit(step, ids)
        for name, token in compress(zip(names, ids.tolist(), strict=True), sound):
            self._take(name, token)
        outputs = [self._report(f) for f in finished]
        if not step.num_tokens and not outputs and self.scheduler.has_work():
            self.scheduler.wait(IDLE_WAIT_S)
        return outputs

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
            ids, sound = (x.cpu().numpy() for x in self._sampler.choose(logits, [x.sampling for x in live]))
        self.forward_s += time.perf_counter() - start
        self.computed_tokens += step.num_tokens
        return ids, sound

    def _take(self, request_id: str, token: int) -> None:
        live = self._live[request_id]
        self.generated_tokens += 1
        live.sampling.drawn += 1
        if live.first_token_s is None:
            live.first_token_s = time.perf_counter()
        if live.params.stop_strings and live.stream.push(token):
            self.scheduler.finish(request_id)

    def _report(self, finished: FinishedRequest) -> RequestOutput:
        live = self._live.pop(finished.request_id)
        text = TextStream(self.model.tokenizer, live.params.stop_strings)
        for token in finished.token_ids:
            text.push(token)
        now = time.perf_counter()
        return RequestOutput(
            request_id=finished.request_id,
            prompt_token_ids=live.request.tokens.tolist(),
            token_ids=finished.token_ids,
            text=text.finish(),
            finish_reason="stop" if text.stopped else finished.finish_reason,
            cached_tokens=finished.cached_tokens,
            preemptions=finished.preemptions,
            ttft_s=None if live.first_token_s is None else live.first_token_s - live.arrived_s,
            latency_s=now - live.arrived_s,
            error=NonFiniteLogits(self.model.dtype) if finished.finish_reason == "error" else None,
        )

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
