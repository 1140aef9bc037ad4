"""How long tokens take to compute, as an engine's own function says.

Promises   no step fails because of it: what it raises, and an answer that is no time, count as not known. The log is
           told of the first one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import number, shown

log = logging.getLogger("kvtier.remote")


class Estimate:
    """``seconds(start, end)``, asked with care. Raises ``ConfigError`` for what is no function."""

    def __init__(self, seconds: Callable[[int, int], float | None]) -> None:
        if not callable(seconds):
            raise ConfigError(f"estimate_compute takes a function of (start, end), got {shown(seconds)}")
        self._seconds = seconds
        self._has_failed = False

    def __call__(self, start: int, end: int) -> float | None:
        try:
            found = self._seconds(start, end)
        except Exception as problem:
            self._fail(start, end, f"raised {type(problem).__name__}: {shown(problem)}")
            return None
        took = _seconds(found)
        if took is not None and took >= 0:
            return took
        if found is not None:
            self._fail(start, end, f"gave {shown(found)}, which is no number of seconds")
        return None

    def _fail(self, start: int, end: int, what: str) -> None:
        if not self._has_failed:
            log.warning(
                "the function of estimate_compute %s for tokens %d to %d: that counts as not known, as all that follow",
                what,
                start,
                end,
            )
        self._has_failed = True


def _seconds(found: object) -> float | None:
    """None if it is no number, or an integer that no float holds."""
    try:
        took = number(found)
        return None if took is None else float(took)
    except Exception:  # its own conversions, too
        return None
