"""Tokens on their way from the engine's thread to a waiting consumer.

Owns       the tokens of one request so far, and the letters that bring them.
Promises   the engine's thread never waits for a consumer, and does nothing token by token. It sends one letter a step
           to each event loop, or other thread, that waits; there it is opened. A late consumer finds all new tokens in
           one piece. Only its request's own tokens wait for it.
Does not   make text of tokens (``answers.py``).
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier import FinishedRequest, KVTierError
from runner.sampling.logprobs import Logprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended, as the engine tells it."""

    report: FinishedRequest
    ended_s: float
    error: KVTierError | None = None


class TokenStream:
    """One request's tokens. Letters bring them, one consumer reads. Dropping it gives the request up."""

    __slots__ = ("__weakref__", "end", "first_token_s", "logprobs", "mail", "prompt_logprobs", "tokens")

    def __init__(self, mail: Mail) -> None:
        self.mail = mail
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        """The requested logprobs, one entry a token; empty if none were requested."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.first_token_s: float | None = None
        self.end: End | None = None


StreamRef = weakref.ref[TokenStream]


@dataclass(slots=True)
class Letter:
    """What a step has for the streams of one post.

    Token ``token_ids[i]``, int64 [n], is the next one of ``streams[i]``, [n] weak references. ``logprobs``: of the
    tokens whose streams asked for them, by i. ``ends``: of requests that were reported. ``lost``: names and errors of
    requests that never will be.
    """

    sent_s: float
    streams: npt.NDArray[np.object_] = field(default_factory=lambda: np.empty(0, object))
    token_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    logprobs: Logprobs | None = None
    prompt_logprobs: list[tuple[StreamRef, TokenLogprobs]] = field(default_factory=list)
    ends: list[tuple[StreamRef, FinishedRequest, KVTierError | None]] = field(default_factory=list)
    lost: list[tuple[StreamRef, str, KVTierError]] = field(default_factory=list)

    def open(self) -> None:
        """Gives the streams what is theirs, and tells their mail; on the thread of their consumers."""
        for ref, told in self.prompt_logprobs:
            if (stream := ref()) is not None:
                stream.prompt_logprobs.append(told)
        for place, told in () if self.logprobs is None else self.logprobs.by_row():
            if (stream := self.streams[place]()) is not None:
                stream.logprobs.append(told)
        for ref, token in zip(self.streams.tolist(), self.token_ids.tolist(), strict=True):
            if (stream := ref()) is not None:
                if stream.first_token_s is None:
                    stream.first_token_s = self.sent_s
                stream.tokens.append(token)
                stream.mail.tell(stream)
        for ref, report, error in self.ends:
            self._end(ref(), report, error)
        for ref, name, error in self.lost:
            stream = ref()
            so_far = [] if stream is None else stream.tokens.copy()
            self._end(stream, FinishedRequest(name, so_far, "error", {"device": 0, "host": 0}, 0), error)

    def _end(self, stream: TokenStream | None, report: FinishedRequest, error: KVTierError | None) -> None:
        if stream is not None and stream.end is None:
            stream.end = End(report, self.sent_s, error)
            stream.mail.tell(stream)


_numbers = count()


class Post(ABC):
    """Where the letters for one event loop, or for another waiting thread, go."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        """No other post has it."""

    @abstractmethod
    def send(self, letter: Letter) -> None:
        """Has the letter opened; called on the engine's thread, once a step at most."""


class Mail(Protocol):
    """The news that one consumer waits for."""

    @property
    def post(self) -> Post:
        """Where letters for it go."""
        ...

    def tell(self, stream: TokenStream) -> None:
        """There is something new in a stream; called where letters are opened."""
        ...


class ThreadMail(Post):
    """Mail for a thread that waits for many streams: ``get`` gives one after another. Safe for signal handlers."""

    def __init__(self, at_once: bool = True) -> None:
        """``at_once``: whether new tokens end a wait, as ends of streams do. If not, ``get`` finds them when asked."""
        super().__init__()
        self._at_once = at_once
        self._letters: deque[Letter] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._unread: OrderedDict[TokenStream, None] = OrderedDict()

    @property
    def post(self) -> Post:
        """Its own: its thread opens the letters."""
        return self

    def send(self, letter: Letter) -> None:
        """Keeps the letter for ``get``."""
        self._letters.append(letter)
        if self._at_once or letter.ends or letter.lost:
            self._wakes.put(None)

    def tell(self, stream: TokenStream) -> None:
        """``get`` will give it."""
        self._unread[stream] = None

    def get(self, timeout_s: float) -> TokenStream | None:
        """The next stream with something new; waits for it, at most ``timeout_s`` seconds."""
        if not self._unread:
            with suppress(Empty):
                self._wakes.get(timeout=timeout_s)
                while True:
                    self._wakes.get_nowait()
            while self._letters:
                self._letters.popleft().open()
        return self._unread.popitem(last=False)[0] if self._unread else None


class LoopMail:
    """Mail for a coroutine that waits for the streams of one call."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._event = asyncio.Event()

    @property
    def post(self) -> Post:
        """The event loop's."""
        return self._courier

    def tell(self, stream: TokenStream) -> None:
        """Ends ``news``; called in the event loop."""
        self._event.set()

    async def news(self) -> None:
        """Until there is news that came after the last call."""
        await self._event.wait()
        self._event.clear()  # before it is read: what comes from here on is new


class Courier(Post):
    """Brings letters to all of an event loop's coroutines, each letter in one call into the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = weakref.ref(loop)

    def send(self, letter: Letter) -> None:
        """Has the letter opened in the loop."""
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and so are all its waits
                loop.call_soon_threadsafe(letter.open)
