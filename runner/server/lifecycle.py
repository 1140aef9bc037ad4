"""The life of a server process: bind, serve, drain, end.

Promises   on SIGTERM or SIGINT, ``/ready`` says 503 at once and new requests are sent away. Running requests have
           ``drain_timeout_s`` to end, and are aborted then. A second signal ends all at once. If the engine dies, those
           who wait are told, and the server ends. The process is gone ``GRACE_S`` later, whatever it does
           (``deadline.py``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from runner.server import logs
from runner.server.connections import protocol_class
from runner.server.deadline import GRACE_S, Deadline
from runner.server.page.sampler import Sampler
from runner.server.served import Served
from runner.server.throughput import Throughput

log = logging.getLogger("kvtier.server")

_LEAST_BACKLOG = 128
"""Connections that the kernel keeps until they are accepted. Clients that find no room try again after seconds."""
_TELL_S = 3.0
"""Time for aborted requests to tell their clients so."""
_CLOSE_S = 1
"""Connections have so long to close. The rest of ``GRACE_S`` is for the engine."""


class Server(uvicorn.Server):
    """uvicorn, ended in kvtier's way."""

    def __init__(
        self,
        app: FastAPI,
        on_start: Callable[[], None] = lambda: None,
        deadline: Deadline | None = None,
        **options: Any,
    ) -> None:
        """``on_start``: called once connections are taken; ``deadline``: of the whole process, if it is the server's;
        ``options``: of ``uvicorn.Config``."""
        self.served: Served = app.state.served
        settings = self.served.settings
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_class(settings),
                ws="none",
                lifespan="off",
                log_config=logs.options(),
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_S,
                backlog=max(settings.max_connections, _LEAST_BACKLOG),
                **options,
            )
        )
        self._on_start = on_start
        self._deadline = deadline
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None
        self._throughput = Throughput(self.served.llm.cache.stats, time.monotonic()) if settings.log_stats else None
        self.stops = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts uvicorn; signals act from here on."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_start()
        if self.stops:
            self._end()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; True ends the server."""
        llm, settings = self.served.llm, self.served.settings
        if llm.death is not None and settings.exit_on_engine_death and self._ending is None:
            self._ending = asyncio.ensure_future(self._follow_engine())
        line = self._throughput.line(time.monotonic()) if self._throughput is not None and llm.is_running else None
        if line is not None:
            log.info("%s", line)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops uvicorn; pages that watch are let go first, since they never leave by themselves."""
        if self._sampler is not None:
            self._sampler.close()
        await super().shutdown(sockets)

    @property
    def _sampler(self) -> Sampler | None:
        found: Sampler | None = getattr(self.config.app.state, "sampler", None)  # type: ignore[union-attr]
        return found

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self.stop()

    def stop(self) -> None:
        """Drains; called again, ends at once. From any thread, and from handlers of signals."""
        self.stops += 1
        if self._deadline is not None:
            self._deadline.within(GRACE_S + (self.served.settings.drain_timeout_s if self.stops == 1 else 0))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end, context=Context())  # no request's, whatever it came in

    def _end(self) -> None:
        if self.stops > 1 or self._ending is not None:
            log.warning("stopping at once")
            self._ending = asyncio.ensure_future(self._cut_off())
        else:
            self._ending = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        served, seconds = self.served, self.served.settings.drain_timeout_s
        log.info("draining: %d requests have %g s to end", len(served.admission.tickets), seconds)
        if not await served.admission.drain(seconds, served.llm.abort):
            log.warning("%d requests were aborted", len(served.admission.tickets))
            await served.admission.empty(_TELL_S)
        self.should_exit = True

    async def _follow_engine(self) -> None:
        """The engine has died: pages that watch are told, and requests have their error; then the server ends."""
        log.error("the server ends, since its engine has died")
        if self._deadline is not None:
            self._deadline.within(GRACE_S)
        try:
            if self._sampler is not None:
                self._sampler.sample()
            await self.served.admission.empty(_TELL_S)
        finally:
            self.should_exit = True

    async def _cut_off(self) -> None:
        self.served.admission.drains_by_s = self.served.admission.drains_by_s or 0.0
        await self.served.admission.cut_off(self.served.llm.abort)
        self.should_exit = self.force_exit = True
