"""The last moment of a server's process: what is still at work then is left behind.

Promises   the process ends, with the status that is due, whatever its threads do: an interpreter that ends by itself
           waits for some of them for ever. A step of the engine, a log that nobody reads or a stuck reader hold up
           nothing.
Does not   end anything that ends by itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from kvtier.machine.wakeup import Wakeup

log = logging.getLogger("kvtier.server")

GRACE_S = 5.0
"""Beyond the time that requests have to end: for all the rest."""

_TELL_S = 1.0
"""Time for the log to take the last line."""
_FAR_S = 3600.0


class Deadline:
    """A moment that can come nearer. Make it before signals come; ``within`` is for their handlers too."""

    def __init__(
        self,
        status: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """``status``: of the process, asked at the end; ``end``: ends it."""
        self._status, self._clock, self._end = status, clock, end
        self._moments: list[float] = []
        self._news = Wakeup()
        threading.Thread(target=self._run, name="kvtier-deadline", daemon=True).start()

    def within(self, seconds: float) -> None:
        """The process ends in so many seconds at the latest, or earlier if that was said before."""
        self._moments.append(self._clock() + seconds)
        self._news.set()

    def _run(self) -> None:
        while True:
            self._news.clear()
            left = min(self._moments, default=self._clock() + _FAR_S) - self._clock()
            if left <= 0:
                break
            self._news.wait(left)
        telling = threading.Thread(target=self._tell, daemon=True)
        telling.start()
        telling.join(_TELL_S)
        self._end(self._status())

    def _tell(self) -> None:
        mine = threading.current_thread().name, "kvtier-deadline"
        names = sorted(thread.name for thread in threading.enumerate() if thread.name not in mine)
        log.warning("ending now, with these threads still there: %s", ", ".join(names))
