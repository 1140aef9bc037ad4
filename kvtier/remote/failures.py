"""What the log is told of objects that went wrong.

Promises   a remote that fails again and again writes one line a second and way. The line tells how many objects it
           stands for, and names the first of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtier.remote.backends.contract import Answer
from kvtier.remote.moves import Way
from kvtier.remote.objects import Name

log = logging.getLogger("kvtier.remote")

QUIET_S = 1.0
"""Between two lines of a way."""


class RemoteFailures:
    """The log's lines of one remote."""

    def __init__(self) -> None:
        self._silent_until = dict.fromkeys(Way, float("-inf"))
        self._unsaid = dict.fromkeys(Way, 0)

    def note(self, way: Way, names: Sequence[Name], answer: Answer, now: float) -> None:
        """A call has ended; what went wrong with its objects stands in its reasons."""
        if not answer.reasons:
            return
        if now < self._silent_until[way]:
            self._unsaid[way] += len(answer.reasons)
            return
        more, self._unsaid[way] = len(answer.reasons) - 1 + self._unsaid[way], 0
        self._silent_until[way] = now + QUIET_S
        k, reason = next(iter(answer.reasons.items()))
        kind, key = names[k]
        also = f" ({more} more objects since the last line)" if more else ""
        log.warning("the %s of %s/%s went wrong: %s%s", way.value, kind, key.hex(), reason, also)
