"""One sampler for all pages that watch a server: it looks once a second, while somebody listens.

Promises   each snapshot is taken once, and written as JSON once for each owner that listens. A listener has one place,
           for the newest snapshot: one that reads slowly misses snapshots, and no memory grows. Listeners are bounded.
           All of it runs on the event loop, nothing on the engine's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

from pydantic_core import to_json

from runner.server.errors import ApiError
from runner.server.page.history import KEPT, History

log = logging.getLogger("kvtier.server")

EVERY_S = 1.0
MOST_LISTENERS = 64
QUIET_S = 15.0
"""A stream that has nothing to say for so long says so, before proxies give it up."""
_BEGIN = b"retry: 2000\n\n"
_QUIET = b": nothing new\n\n"


class Source(Protocol):
    """What is watched."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of a snapshot's ``numbers``."""

    def facts(self) -> Mapping[str, Any]:
        """What does not change."""

    def take(self, now_ms: int) -> Mapping[str, Any]:
        """A snapshot, as far as all may see it."""

    def rest(self, owner: str | None) -> Mapping[str, Any]:
        """The rest of it, for one owner of requests; None: for who may see all."""


class Listener:
    """One open stream, for the owner of some requests."""

    def __init__(self, leave: Callable[[Listener], None], owner: str | None = "") -> None:
        self._leave = leave
        self.owner = owner
        self._newest: bytes | None = None
        self._has_news = asyncio.Event()
        self._ended = False

    def put(self, snapshot: bytes) -> None:
        """The newest snapshot, in place of one that was not read yet."""
        self._newest = snapshot
        self._has_news.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self._has_news.set()

    async def next(self) -> bytes | None:
        """The newest snapshot that was not read yet, or a comment after a while without one; then None at the end."""
        try:
            async with asyncio.timeout(QUIET_S):
                await self._has_news.wait()
        except TimeoutError:
            return _QUIET
        snapshot, self._newest = self._newest, None
        if not self._ended:
            self._has_news.clear()
        return snapshot

    def close(self) -> None:
        """Ends the listener, whose reader has gone; twice does nothing."""
        self._leave(self)


class Sampler:
    """The snapshots of one server, for all who listen."""

    def __init__(
        self, source: Source, every_s: float = EVERY_S, kept: int = KEPT, most_listeners: int = MOST_LISTENERS
    ) -> None:
        self._source = source
        self.every_s = every_s
        self.most_listeners = most_listeners
        self.history = History(len(source.columns), kept)
        self.listeners: set[Listener] = set()
        self._task: asyncio.Task[None] | None = None
        self._due_s = 0.0
        self._began_ms = time.time() * 1000 - time.monotonic() * 1000
        self._newest: dict[str | None, bytes] = {}  # by owner
        self._past: bytes | None = None
        self._closed = False

    def listen(self, owner: str | None = "") -> Listener:
        """One more listener; ``close`` it. Raises ``ApiError`` 503 if there are too many, or the server ends."""
        if self._closed:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after_s=5)
        if len(self.listeners) >= self.most_listeners:
            told = f"{self.most_listeners:,} pages watch already, which is the most; close one of them"
            raise ApiError(503, told, code="too_many_listeners", retry_after_s=10)
        listener = Listener(self._leave, owner)
        self.listeners.add(listener)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return listener

    async def events(self, listener: Listener) -> AsyncGenerator[bytes, None]:
        """The past, then snapshots as they come."""
        yield _BEGIN + self._history()
        if listener.owner in self._newest:
            listener.put(self._newest[listener.owner])
        while (event := await listener.next()) is not None:
            yield event

    def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        for listener in self.listeners:
            listener.end()

    def _leave(self, listener: Listener) -> None:
        self.listeners.discard(listener)
        if not self.listeners and self._task is not None:
            self._task.cancel()
            self._task = None
            self._newest = {}  # whoever comes next shall not take it for news

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._due_s - time.monotonic())
            now = time.monotonic()
            self._due_s = (self._due_s if now - self._due_s < self.every_s else now) + self.every_s
            try:
                self.sample()
            except Exception:
                log.exception("no snapshot for the page")
                self._due_s = time.monotonic() + 10 * self.every_s

    def sample(self) -> None:
        """Takes a snapshot, and gives it to all who listen."""
        snapshot = self._source.take(int(self._began_ms + time.monotonic() * 1000))
        self.history.add(snapshot["numbers"])
        self._past = None
        owners = {listener.owner for listener in self.listeners}
        self._newest = {one: _event("snapshot", {**snapshot, **self._source.rest(one)}) for one in owners}
        for listener in self.listeners:
            listener.put(self._newest[listener.owner])

    def _history(self) -> bytes:
        """The history as bytes, the same for all who come between two snapshots."""
        if self._past is None:
            past: dict[str, Any] = {"columns": self._source.columns, "values": self.history.columns()}
            past |= {"every_s": self.every_s, "kept": self.history.kept, "server": self._source.facts()}
            self._past = _event("history", past)
        return self._past


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(data))
