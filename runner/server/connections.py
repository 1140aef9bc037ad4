"""uvicorn's connections, with an end to what a client may leave unfinished.

Promises   a head that does not come, or does not end, and a stream without a reader cost bounded time and memory.
           If too many connections are open, one that asks nothing gives way to the newest, the oldest first; then one
           whose request is still coming. Requests that are served stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from enum import Enum
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runner.server.settings import Settings
from runner.server.sparing import Sparing

log = logging.getLogger("kvtier.server")

MOST_HEAD_BYTES = 64 * 1024


class Doing(Enum):
    """What a connection does."""

    IDLE = "nothing of a request has come"
    COMING = "a request is coming"
    SERVED = "a request is served"


class Connections:
    """The open connections of a server."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: dict[BoundedProtocol, Doing] = {}
        self._by_doing = {doing: OrderedDict[BoundedProtocol, None]() for doing in Doing}  # the longest so first
        self._news = Sparing(log)

    def enter(self, one: BoundedProtocol) -> bool:
        """Takes one more, and closes another if it must; False if all are served."""
        if len(self._open) >= self.most:
            self._news.warning("a connection was closed: %d are open (--max-connections)", self.most)
            waiting = self._by_doing[Doing.IDLE] or self._by_doing[Doing.COMING]
            if not waiting:
                return False
            oldest = next(iter(waiting))
            self.leave(oldest)
            oldest.transport.abort()
        self._open[one] = Doing.IDLE
        self._by_doing[Doing.IDLE][one] = None
        return True

    def note(self, one: BoundedProtocol, doing: Doing) -> None:
        """Notes what an open connection does from now on."""
        if self._open.get(one, doing) is not doing:
            self.leave(one)
            self._open[one] = doing
            self._by_doing[doing][one] = None

    def leave(self, one: BoundedProtocol) -> None:
        """Forgets a connection that is closed, or will be."""
        if one in self._open:
            del self._by_doing[self._open.pop(one)][one]


def protocol_class(settings: Settings) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes a connection of."""

    class Bounded(BoundedProtocol):
        open_ones = Connections(settings.max_connections)
        seconds = settings.read_timeout_s

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed if its client dawdles."""

    open_ones: Connections
    seconds: float
    _clock: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True
    _comes = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.open_ones.enter(self):
            self._wind(self.transport.close)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_ones.leave(self)
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
        self._in_head, self._head_bytes, self._comes = True, 0, True
        self._wind(self.transport.close)
        self._note()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._comes = False
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wind(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop()

    def _note(self) -> None:
        """The newest request is at ``self.cycle`` once its head is there; while an older one is served, it waits."""
        is_served = self.cycle is not None and not self.cycle.response_complete
        if self._comes and not (is_served and (self._in_head or self.pipeline)):
            doing = Doing.COMING
        else:
            doing = Doing.SERVED if is_served else Doing.IDLE
        self.open_ones.note(self, doing)

    def _wind(self, end: Any) -> None:
        self._stop()
        self._clock = self.loop.call_later(self.seconds, end)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
