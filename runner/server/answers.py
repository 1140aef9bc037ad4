"""One generation over HTTP: what completions and chats share.

Owns       the count of tokens that ``usage`` tells, and the order: let in, read, check, stream or collect.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import Request, Response
from pydantic_core import to_json

from runner.engine.outputs import CompletionOutput, RequestOutput
from runner.sampling.params import SamplingParams
from runner.server import logs
from runner.server.admission import Ticket
from runner.server.auth import Caller
from runner.server.errors import ApiError, as_api_error
from runner.server.protocol import MOST_PROMPTS, SamplingBody
from runner.server.served import Read, Served, form_asked_for
from runner.server.streaming import ClientGone, EventStream, event, outputs, while_connected

LEAST_LOGPROB = -9999.0
"""JSON has no infinity; vLLM says this as well."""


class Usage:
    """Tokens of an HTTP request: of its prompts, of its answers, and found in caches."""

    def __init__(self, prompts: Sequence[Read]) -> None:
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.completion_tokens = 0
        self._cached: dict[int, Mapping[str, int]] = {}

    def count(self, index: int, output: RequestOutput) -> None:
        """Takes what is new of prompt ``index``."""
        self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        self._cached[index] = output.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """The usage as OpenAI has it, and the cached tokens by tier."""
        tiers = Counter[str](device=0, host=0)
        for found in self._cached.values():
            tiers.update(found)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": tiers.total(), "cached_tokens_by_tier": dict(tiers)},
        }


class Generation(ABC):
    """One POST that generates."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, served: Served, body: SamplingBody, request_id: str, caller: Caller) -> None:
        self.served = served
        self.caller = caller
        self.sampling = body
        self.fields = sorted(type(body).model_fields, key=len, reverse=True)
        self.head = {
            "id": f"{self.prefix}-{body.request_id or request_id}",
            "created": int(time.time()),
            "model": body.model or served.settings.names[0],
        }

    @abstractmethod
    def read(self) -> list[Read]:
        """The prompts."""

    @abstractmethod
    def params(self, prompt: Read) -> SamplingParams:
        """How to go on from a prompt."""

    @abstractmethod
    def opening(self, index: int, prompt: Read, output: RequestOutput) -> list[dict[str, Any]]:
        """Choices of the chunks that come before the text of choice ``index``."""

    @abstractmethod
    def delta(self, index: int, answer: CompletionOutput) -> dict[str, Any]:
        """The choice that tells what is new of an answer."""

    @abstractmethod
    def choice(self, index: int, prompt: Read, answer: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """The choice that tells an answer whole."""

    async def respond(self, request: Request) -> Response:
        """The answer, or a stream of it."""
        ticket = self.served.admission.enter()
        ticket.name, ticket.owner = str(self.head["id"]), self.caller.owner
        logs.serve(ticket.name)
        streams = False
        self.headers = request.headers
        try:
            self.served.check_model(self.sampling.model)
            work = self.served.on_thread(self._prepared, request.state.body_bytes)
            prompts, params = await while_connected(request, work)
            most = self.served.llm.max_waiting_requests
            if most is not None and len(prompts) > most:
                raise ApiError(400, f"{len(prompts):,} prompts are more than wait at once ({most:,})", param="prompt")
            if len(prompts) * params[0].n > MOST_PROMPTS:
                raise ApiError(400, f"more than {MOST_PROMPTS:,} answers at once; send fewer prompts", param="n")
            if self.sampling.stream:
                events = self._events(ticket, prompts, params)
                stream = await EventStream.begin(request, events, ticket, self.fields)
                streams = True
                return stream
            return await while_connected(request, self._whole(ticket, prompts, params))
        except ClientGone:
            return Response(status_code=499)  # it has no reader
        except Exception as problem:
            error = as_api_error(problem, self.fields)
            if error.error["param"] == "structured_outputs" and (form := form_asked_for(self.sampling)):
                error.error["param"] = form[0]  # the client's name of it
            raise error from problem
        finally:
            if not streams:
                ticket.close()

    def _prepared(self) -> tuple[list[Read], list[SamplingParams]]:
        prompts = self.read()
        return prompts, [self.params(prompt) for prompt in prompts]

    def _outputs(
        self, ticket: Ticket, prompts: Sequence[Read], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        body, salt = self.sampling, self.sampling.cache_salt
        if self.served.settings.salt_by_api_key:
            salt = self.caller.salt(salt)
        given = self.served, ticket, prompts, params, self.headers
        return outputs(*given, cache_salt=salt, priority=body.priority or 0)

    async def _whole(self, ticket: Ticket, prompts: Sequence[Read], params: Sequence[SamplingParams]) -> Response:
        usage = Usage(prompts)
        choices: dict[int, dict[str, Any]] = {}
        async for at, output in self._outputs(ticket, prompts, params):
            usage.count(at, output)
            for answer in output.outputs:
                index = at * params[at].n + answer.index
                choices[index] = self.choice(index, prompts[at], answer, output)
        body = {
            **self.head,
            "object": self.kind,
            "choices": [choices[index] for index in sorted(choices)],
            "usage": usage.to_dict(),
        }
        return Response(to_json(body), media_type="application/json")

    async def _events(
        self, ticket: Ticket, prompts: Sequence[Read], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[bytes, None]:
        usage, options = Usage(prompts), self.sampling.stream_options
        head = {**self.head, "object": self.chunk_kind}
        always = bool(options and options.continuous_usage_stats)
        if options and options.include_usage:
            head["usage"] = None
        begun: set[int] = set()
        async for at, output in self._outputs(ticket, prompts, params):
            usage.count(at, output)
            if always:
                head["usage"] = usage.to_dict()
            events = []
            for answer in output.outputs:
                index = at * params[at].n + answer.index
                if index not in begun:
                    begun.add(index)
                    events += [event({**head, "choices": [one]}) for one in self.opening(index, prompts[at], output)]
                if choice := self.delta(index, answer):
                    events.append(event({**head, "choices": [choice]}))
            if events:
                yield b"".join(events)
        if options and options.include_usage:
            yield event({**head, "choices": [], "usage": usage.to_dict()})


def logprob(value: float) -> float:
    """A logprob that JSON can say."""
    return value if value > LEAST_LOGPROB else LEAST_LOGPROB
