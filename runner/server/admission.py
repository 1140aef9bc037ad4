"""Requests that are open, and when no more are taken.

Promises   once it drains, new requests are sent away, and ``empty`` says when the last request has left. Whatever a
           request waits for as the server ends, its client is told so.
Does not   bound the queue: ``AsyncLLM`` does, in requests and tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.server.errors import ApiError, stopping


class Ticket:
    """One open HTTP request, and the engine's requests that serve it. ``close`` it, once or more."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.name = ""
        """What its client knows it by."""
        self.owner = ""
        """Who may see it (``auth.Caller``)."""
        self.engine_ids: list[str] = []
        self.cut_off = False

    def check(self) -> None:
        """Raises 503 if the request has been cut off."""
        if self.cut_off:
            raise stopping(1)

    def close(self) -> None:
        """The request is answered, or its client has gone."""
        self._admission.leave(self)


class CutOff:
    """Tells requests that are cancelled because the server ends: those that the engine does not know yet."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self.app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if begun or not self._admission.is_draining:
                raise
            problem = stopping(1)
            await JSONResponse(problem.body, problem.status_code, dict(problem.headers or {}))(scope, receive, send)


class Admission:
    """Lets requests in."""

    def __init__(self, most_open: int, on_refusal: Callable[[], None] = lambda: None) -> None:
        """``most_open``: more at once are refused with 429; some connections stay free for health checks.
        ``on_refusal``: called for each of those."""
        self.most_open = most_open
        self._on_refusal = on_refusal
        self.tickets: set[Ticket] = set()
        self.drains_by_s: float | None = None
        """When, on the loop's clock, requests are cut off; None while all are welcome."""
        self._empty = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the server is about to end."""
        return self.drains_by_s is not None

    def enter(self) -> Ticket:
        """Lets a request in; raises ``ApiError`` 503 while draining, 429 if too many are open."""
        if self.drains_by_s is not None:
            raise stopping(self.drains_by_s - asyncio.get_running_loop().time())
        if len(self.tickets) >= self.most_open:
            self._on_refusal()
            raise ApiError(429, f"{self.most_open:,} requests are open already", code="overloaded", retry_after_s=1)
        ticket = Ticket(self)
        self.tickets.add(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """A request has ended."""
        self.tickets.discard(ticket)
        if not self.tickets:
            self._empty.set()

    async def empty(self, timeout_s: float) -> bool:
        """Waits until no request is open; False if some still are."""
        self._empty.clear()
        if not self.tickets:
            return True
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def drain(self, seconds: float, abort: Callable[[str], Awaitable[object]]) -> bool:
        """Takes no more. Open requests get ``seconds`` to end, then are aborted. True if all ended by themselves."""
        self.drains_by_s = asyncio.get_running_loop().time() + seconds
        if await self.empty(seconds):
            return True
        await self.cut_off(abort)
        return False

    async def cut_off(self, abort: Callable[[str], Awaitable[object]]) -> None:
        """Aborts everything that is open."""
        for ticket in list(self.tickets):
            ticket.cut_off = True
            for name in ticket.engine_ids:
                await abort(name)
