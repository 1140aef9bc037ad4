"""Log lines that clients can cause by the thousand.

Promises   one line in ``every_s`` seconds; it tells how many it stands for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 10.0


class Sparing:
    """One kind of warning."""

    def __init__(
        self, log: logging.Logger, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._silent_until = float("-inf")
        self._unsaid = 0

    def warning(self, text: str, *args: object) -> None:
        """Writes ``text % args``, or counts it for the next line."""
        now = self._clock()
        if now < self._silent_until:
            self._unsaid += 1
            return
        also = f" ({self._unsaid:,} more since the last line)" if self._unsaid else ""
        self._silent_until, self._unsaid = now + self._every_s, 0
        self._log.warning(f"{text}%s", *args, also)
