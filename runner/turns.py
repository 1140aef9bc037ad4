"""A request's turns on the event loop, which all requests share.

Promises   a request whose answers take long to write (many at once, many logprobs) rests after each turn, and others
           have the loop meanwhile. It gets more at once afterwards, and has all its tokens in the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHORT_S = 0.001
"""A turn of this CPU time needs no rest. One answer takes some 0.05 ms a token."""

RESTS = 4
"""A longer one rests so many times as long: sending what it has made takes about as long again."""

LONGEST_S = 0.25


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
