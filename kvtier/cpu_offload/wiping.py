"""``Wiper``: a load that has failed leaves nothing on the device.

Owns       failed loads whose device blocks the device could not wipe so far.
Promises   a failed load ends only once its bad device blocks are zeros to all who use them from then on. An attention
           that multiplies what it masks then reads no NaN there. What cannot be wiped now is tried again with each
           poll. Until then its load has not ended, and its blocks are nobody's. Keeps I20.
Does not   know pools or requests, or decide which copies have failed: the engine does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.transfer import Direction, Transfer

logger = logging.getLogger("kvtier.transfers")


class Wiper:
    """Stands between ``engine`` and whoever takes note of the ends of its copies."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._left: list[Outcome] = []
        self._told = set[int]()

    def submit(self, t: Transfer) -> Outcome | None:
        """``engine.submit``. If the copy has failed with that, its end, unless a later ``poll`` reports it."""
        try:
            self._engine.submit(t)
        except Exception as problem:  # an engine that cannot even begin is a copy that failed
            outcome = Outcome(t.ticket, f"{type(problem).__name__}: {problem}")
            return outcome if self._has_ended(t, outcome) else None
        return None

    def poll(self, find: Callable[[int], Transfer | None]) -> list[Outcome]:
        """``engine.poll``, and failed loads of earlier polls. ``find(ticket)``: the copy under way."""
        ended = self._engine.poll()  # which may raise
        left, self._left = self._left, []
        outcomes = (*left, *ended)
        return [outcome for outcome in outcomes if self._has_ended(find(outcome.ticket), outcome)]

    def _has_ended(self, t: Transfer | None, outcome: Outcome) -> bool:
        """Whether nothing is left of the copy; if not, the next ``poll`` tries again."""
        if t is None or t.direction is Direction.STORE or not outcome.error:
            return True
        bad = slice(None) if outcome.bad is None else outcome.bad
        try:
            self._engine.wipe(t.groups[bad], t.device[bad])
        except Exception as problem:  # a device that does not even take zeros: its blocks are not for use
            if outcome.ticket not in self._told:
                self._told.add(outcome.ticket)
                logger.warning("what load %d has left cannot be wiped, and is tried again: %r", outcome.ticket, problem)
            self._left.append(outcome)
            return False
        self._told.discard(outcome.ticket)
        return True
