"""Which waiting requests begin to run, and with how much of their prompt.

Owns       the rules of admission.
Promises   a request is admitted in all groups or not at all. It is admitted only if all its known tokens fit beside the
           blocks promised to admitted requests. The content that its match found is still there when its blocks are
           taken. No later request passes a request that finds too few blocks. Keeps I4, I6, I9, I12.
Does not   plan the running requests (scheduler).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.counts import ROWS
from kvtier.coordinator.entries import Entries
from kvtier.coordinator.match import Match
from kvtier.coordinator.plan import plan_rows
from kvtier.coordinator.request import FinishReason, Shortage
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.tracked import ForTransfer, ForTwin, State, Tracked, Wait
from kvtier.gpu_pool.row_state import Phase
from kvtier.machine.journal import SentBack, Waits
from kvtier.remote.moves import SeekState

Counts = npt.NDArray[np.int64]

_LOADING, _FRESH, _PREFILL, _DECODE = int(Phase.LOADING), int(Phase.FRESH), int(Phase.PREFILL), int(Phase.DECODE)

MOST_LOOKS = 512
"""A request that waits for a margin is looked at so often in vain at most."""

_NOTHING: Mapping[str, tuple[int, int]] = MappingProxyType({})


class Admission:
    """Admits from a roster; ``preempt`` and ``finish`` are the scheduler's."""

    def __init__(
        self,
        coordinator: Coordinator,
        roster: Roster,
        preempt: Callable[[Tracked, SentBack], None],
        finish: Callable[[Tracked, FinishReason], None],
    ) -> None:
        self._coordinator = coordinator
        self._room = coordinator.room
        self._pools = coordinator.pools
        self._connector, self._transfers = coordinator.connector, coordinator.connector.ledger
        self._journal = coordinator.journal
        self._door = coordinator.door
        self._roster = roster
        self._preempt = preempt
        self._finish = finish
        self._refused: Tracked | None = None  # the request that lacked blocks in this step

    def admit_urgent(self, entries: Entries) -> None:
        """Before running requests are planned: admits requests ahead of running ones, which give way if they must."""
        self._refused = None
        running, waiting = self._roster.running, self._roster.waiting
        if running and waiting[0].order < running[-1].order:
            self._admit([seq for seq in waiting if seq.order < running[-1].order], entries)

    def admit_waiting(self, entries: Entries) -> None:
        """After the running requests are planned: admits with the blocks and tokens that are left."""
        self._admit(list(self._roster.waiting), entries)

    def _admit(self, candidates: list[Tracked], entries: Entries) -> None:
        """Other requests may pass a request that waits for a transfer or a twin, but not a request that finds too few
        blocks."""
        for seq in candidates:
            if seq.row >= 0 or self._waits(seq):
                continue
            if self._door.remote is not None and self._door.is_waiting(seq):
                self._wait(seq, Wait.TRANSFER, _of_remote(seq))
                continue
            if self._left(seq, entries) <= 0:
                if seq is not self._refused:
                    self._wait(seq, Wait.TOKENS, "the step has no tokens left for it")
                return
            if not (self._roster.has_free_row or self._givers(seq, entries)):
                if seq is not self._refused:
                    self._wait(seq, Wait.ROWS, "as many requests run as may")
                return
            found = self._find_room(seq, entries)
            if seq.state is State.FINISHED:
                continue  # it ended with "capacity"; later requests must not wait for another step
            if isinstance(found, Shortage):
                if seq is not self._refused:
                    self._coordinator.counts.lack("admission", found.groups)
                self._refused = seq
                self._wait(seq, Wait.BLOCKS, str(found), lacking=found.groups)
                return
            match, victims, cause = found
            if match.pending:
                seq.waits_for = ForTransfer(self._transfers.num_settled)
                self._wait(seq, Wait.TRANSFER, "a transfer is bringing its prefix")
                continue
            match = self._make_way(seq, match, victims, cause)
            row = self._roster.next_row()
            if not self._coordinator.admit(seq, match, row):
                self._wait(seq, Wait.STORES, "blocks that it needs are still being stored")
                return
            promised = self._room.promised(self._roster.rows())
            budget = max(1, self._left(seq, entries))
            self._roster.enter(seq)
            entries.placed[row] = 0  # the row's previous request has left it
            if seq.state is State.RUNNING:
                self._first_chunk(seq, entries, promised, budget)
                self._coordinator.evictions.note(seq.request.request_id)

    def _wait(
        self,
        seq: Tracked,
        wait: Wait,
        reason: str,
        lacking: Mapping[str, tuple[int, int]] = _NOTHING,
        behind: str = "",
    ) -> None:
        """The request was looked at and does not get in."""
        if seq.wait is not wait or (wait is Wait.TRANSFER and reason != seq.wait_reason):
            seq.wait = wait
            self._coordinator.counts.waits[wait.value] += 1
            self._journal.tell(seq.request.request_id, Waits, wait.value, reason, lacking, behind)
        seq.wait_reason = reason

    def _waits(self, seq: Tracked) -> bool:
        """Whether the request should wait for content that is on its way. It holds nothing meanwhile."""
        match seq.waits_for:
            case ForTransfer(settled=settled) if settled == self._transfers.num_settled and self._transfers.num_live:
                return True
            case ForTwin(is_coming=True):
                return True
        seq.waits_for = None
        if not self._roster.running:
            return False
        phases = self._phases()
        for k in np.flatnonzero((phases == _FRESH) | (phases == _PREFILL)):
            other = self._roster.running[k]
            if other.order > seq.order:
                break  # other requests may keep it from running, so it is not worth a wait
            common = self._coordinator.common_prefix(seq, other)
            if common:
                other.course.branches.add(common)  # it keeps an anchor there: the wait ends in a hit in every group
                self._coordinator.keep_state(other, common, self._roster.rows())
                seq.waits_for = ForTwin(other, common)
                name = other.request.request_id
                self._wait(seq, Wait.TWIN, f"request {name!r} is computing its prefix", behind=name)
                return True
        return False

    def _unplaced(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """bool [running], in service order: which requests have no place in this step yet."""
        rows = self._roster.rows()
        unplaced: npt.NDArray[np.bool_] = (self._phases() != _LOADING) & (entries.placed[rows] == 0)
        return unplaced

    def _phases(self) -> npt.NDArray[np.int64]:
        """The phases of the running requests, in service order."""
        phases: npt.NDArray[np.int64] = self._coordinator.tables.arrays.phase[self._roster.rows()]
        return phases

    def _left(self, seq: Tracked, entries: Entries) -> int:
        """Tokens of this step that are left for ``seq``; none if the number is not positive.

        Running requests without a place in the step come first. Every known token of the requests ahead of ``seq`` is
        reserved, and one token for each decode and each FRESH row. If there are fewer tokens than rows, rows ahead and
        FRESH rows come first.
        """
        if not self._roster.running or not (unplaced := self._unplaced(entries)).any():
            return entries.budget
        t, rows, phases = self._coordinator.tables.arrays, self._roster.rows(), self._phases()
        before = np.arange(len(rows)) < self._roster.num_before(seq)
        first = unplaced & (before | (phases == _FRESH))
        owed = first | (unplaced & (phases == _DECODE))
        if entries.chunk_tokens == 0 and entries.budget <= np.count_nonzero(owed):
            return min(1, entries.budget - int(np.count_nonzero(first)))
        known = t.total[rows] - t.computed[rows]
        return entries.budget - int(np.where(before, known, 1)[owed].sum())

    def _givers(self, seq: Tracked, entries: Entries) -> list[Tracked]:
        """Running requests that can give way to ``seq``: later in service order, the last first.

        Each has computed a token since its admission, and has no place in this step.
        """
        return [s for s in self._roster.younger(seq) if self._coordinator.has_run(s) and not entries.placed[s.row]]

    def _find_room(self, seq: Tracked, entries: Entries) -> tuple[Match, list[Tracked], SentBack] | Shortage:
        """Returns (hit, victims, reason), or a Shortage. If the victims are preempted, a row and the whole known text
        fit.

        They fit beside the blocks promised to others and the next blocks of requests ahead. A ``pending`` hit must be
        waited for.
        """
        match = self._coordinator.match(seq)
        if match.pending:
            return match, [], ROWS
        room, rows, before = self._room, self._roster.rows(), self._roster.num_before(seq)
        _, need = room.admission_need(seq, match)
        ahead = rows[:before][self._unplaced(entries)[:before]]
        if len(ahead):
            need += room.next_blocks(ahead)
        used = self._pools.live + room.promised(rows)
        if self._pools.fits(used + need):
            more = self._margin(seq, match, need, used) if self._roster.running else None
            if more is not None:
                return room.shortage(need + more, used)
            return match, [] if self._roster.has_free_row else self._givers(seq, entries)[:1], ROWS
        victims = room.choose_victims(self._givers(seq, entries), need, match)
        if victims:
            decodes = rows[self._phases() == _DECODE]  # blocks of other rows are promised to them
            if room.trim_to_fit(decodes, used + need):
                return self._find_room(seq, entries)  # no request needs to leave now
            return match, victims, room.lack("admission", need, used)
        if not self._roster.running and not self._transfers.num_progressing:
            self._finish(seq, "capacity")  # blocks are quarantined, and the rest will never suffice
        return room.shortage(need, used)

    def _margin(self, seq: Tracked, match: Match, need: Counts, used: Counts) -> Counts | None:
        """Blocks that the request waits for besides those that it needs, while others run: most of its content is gone,
        and content of others would go for it. None if so many are free, or if it need not wait."""
        pools, more = self._pools, self._room.margin(need)
        if pools.fits(used + need + more) or seq.course.has_begun or self._roster.younger(seq):
            return None
        if seq.looks >= MOST_LOOKS or all(pools.num_spare(g) >= n for g, n in enumerate(need)):
            return None
        keeping = self._coordinator.retention.keeping
        if not keeping.has_lost(seq.course, seq.keys, len(seq.tokens), match.num_tokens):
            return None
        seq.looks += 1
        return more

    def _make_way(self, seq: Tracked, match: Match, victims: list[Tracked], cause: SentBack) -> Match:
        """Preempts the victims without giving up blocks of the hit. Returns the hit, with a ``hold`` on it.

        The hit is looked up again. The victims' content may make it longer, or save a load from the host.
        """
        self._coordinator.hold(match)
        if not victims:
            return match
        try:
            for victim in victims:
                self._preempt(victim, cause._replace(by=seq.request.request_id))
            found = self._coordinator.match(seq)
            if found.pending:  # a transfer still writes content that would make it longer
                found = self._coordinator.match(seq, match.num_tokens)
            self._coordinator.hold(found)
        finally:
            self._coordinator.let_go(match)
        return found

    def _first_chunk(self, seq: Tracked, entries: Entries, promised: Counts, budget: int) -> None:
        """Computes as much of a just admitted request's prompt as ``budget`` and free blocks allow, at least one token.

        All decodes keep the blocks for one token each.
        """
        coordinator, (rows, ends) = self._coordinator, entries.rest()
        p, t, order = self._pools.arrays, coordinator.tables.arrays, np.array([seq.row], np.int32)
        unplaced = self._roster.rows()[self._unplaced(entries)]
        used = self._pools.live + promised + self._room.next_blocks(unplaced)
        need, later, total = np.empty((3, len(used)), np.int64)
        plan_rows(p, t, used, order, entries.placed, budget, entries.chunk_tokens, rows, ends, need, later, total)
        if not self._room.make_clean(need):
            ends[0] = t.computed[seq.row] + 1  # the block for this was taken by the admission
        coordinator.tables.extend(seq.row, int(ends[0]))
        entries.placed[seq.row] = 1
        entries.take(1, int(ends[0] - t.computed[seq.row]))


def _of_remote(seq: Tracked) -> str:
    """Why a request waits for the remote tier."""
    if seq.seek is not None and seq.seek.state is SeekState.FETCHING:
        return f"{len(seq.seek.fetched):,} blocks of its prefix are being fetched from the remote tier"
    return "the remote tier is asked for its prefix"
