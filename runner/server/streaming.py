"""Answers as they come: the engine's outputs for one HTTP request, as events of a stream or as a whole.

Promises   whatever ends a request, client or server, ends it in the engine too. A fault of a request that shows before
           the stream begins gets its own status. A later fault is an event of the stream.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from runner.engine.outputs import RequestOutput
from runner.sampling.params import SamplingParams
from runner.server.admission import Ticket
from runner.server.errors import as_api_error, failed_answer
from runner.server.served import Read, Served

START_WAIT_S = 15.0
"""How long a stream's head waits for its first event, so that what is wrong can still be told as a status."""
PING_S = 15.0
"""A stream that has nothing to say says so, before proxies give it up."""
DONE = b"data: [DONE]\n\n"
_PING = b": waiting\n\n"

T = TypeVar("T")


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % to_json(data)


async def outputs(
    served: Served,
    ticket: Ticket,
    prompts: Sequence[Read],
    params: Sequence[SamplingParams],
    headers: Headers,
    *,
    cache_salt: str | None,
    priority: int,
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(Index of the prompt, what is new of its answers) until all have ended; raises ``ApiError`` if one fails.

    It will be explained by the ticket's name, to its owner. ``headers``: they tell its trace.
    """
    ticket.check()
    runs, share = [], uuid.uuid4().hex
    for prompt, one in zip(prompts, params, strict=True):
        own = uuid.uuid4().hex
        ticket.engine_ids.append(own)
        given = {"prompt_token_ids": prompt.token_ids, "boundaries": prompt.boundaries}
        runs.append(served.llm.generate(given, one, own, cache_salt=cache_salt, priority=priority, share=share))
    served.llm.explanations.name(ticket.name, ticket.engine_ids, ticket.owner)
    if served.tracing is not None:
        for own in ticket.engine_ids:
            served.tracing.note_caller(own, headers)
    async with aclosing(served.finished.follow(ticket, prompts, _merged(runs))) as merged:
        async for index, output in merged:
            for answer in output.outputs:
                if failed := failed_answer(answer, ticket.cut_off):
                    raise failed
            yield index, output


async def _merged(
    runs: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    if len(runs) == 1:
        async with aclosing(runs[0]) as run:
            async for output in run:
                yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(run)): index for index, run in enumerate(runs)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    output = task.result()
                    waiting[asyncio.ensure_future(anext(runs[index]))] = index
                    yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for run in runs:
            await run.aclose()


class ClientGone(Exception):
    """There is no client to answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work``, and cancels it if the client goes away: ``ClientGone``."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A response of server-sent events. Make one with ``begin``."""

    media_type = "text/event-stream"

    def __init__(
        self, first: asyncio.Future[bytes], events: AsyncGenerator[bytes, None], ticket: Ticket, fields: Sequence[str]
    ) -> None:
        super().__init__(self._rest(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first = first
        self._events = events
        self._ticket = ticket
        self._fields = fields
        self._sent_s = 0.0

    @classmethod
    async def begin(
        cls, request: Request, events: AsyncGenerator[bytes, None], ticket: Ticket, fields: Sequence[str]
    ) -> EventStream:
        """Waits for the first event, but not for ever; raises what comes instead of it."""
        first = asyncio.ensure_future(anext(events))
        stream = cls(first, events, ticket, fields)
        try:
            await while_connected(request, _settled(first))
            if first.done():
                first.result()
        except BaseException:
            await stream.close()
            raise
        return stream

    async def close(self) -> None:
        """Ends the request, in the engine too."""
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._events.aclose()
        self._ticket.close()

    async def _rest(self) -> AsyncGenerator[bytes, None]:
        try:
            yield await self._first
            async for one in self._events:
                yield one
        except Exception as problem:
            yield event(as_api_error(problem, self._fields).body)
        yield DONE

    async def stream_response(self, send: Send) -> None:
        """Sends events as they come, and a comment if none does for a while."""
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._sent_s = loop.time()
        pings = loop.create_task(self._ping(send))
        try:
            async for chunk in self.body_iterator:
                self._sent_s = loop.time()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            pings.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_S)
            if loop.time() - self._sent_s >= PING_S:
                await send({"type": "http.response.body", "body": _PING, "more_body": True})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self.close())


async def _settled(task: asyncio.Future[Any]) -> None:
    await asyncio.wait({task}, timeout=START_WAIT_S)
