"""Bodies of requests: bounded in bytes and time, and read as JSON by pydantic's own parser.

Promises   no client holds more memory than it may, nor for longer than it may; nothing is kept once it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from runner.server.errors import ApiError
from runner.server.settings import MIB, Settings

_CLOSE = {"Connection": "close"}
_PARSED_AT_ONCE = 64 * 1024
"""Bytes that are read on the event loop: less than handing them to a thread costs."""


class Buffers:
    """Bytes of all bodies that are being received."""

    def __init__(self, settings: Settings, on_refusal: Callable[[], None]) -> None:
        """``on_refusal``: called for each body that is not taken since too much comes."""
        self.settings = settings
        self._on_refusal = on_refusal
        self.held = 0

    async def receive(self, request: Request) -> bytes:
        """A body, whole; ``body_bytes`` of the request's state says how long it was.

        Raises ``ApiError``: 413 if it is too large, 408 if it is too slow, 429 if too much comes.
        """
        most, seconds = self.settings.max_body_bytes, self.settings.read_timeout_s
        if _announced(request) > most:
            raise self._too_large()
        parts: list[bytes] = []
        size, start = 0, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(seconds) as limit:
                async for part in request.stream():
                    size += len(part)
                    self.held += len(part)
                    parts.append(part)
                    if size > most:
                        raise self._too_large()
                    if self.held > self.settings.max_buffered_bytes:
                        self._on_refusal()
                        raise ApiError(
                            429, "too many large requests at once", code="overloaded", retry_after_s=1, headers=_CLOSE
                        )
                    limit.reschedule(start + seconds * (1 + size / MIB))
        except TimeoutError:
            raise ApiError(408, f"the body came too slowly ({size:,} bytes)", headers=_CLOSE) from None
        except ClientDisconnect:
            raise ApiError(400, "the client has gone") from None
        finally:
            self.held -= size
        request.state.body_bytes = size
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.settings.max_body_bytes:,} bytes", headers=_CLOSE)


def _announced(request: Request) -> int:
    """Bytes of a body; 0 if nobody says."""
    announced = request.headers.get("content-length", "")
    return int(announced) if announced.isdigit() else 0


class JsonRequest(Request):
    """A request whose body is read once."""

    _read = b""

    async def body(self) -> bytes:
        """The body; ``json`` takes it away."""
        self._read = await self.app.state.buffers.receive(self)
        return self._read

    async def json(self) -> Any:
        """The body's value; raises ``ApiError`` 400 if it is no JSON."""
        data, self._read = self._read, b""
        try:
            if len(data) <= _PARSED_AT_ONCE:
                return from_json(data, allow_inf_nan=False, cache_strings="keys")
            return await asyncio.to_thread(from_json, data, allow_inf_nan=False, cache_strings="keys")
        except ValueError as problem:
            raise ApiError(400, f"the body is not valid JSON: {problem}", code="invalid_json") from None


class JsonRoute(APIRoute):
    """A route that gets a ``JsonRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, as FastAPI makes it, but for requests of ours."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
