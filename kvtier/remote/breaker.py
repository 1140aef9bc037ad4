"""``Breaker``: after failures in a row, a store is left alone, but for a try a second."""

from __future__ import annotations

FAILURES = 3
PROBE_S = 1.0


class Breaker:
    """Of one store."""

    def __init__(self) -> None:
        self._failures = 0
        self._next_probe_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the store is left alone."""
        return self._failures >= FAILURES

    def allows(self, now: float) -> bool:
        """Whether a call may be made now; if the breaker is open, the call is the try of this second."""
        if not self.is_open:
            return True
        if now < self._next_probe_s:
            return False
        self._next_probe_s = now + PROBE_S
        return True

    def on_end(self, is_well: bool, now: float) -> None:
        """A call has ended, or is overdue."""
        if is_well:
            self._failures = 0
            return
        self._failures += 1
        if self._failures == FAILURES:
            self._next_probe_s = now + PROBE_S
