"""Tokens and blocks for running requests, and the answer if blocks are short.

Owns       the answer to a shortage of running requests.
Promises   the first in service order always advances. A preemption happens only if it frees the lacking blocks. If a
           copy holds the blocks, the request sits one step out. Keeps I5, I7, I8, I10.
Does not   admit (``Admission``), or end requests: ``preempt`` and ``finish`` belong to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.plan import plan_running
from kvtier.coordinator.request import FinishReason
from kvtier.coordinator.running import Running
from kvtier.coordinator.tracked import State, Tracked
from kvtier.gpu_pool.row_state import Geo
from kvtier.machine.journal import SentBack

Counts = npt.NDArray[np.int64]


class Extension:
    """Extends the requests that ``running`` holds."""

    def __init__(
        self,
        coordinator: Coordinator,
        running: Running,
        preempt: Callable[[Tracked, SentBack], None],
        finish: Callable[[Tracked, FinishReason], None],
    ) -> None:
        self._coordinator = coordinator
        self._room = coordinator.room
        self._pools = coordinator.pools
        self._transfers = coordinator.connector.ledger
        self._running = running
        self._roster, self._entries = running.roster, running.entries
        self._preempt = preempt
        self._finish = finish
        self._used, self._need, self._later, self._total = np.zeros((4, len(coordinator.spec.groups)), np.int64)
        self._no_moves = np.empty((2, 0), np.int32)

    def plan(self) -> None:
        """Adds running requests to the step's entries. Answers shortages until every request that can go on does so."""
        entries = self._entries
        tried: Counts | None = None
        while self._roster.running:
            rows, ends = entries.rest()
            n, planned, short, taken = plan_running(
                *self._pools.arrays,
                *self._coordinator.tables.arrays,
                self._roster.rows(),
                entries.placed,
                entries.budget,
                entries.chunk_tokens,
                self._room.spares_cached,
                self._room.states,
                self._no_moves,
                rows,
                ends,
                self._used,
                self._need,
                self._later,
                self._total,
            )
            if short >= 0:
                self._answer_shortage(short)
                continue
            if n and not taken and not self._running.extend(rows[:n], ends[:n], self._need):
                tried = self._let_sit_out(rows[:n], ends[:n], tried)
                continue
            entries.take(n, planned)
            return

    def _let_sit_out(self, rows: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], tried: Counts | None) -> Counts:
        """The planned blocks could not be allocated. If nothing has changed since the last try, a copy pins them: then
        the last row that lacks blocks sits this step out. Returns the counts of the pools."""
        seen: Counts = self._pools.arrays.meta.copy()
        if tried is not None and np.array_equal(seen, tried):
            t = self._coordinator.tables.arrays
            held = t.hi[:, rows] * t.geometry[:, Geo.BLOCK_TOKENS, None]
            self._entries.placed[rows[np.flatnonzero((held < ends).any(0))[-1]]] = 1
        return seen

    def _answer_shortage(self, position: int) -> None:
        """The running request at ``position`` lacks blocks for a single token. Finds blocks, or lets it sit out.

        If neither is possible, the request ends.
        """
        running, room = self._roster.running, self._room
        seq = running[position]
        if not room.can_go_on(seq.row):
            self._finish(seq, "capacity")
            return
        rows = [s.row for s in running if s.state is State.RUNNING]
        used = self._pools.live + self._need
        if room.trim_to_fit(rows, used):
            return
        younger = self._roster.younger(seq)
        able = [s for s in younger if self._coordinator.has_run(s)]
        victims = room.choose_victims(able, self._need)
        cause = room.lack("running", self._need, self._pools.live)._replace(by=seq.request.request_id)
        for victim in victims:
            self._preempt(victim, cause)
        if victims or room.trim_where_lacking(rows, used):
            return
        others_may_help = position > 0 or len(able) < len(younger) or self._transfers.num_progressing > 0
        if others_may_help:
            self._entries.placed[seq.row] = 1
        else:
            self._finish(seq, "capacity")
