"""``AsyncLLM``: the engine for any number of coroutines, as vLLM users know it."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from kvtier import CacheClosed, DuplicateRequest, InvalidRequest, Request, Violation
from kvtier.machine.integers import shown
from runner.api.turns import Turn
from runner.engine.answers import Answer, Answers
from runner.engine.inputs import Given, Prompt
from runner.engine.outputs import RequestOutput
from runner.engine.service import Service
from runner.engine.streams import Courier, LoopMail, Mail
from runner.errors import EngineDead, Overloaded
from runner.metrics.timing import Timing, refusals
from runner.sampling.grammars.matching import Grammar
from runner.sampling.params import RequestOutputKind, SamplingParams
from runner.sampling.state import SamplingState

if TYPE_CHECKING:
    from runner.metrics.metrics import Metrics


READERS = 2
"""Threads that read long prompts and long lists of bad words."""
LONG = 2000
"""Letters of text or of bad words, or ids in a list, that take more than a loop's moment; arrays of ids are read at
once."""


class AsyncLLM(Service):
    """Serves prompts as they come, and gives out the tokens of each as they are made.

    Takes the arguments of ``LLM``. The engine runs on a thread of its own: no caller waits for another's client,
    tokenizer or prompt. Calls may come from coroutines of several event loops.
    """

    settles = shares_steps = True

    def __init__(
        self,
        *args: Any,
        max_waiting_requests: int | None = None,
        max_waiting_tokens: int | None = None,
        **options: Any,
    ) -> None:
        """Further arguments:

        ``max_waiting_requests``, ``max_waiting_tokens``  most prompts without a first token, and most tokens of them;
            beyond that ``generate`` raises ``Overloaded``. None: no limit.
        """
        super().__init__(*args, **options)
        self.max_waiting_requests = max_waiting_requests
        self.max_waiting_tokens = max_waiting_tokens
        self.metrics: Metrics | None = None
        """Set by a counting owner: it is told of all requests from then on."""
        self._readers = ThreadPoolExecutor(READERS, "kvtier-prompts")
        self._couriers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Courier] = weakref.WeakKeyDictionary()
        self._open: dict[str, Answers] = {}
        self._waiting: dict[str, int] = {}  # prompt tokens of requests without a first token
        self._counting = threading.Lock()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        share: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answers' outputs as they grow, until all have ended. A slow caller gets more at once.

        ``sampling_params.output_kind`` says whether each output has all so far, only the new part, or comes only at the
        end. To leave the iteration (``aclose``, a cancelled task) aborts the request. Many answers to one request rest
        in some steps, for requests with fewer (``shares.py``); prompts of one ``share`` count as one request.

        Raises ``InvalidRequest``, ``RequestTooLarge``, ``DuplicateRequest``, ``Overloaded`` and ``EngineDead`` before
        anything is queued, and ``EngineDead`` if the engine dies meanwhile.
        """
        arrived_s = time.perf_counter()
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {shown(params)}")

        def read() -> tuple[Given, str, list[tuple[Request, SamplingState]]]:
            given = self.inputs.read(prompt)
            given = replace(given, beside={"cache_salt": cache_salt, "priority": priority, **given.beside})
            return given, *self._requests(given, params, grammar, request_id)

        loop, readers = asyncio.get_running_loop(), self._readers if _is_long(prompt, params) else None
        with refusals(self.metrics):
            self.thread.check()
            grammar = await self._grammar(params)
            given, name, rows = read() if readers is None else await loop.run_in_executor(readers, read)
            mail = LoopMail(self._courier())
            answers = self._admit(given, name, rows, mail, arrived_s, share)
        timing = None if self.metrics is None else Timing(self.metrics, answers, params)
        turn = Turn()
        try:
            while not answers.is_done:
                has_more = answers.has_more
                if has_more or turn.rest_s:
                    await asyncio.sleep(turn.rest_s)
                if not has_more:
                    await mail.news()
                with turn:
                    fresh = answers.advance(self.thread)
                    self._note_begun(answers)
                    if timing is not None:
                        timing.on_tokens(fresh)
                    if answers.is_done and isinstance(answers.failure, (EngineDead, CacheClosed)):
                        raise answers.failure
                    output = _due(answers, fresh, params.output_kind)
                if output is not None:
                    yield output
        finally:
            answers.abort(self.thread)
            self._leave(answers)
            if timing is not None:
                timing.on_end()

    async def abort(self, request_id: str) -> bool:
        """Ends a request early, with all its answers, reported as far as they are. False if none of them still went
        on."""
        answers = self._open.get(request_id)
        if answers is None or not self.thread.is_alive:
            return False
        ids = [answer.request.request_id for answer in answers.answers]
        ended = await asyncio.wrap_future(self.thread.call(lambda: [self.engine.abort(name) for name in ids]))
        return any(ended)

    # --- how it is --------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raises ``EngineDead`` unless requests are served."""
        self.thread.check()

    def load(self) -> dict[str, int]:
        """Requests that wait and requests that run now, and the prompt tokens of requests without a first token."""
        return {
            "waiting": self.scheduler.num_waiting,
            "running": self.scheduler.num_running,
            "waiting_tokens": sum(self._waiting.values()),
        }

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached content in both tiers, between two steps; see ``KVCache.reset_prefix_cache``."""
        return await asyncio.wrap_future(self.thread.call(self.scheduler.reset_prefix_cache))

    async def audit(self) -> list[Violation]:
        """Audits the engine, as ``LLM.audit`` does."""
        return await asyncio.wrap_future(self.thread.call(self.cache.audit))

    def close(self) -> None:
        """Ends the service, as ``Service.close`` does; prompts that are being read are not waited for."""
        if not self.thread.is_elsewhere:
            self._readers.shutdown(wait=False, cancel_futures=True)
        super().close()

    async def shutdown(self) -> None:
        """Does what ``close`` does, without blocking the loop for the step under way."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    # --- waiting requests -------------------------------------------------------------------------

    def _admit(
        self,
        given: Given,
        name: str,
        rows: list[tuple[Request, SamplingState]],
        mail: Mail,
        arrived_s: float,
        share: str | None,
    ) -> Answers:
        """Queues a prompt, unless too much waits already."""
        tokens = len(given.token_ids) * len(rows)
        with self._counting:
            queued = sum(self._waiting.values())
            for most, there, comes, unit in (
                (self.max_waiting_requests, len(self._waiting), 1, "requests"),
                (self.max_waiting_tokens, queued, tokens, "tokens"),
            ):
                if most is not None and there and there + comes > most:
                    raise Overloaded(
                        f"{there:,} {unit} wait already, of at most {most:,}; try again later", self._wait_s(queued)
                    )
            if name in self._open:
                raise DuplicateRequest(f"a request {shown(name)} is already waiting or running; use another id")
            answers = self._submit(given, name, rows, mail, arrived_s, share)
            self._open[name] = answers
            self._waiting[name] = tokens
        return answers

    def _note_begun(self, answers: Answers) -> None:
        """A request with a first token waits no more."""
        if answers.has_begun:
            self._waiting.pop(answers.request_id, None)

    def _leave(self, answers: Answers) -> None:
        self._waiting.pop(answers.request_id, None)
        del self._open[answers.request_id]

    def _wait_s(self, tokens: int) -> float:
        """About how long ``tokens`` take, at the speed so far."""
        computed, seconds = self.engine.computed_tokens, self.engine.forward_s
        return min(60.0, max(1.0, tokens * seconds / computed if computed else 1.0))

    async def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Compiles ``structured_outputs``; a caller that leaves ends it."""
        if params.structured_outputs is None:
            return None
        return await asyncio.wrap_future(self.grammars.begin(params.structured_outputs))

    def _courier(self) -> Courier:
        loop = asyncio.get_running_loop()
        return self._couriers.setdefault(loop, Courier(loop))


def _is_long(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether reading them would keep other requests waiting."""
    if sum(map(len, params.bad_words or ())) > LONG:
        return True
    given = prompt.get("prompt", prompt.get("prompt_token_ids")) if isinstance(prompt, Mapping) else prompt
    return isinstance(given, (str, list, tuple)) and len(given) > LONG


def _due(answers: Answers, fresh: list[Answer], kind: RequestOutputKind) -> RequestOutput | None:
    """The output that is due, if ``fresh`` have something new; None if none is due yet."""
    if kind is RequestOutputKind.DELTA and fresh:
        return answers.output(fresh, delta=True)
    if answers.is_done or (kind is RequestOutputKind.CUMULATIVE and fresh):
        return answers.output(answers.answers, delta=False)
    return None
