"""``Breaker``: after failures in a row, a remote is left alone, but for a try a second.

Questions and moves are counted apart: a remote may know what it has, and not be able to bring it. While it still has
too many moves that were given up, there is no try: each costs its request the whole wait, and the host its blocks.
"""

from __future__ import annotations

from enum import Enum

FAILURES = 3
PROBE_S = 1.0
MOST_HANGING = 4


class Tried(Enum):
    """What a call has tried."""

    LOOK = "look"
    MOVE = "move"


class Breaker:
    """Decides whether one remote is tried."""

    def __init__(self) -> None:
        self.hanging = 0
        """Moves that were given up and have not ended."""
        self._failures = dict.fromkeys(Tried, 0)
        self._next_try_s = dict.fromkeys(Tried, 0.0)

    @property
    def is_open(self) -> bool:
        """Whether the remote is left alone."""
        return self.hanging >= MOST_HANGING or max(self._failures.values()) >= FAILURES

    def _is_open_for(self, what: Tried) -> bool:
        """Questions need a remote that moves; moves go on if answers are late alone."""
        if what is Tried.MOVE:
            return self.hanging >= MOST_HANGING or self._failures[Tried.MOVE] >= FAILURES
        return self.is_open

    def next_try_s(self, now: float, what: Tried) -> float:
        """When a call may be made."""
        if not self._is_open_for(what):
            return now
        return float("inf") if self.hanging >= MOST_HANGING else max(now, self._next_try_s[what])

    def allows(self, now: float, what: Tried = Tried.LOOK) -> bool:
        """Whether a call may be made now; if the breaker is open, the call is the try of this second.

        A question has a try of its own: its answer may be that there is nothing to move.
        """
        if not self._is_open_for(what):
            return True
        if now < self._next_try_s[what] or self.hanging >= MOST_HANGING:
            return False
        self._next_try_s[what] = now + PROBE_S
        return True

    def on_end(self, what: Tried, is_well: bool, now: float) -> None:
        """A call has ended, or is given up. Bytes that have moved say that all is well, answers that it answers."""
        if is_well:
            self._failures[Tried.LOOK] = 0
            self._failures[what] = 0
            return
        self._failures[what] += 1
        if self._failures[what] == FAILURES:
            self._next_try_s = dict.fromkeys(Tried, now + PROBE_S)
