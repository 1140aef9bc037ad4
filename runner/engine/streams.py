"""Tokens on their way from the engine's thread to a waiting consumer.

Owns       the tokens of one request so far, and the mail that says that there are more.
Promises   the engine's thread never waits for a consumer. A late consumer finds all new tokens in one piece. Only its
           request's own tokens wait for it.
Does not   make text of tokens (``answers.py``).
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from kvtier import FinishedRequest, KVTierError
from runner.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended, as the engine tells it."""

    report: FinishedRequest
    ended_s: float
    error: KVTierError | None = None


class TokenStream:
    """One request's tokens. The engine's thread appends, one consumer reads. Dropping it gives the request up."""

    __slots__ = ("__weakref__", "end", "first_token_s", "logprobs", "mail", "prompt_logprobs", "tokens")

    def __init__(self, mail: Mail) -> None:
        self.mail = mail
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        """The requested logprobs, one entry a token; empty if none were requested."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.first_token_s: float | None = None
        self.end: End | None = None


class Mail(Protocol):
    """The news that one consumer waits for."""

    courier: Courier | None
    """Told at the end of a step; None if ``put`` itself has woken the consumer."""

    def put(self, stream: TokenStream) -> None:
        """There is something new in a stream; called on the engine's thread."""


class ThreadMail:
    """Mail for a thread that waits for many streams: ``get`` gives one after another. Safe for signal handlers."""

    courier: Courier | None = None

    def __init__(self) -> None:
        self._queue: SimpleQueue[TokenStream] = SimpleQueue()
        self._unread: set[TokenStream] = set()

    def put(self, stream: TokenStream) -> None:
        if stream not in self._unread:
            self._unread.add(stream)
            self._queue.put(stream)

    def get(self, timeout_s: float) -> TokenStream | None:
        """The next stream with something new; waits for it, at most ``timeout_s`` seconds."""
        try:
            stream = self._queue.get(timeout=timeout_s)
        except Empty:
            return None
        self._unread.discard(stream)  # before it is read: what comes from here on is new
        return stream


class LoopMail:
    """Mail for a coroutine that waits for the streams of one call."""

    def __init__(self, courier: Courier) -> None:
        self.courier: Courier | None = courier
        self._letters = courier.letters
        self._is_unread = False
        self._event = asyncio.Event()

    def put(self, stream: TokenStream) -> None:
        if not self._is_unread:
            self._is_unread = True
            self._letters.append(self._event)

    async def news(self) -> None:
        """Until there is news that came after the last call."""
        await self._event.wait()
        self._event.clear()
        self._is_unread = False  # before it is read: what comes from here on is new


class Courier:
    """Wakes all of an event loop's coroutines with news from a step, in one call into the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self.letters: deque[asyncio.Event] = deque()

    def send(self) -> None:
        """Called on the engine's thread, at the end of a step."""
        loop = self._loop()
        if self.letters and loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and so are all its waits
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self.letters:
            self.letters.popleft().set()
