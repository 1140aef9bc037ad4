"""uvicorn's connections, with an end to what a client may leave unfinished.

Promises   a head that does not come, or does not end, and a stream without a reader cost bounded time and memory.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runner.server.settings import Settings

log = logging.getLogger("kvtier.server")

MOST_HEAD_BYTES = 64 * 1024


def protocol_class(settings: Settings) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes a connection of."""

    class Bounded(BoundedProtocol):
        most = settings.max_connections
        seconds = settings.read_timeout_s

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed if its client dawdles."""

    most: int
    seconds: float
    _clock: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            log.warning("a connection was closed: %d are open", self.most)
            transport.abort()
        else:
            self._wind(self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request head too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._wind(self.transport.close)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wind(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop()

    def _wind(self, end: Any) -> None:
        self._stop()
        self._clock = self.loop.call_later(self.seconds, end)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
