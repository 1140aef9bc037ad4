"""What is told of copies that have gone wrong: to the log, and to a journal.

Promises   a link that fails again and again writes one line a second and direction. The line tells how many it stands
           for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.machine.journal import Copied, Journal

log = logging.getLogger("kvtier.transfers")

QUIET_S = 1.0
"""Between two lines of a direction."""


class CopyNews:
    """Tells of the failures of one connector with groups of these ``names``."""

    def __init__(self, journal: Journal, names: Sequence[str]) -> None:
        self._journal = journal
        self._names = names
        self._silent_until = dict.fromkeys(Direction, -np.inf)
        self._unsaid = dict.fromkeys(Direction, 0)
        self.logs = True
        """Whether lines are written: failures that are made on purpose are nobody's news."""

    def landed(self, t: Transfer, now: float) -> None:
        """A copy has ended well at ``now``, on the copy engine's clock."""
        if self._journal.is_on and t.direction is Direction.LOAD:
            self._note(t, now, "", 0)

    def failed(self, t: Transfer, now: float, error: str, bad: npt.NDArray[np.bool_]) -> None:
        """A copy went wrong, or is overdue. ``bad``: bool [n], the blocks that did not arrive whole."""
        count = int(np.count_nonzero(bad))
        if self._journal.is_on:
            self._note(t, now, error, count)
        if not self.logs:
            return
        if now < self._silent_until[t.direction]:
            self._unsaid[t.direction] += 1
            return
        more, self._unsaid[t.direction] = self._unsaid[t.direction], 0
        self._silent_until[t.direction] = now + QUIET_S
        also = f" ({more} more since the last line)" if more else ""
        log.warning("a %s lost %d of %d blocks: %s%s", t.direction.value, count, len(bad), error, also)

    def _note(self, t: Transfer, now: float, error: str, bad: int) -> None:
        counted = np.bincount(t.groups, minlength=len(self._names))
        blocks = {name: int(n) for name, n in zip(self._names, counted, strict=True) if n}
        took = now - t.submitted_s
        self._journal.add("", Copied(t.ticket, t.direction.value, blocks, t.num_bytes, took, error, bad))
