"""Turns of the interpreter, which all requests and the engine share.

Promises   a request whose answers take long to write (many at once, many logprobs) rests after each turn, and others
           have the loop meanwhile. It gets more at once afterwards, and has all its tokens in the end. Likewise work on
           the side: a call rests before the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SHORT_S = 0.001
"""A turn of this CPU time needs no rest. One answer takes some 0.05 ms a token."""

RESTS = 4
"""A longer one rests so many times as long: sending what it has made takes about as long again."""

LONGEST_S = 0.25
PAUSE_S = 0.01
"""Least pause between two calls on the side: a hundred of them a second are enough for all who look in."""


class Turn:
    """One request's turns, one after another: ``with turn: ...``."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """``clock``: CPU seconds of this thread."""
        self._clock = clock
        self._begun_s = 0.0
        self.rest_s = 0.0
        """Seconds until the next one may begin."""

    def __enter__(self) -> None:
        self._begun_s = self._clock()

    def __exit__(self, *exc: object) -> None:
        took_s = self._clock() - self._begun_s
        self.rest_s = 0.0 if took_s <= SHORT_S else min(RESTS * took_s, LONGEST_S)


class OnTheSide:
    """Calls that take the interpreter for some milliseconds each: on another thread, one at a time, with rests."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._turn = Turn()
        self._free_s = 0.0

    async def run(self, function: Callable[[], T]) -> T:
        """Calls ``function`` in its turn: returns what it returns, and raises what it raises."""

        def in_turn() -> T:
            with self._turn:
                return function()

        async with self._lock:
            await asyncio.sleep(max(0.0, self._free_s - time.monotonic()))
            try:
                return await asyncio.to_thread(in_turn)
            finally:
                self._free_s = time.monotonic() + max(self._turn.rest_s, PAUSE_S)
