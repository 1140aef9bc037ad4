"""Whether a server refuses most of what comes.

Promises   tells by the requests of the last seconds before it is asked. It looks at no clock.
"""

from __future__ import annotations

from collections import deque

WINDOW_MS = 10_000


class Pressure:
    """The pressure on one server."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int, int]] = deque()

    def is_too_high(self, now_ms: int, taken: int, refused: int) -> bool:
        """Notes how many requests were taken and refused so far. Whether more were refused than taken lately."""
        self._seen.append((now_ms, taken, refused))
        while self._seen[0][0] < now_ms - WINDOW_MS:
            self._seen.popleft()
        _, had_taken, had_refused = self._seen[0]
        return refused - had_refused > taken - had_taken
