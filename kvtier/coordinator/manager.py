"""The cache for an engine that schedules by itself: hits, blocks for many sequences at once, steps, ends.

Owns       the set of sequences, and the outcome of their loads.
Promises   a request for blocks is met in all groups and for all sequences, or not at all. Then the answer is a
           ``Shortage``. A step's arrays are the same as those of ``Scheduler``. Keeps I4, I16.
Does not   decide anything: no queue, no preemption, no admission. If the copy engine cannot order a writer after a
           store, ``start`` and ``plan`` wait for the stores that read their blocks.

All calls except ``wake`` come from one thread. The forwards run on this thread's stream.

| here | vLLM's ``KVCacheManager`` | SGLang's radix cache |
|---|---|---|
| ``match`` | ``get_computed_blocks`` | ``match_prefix`` |
| ``start`` | ``allocate_slots`` of a new request | ``inc_lock_ref``, ``alloc`` |
| ``plan`` | ``allocate_slots`` of all running requests | ``alloc`` |
| ``commit`` | ``cache_blocks`` | ``insert`` |
| ``stop``, ``close`` | ``free`` | ``dec_lock_ref`` |
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.core import HasCore, core_of
from kvtier.coordinator.reports import Reports
from kvtier.coordinator.request import FINISH_REASONS, FinishedRequest, FinishReason, Request, Shortage
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.running import Running, check_limits
from kvtier.coordinator.sequence import Hit, Sequence, counted
from kvtier.coordinator.step import Step
from kvtier.coordinator.tracked import State, Tracked
from kvtier.geometry.keys import Text
from kvtier.geometry.options import wait_seconds
from kvtier.gpu_pool.row_state import RowArrays
from kvtier.machine.errors import ConfigError, DuplicateRequest, InvalidRequest, StepError
from kvtier.machine.integers import shown
from kvtier.machine.journal import Arrived, Ended, SentBack

SEQUENCES = "sequences"
"""The name in a ``Shortage`` of rows: more sequences than ``max_running`` would run."""


class CacheManager:
    """Drives ``cache`` in place of a ``Scheduler``, with ``max_running`` sequences started at most.

    Raises ``ConfigError``, ``MemoryUnavailable``, and ``StepError`` while another driver has work.
    """

    def __init__(self, cache: HasCore, max_batched_tokens: int = 8192, max_running: int = 256) -> None:
        max_batched_tokens, max_running = check_limits(max_batched_tokens, max_running)
        self._core = core = core_of(cache)
        if SEQUENCES in core.spec.names:
            raise ConfigError(f"a Shortage of rows is told as {SEQUENCES!r}; give the group of this name another name")
        self._coordinator = core.coordinator
        self._pools = core.coordinator.pools
        self._connector = core.coordinator.connector
        self._journal = core.coordinator.journal
        self._running = Running(core, max_batched_tokens, max_running)
        self._sequences: dict[Tracked, Sequence] = {}
        self._names: set[str] = set()
        self._settled: list[Sequence] = []  # their loads have ended outside ``poll``
        self._count = 0
        self.reports = Reports(self._coordinator.tiers)
        """What has ended, and counters."""
        core.take_over(self, max_running)

    # --- sequences --------------------------------------------------------------------------------

    def open(self, request: Request) -> Sequence:
        """A sequence of this request's prompt. Raises ``RequestTooLarge``, ``DuplicateRequest``, ``InvalidRequest``."""
        if not isinstance(request, Request):
            raise InvalidRequest(f"open() takes a kvtier.Request, not {type(request).__name__}")
        self._core.check_driver(self)
        self._coordinator.room.check_possible(request)
        if request.request_id in self._names:
            raise DuplicateRequest(f"a request {shown(request.request_id)} is open already; use another id")
        chain = self._coordinator.chain
        text = Text(chain, chain.root(request.adapter, request.cache_salt, request.extra_keys), request.tokens)
        tracked = Tracked(request, self._count, text)
        self._count += 1
        self._names.add(request.request_id)
        self._sequences[tracked] = Sequence(tracked, self._coordinator.tables)
        self._running.roster.enqueue(tracked)
        self._running.coming.has_new = True
        self._journal.tell(request.request_id, Arrived.of, request)
        return self._sequences[tracked]

    def match(self, sequence: Sequence) -> Hit:
        """The content of an idle sequence in both tiers. Changes nothing: the content is not held."""
        found = self._coordinator.match(self._idle(sequence))
        host = sum(self._coordinator.hit_by_tier(found)[1:])
        return Hit(found.num_tokens, host, found.pending, found.limited_by)

    def start(self, sequence: Sequence) -> Shortage | None:
        """Gives the sequence its hit's blocks, and in every group a block for its next token. Starts its load, if any.

        A ``Shortage`` means that nothing has changed. It is empty while copies hold the needed blocks or bring the hit,
        or while a store is asked for it. Ask again when a copy has ended (``wait``, ``poll``). Raises ``StepError``
        while a step is under way: blocks may be moved.
        """
        self._check_no_step("start")
        seq = self._idle(sequence)
        roster, coordinator = self._running.roster, self._coordinator
        if not roster.has_free_row:
            return Shortage({SEQUENCES: (1, 0)})
        if coordinator.door.is_waiting(seq):
            return Shortage({})
        match = coordinator.match(seq)
        if match.pending:
            return Shortage({})
        need, used = coordinator.room.first_need(seq, match), self._pools.live
        if not self._pools.fits(used + need):
            return coordinator.room.shortage(need, used)
        self._running.coming.before_admission()
        coordinator.hold(match)
        if not coordinator.admit(seq, match, roster.next_row()):
            return Shortage({})
        roster.enter(seq)
        self._running.coming.after_admission()
        self._forget_end(seq)
        self._core.check("start")
        return None

    def stop(self, sequence: Sequence) -> FinishedRequest | None:
        """The sequence gives up all its blocks, and can be started again: its content stays findable.

        If its text has outgrown the pools, it could never start again. Then it ends with "capacity", and the report is
        returned.
        """
        seq = self._known(sequence)
        self._check_no_step("stop")
        if seq.row >= 0:
            self._send_back(seq)
        self._core.check("stop")
        return next(reversed(self.reports.take()), None)

    def close(self, sequence: Sequence, reason: FinishReason = "stop") -> FinishedRequest:
        """Ends a sequence. Its content stays findable, unless it ends with "error": then its K and V are wrong.

        Sequences that are loading, and begin as it does, are idle at once, with a ``problem``. The next ``poll``
        returns them.
        """
        seq = self._known(sequence)
        self._check_no_step("close")
        if not isinstance(reason, str) or reason not in FINISH_REASONS:
            raise InvalidRequest(f"reason must be one of {', '.join(map(repr, FINISH_REASONS))}, got {shown(reason)}")
        if reason == "error":
            self._coordinator.distrust(seq)
        self._finish(seq, reason)
        if reason == "error":
            self._coordinator.disown(seq)
            for other in self._running.roster.loading_of([seq]):
                self._back_from_load(other, "what it was loading is that of a sequence that has failed")
        report = self.reports.take()[-1]
        self._core.check("close")
        return report

    # --- steps ------------------------------------------------------------------------------------

    def plan(self, wants: Many[tuple[Sequence, int]]) -> Step | Shortage:
        """The next forward pass: each sequence computes its next n tokens, and gets the blocks for them.

        All blocks in all groups are given, or none and a ``Shortage``, which is empty while copies hold the blocks. A
        sequence decodes if it knows no more than one token beyond its computed tokens. Raises ``StepError`` for
        sequences that do not run, for more tokens than they know, and while a step is under way.
        """
        self._core.check_driver(self)
        if self._running.step is not None:
            self._running.refuse_step()
        entries, t = self._running.entries, self._tables
        entries.clear()
        rows, ends = entries.rest()
        ordered = sorted(((self._known(s), n) for s, n in counted(wants)), key=lambda want: want[0].order)
        count, tokens, budget = len(ordered), 0, entries.budget
        for k, (seq, n) in enumerate(ordered):
            known = 0 if seq.row < 0 else int(t.total[seq.row] - t.computed[seq.row])
            if seq.state is not State.RUNNING or entries.placed[seq.row] or not 1 <= n <= known:
                state = f"{seq.state.value}, {known} tokens ahead"
                raise StepError(f"{seq.request!r} is {state}: cannot compute {shown(n)}")
            rows[k], ends[k] = seq.row, t.computed[seq.row] + n
            entries.placed[seq.row] = 1
            tokens += n
        if tokens > budget:
            raise StepError(f"{tokens:,} tokens are more than max_batched_tokens, {budget:,}")
        self._pools.tick()
        if count:
            short = self._take(rows[:count], ends[:count])
            if short is not None:
                return short
        entries.take(count, tokens)
        self._coordinator.retention.launder(2 * budget)
        self._connector.submit_planned()
        step = self._running.make_step()
        self._core.check("plan")
        return step

    def _take(self, rows: npt.NDArray[np.int32], ends: npt.NDArray[np.int64]) -> Shortage | None:
        """Blocks for tokens up to ``ends``."""
        room, need = self._coordinator.room, self._coordinator.tables.lacked(rows, ends)
        used = self._pools.live
        if not self._pools.fits(used + need) and not room.trim_to_fit(self._running.roster.rows(), used + need):
            return room.shortage(need, used)
        extend = partial(self._running.extend, rows, ends, need)
        return None if self._coordinator.evictions.around(extend, self._running.roster) else Shortage({})

    def commit(self, step: Step, next_token_ids: npt.ArrayLike) -> list[FinishedRequest]:
        """The forward is done: its content is findable, its stores are planned, sampled tokens are appended.

        ``next_token_ids``: ints, one per entry of ``step.sample_rows``. Returns the requests that ended by their
        ``eos_token_ids`` or ``max_new_tokens``. Raises ``StepError``; then nothing changed.
        """
        self._core.check_open()
        ids = self._running.check_ids(step, next_token_ids)
        self._core.check_step()
        self._running.end_step(step)
        self._coordinator.counts.step(step.num_tokens)
        if len(step.rows):
            for seq, reason in [*self._running.advance(ids, [])]:
                self._finish(seq, reason)
        self._connector.submit_planned()
        self._coordinator.evictions.note_rows(self._running.entries.due.rows, self._running.roster)
        reports = self.reports.take()
        self._core.check("commit")
        return reports

    def cancel(self, step: Step) -> list[FinishedRequest]:
        """The forward failed: none of its content is findable, and its sequences are stopped. Returns the reports of
        sequences that end, as ``stop`` does."""
        self._core.check_open()
        self._running.check_under_way(step)
        self._running.end_step(step)
        self._coordinator.counts.cancelled_steps += 1
        for seq in self._running.due():
            self._send_back(seq)
        reports = self.reports.take()
        self._core.check("cancel")
        return reports

    # --- copies -----------------------------------------------------------------------------------

    def poll(self) -> list[Sequence]:
        """Sequences whose loads have ended since the last call: running, or idle again with a ``problem``."""
        self._core.check_driver(self)
        self._coordinator.door.poll()
        self._connector.submit_planned()
        ended, self._settled = self._settled, []
        failed = self._connector.take_failed_loads()
        for seq in self._running.roster.loading():
            if seq.ticket in failed:
                seq.use_host = False
                self._back(seq, f"load failed: {failed[seq.ticket]}")
            elif not self._connector.ledger.is_live(seq.ticket):
                self._coordinator.start_running(seq)
            else:
                continue
            ended.append(self._sequences[seq])
        self._core.check("poll")
        return ended

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a copy ends or ``wake`` is called, at most ``timeout_s`` seconds."""
        seconds = wait_seconds(timeout_s)
        if not self._core.is_closed:
            self._connector.wait(min(seconds, self._coordinator.door.due_s(self._running.roster.waiting)))

    def wake(self) -> None:
        """Ends a ``wait``; from any thread."""
        self._connector.wake()

    # --- as a driver ------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        """Sequences that hold nothing, and the row of each other sequence."""
        return self._running.roster

    @property
    def step(self) -> Step | None:
        """The step that is neither committed nor cancelled."""
        return self._running.step

    @property
    def num_arrived(self) -> int:
        """Every sequence is in the roster."""
        return 0

    def has_work(self) -> bool:
        """Whether sequences are open, or copies under way that are not overdue; False once the cache is closed."""
        has = bool(self._sequences) or self._coordinator.door.num_copies > 0 or self.step is not None
        return has and not self._core.is_closed

    def astray(self) -> set[str]:
        """Ids of open sequences that the roster does not know, or the other way round."""
        roster = self._running.roster
        return self._names ^ {seq.request.request_id for seq in (*roster.running, *roster.waiting)}

    def on_reset(self) -> None:
        """The cache was reset: sequences whose loads are under way hold nothing any more."""
        for seq in self._running.roster.loading():
            self._back_from_load(seq, "the cache was reset while its prefix was being loaded")

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _tables(self) -> RowArrays:
        return self._coordinator.tables.arrays

    def _known(self, sequence: Sequence) -> Tracked:
        if not isinstance(sequence, Sequence) or sequence.tracked not in self._sequences:
            raise StepError("this sequence is not open here")
        return sequence.tracked

    def _idle(self, sequence: Sequence) -> Tracked:
        self._core.check_driver(self)
        seq = self._known(sequence)
        if seq.state is not State.WAITING:
            raise StepError(f"{seq.request!r} is {seq.state.value} already")
        return seq

    def _check_no_step(self, what: str) -> None:
        self._core.check_driver(self)
        if self.step is not None:
            raise StepError(f"commit or cancel the step before you {what} a sequence")

    def _forget_end(self, seq: Tracked) -> None:
        """The end of its last load is not to be reported any more."""
        self._settled = [other for other in self._settled if other.tracked is not seq]

    def _send_back(self, seq: Tracked) -> None:
        """It may start again, or ends if it never could: its text has outgrown the pools."""
        if not self._coordinator.room.can_come_back(seq.row):
            self._finish(seq, "capacity")
            return
        self._back(seq, "")
        seq.preemptions += 1
        self.reports.num_preemptions += 1

    def _back(self, seq: Tracked, reason: str) -> None:
        self._journal.tell(seq.request.request_id, SentBack, reason or "stopped")
        self._running.leave(seq, comes_back=True)
        seq.move(State.WAITING)
        seq.wait_again(reason)
        self._running.roster.enqueue(seq)
        self._running.coming.has_new = True

    def _back_from_load(self, seq: Tracked, problem: str) -> None:
        """The next ``poll`` returns it as idle again."""
        self._back(seq, problem)
        self._settled.append(self._sequences[seq])

    def _finish(self, seq: Tracked, reason: FinishReason) -> None:
        if seq.row >= 0:
            self._running.leave(seq)
        else:
            self._running.roster.drop(seq)
        seq.move(State.FINISHED)
        self._coordinator.counts.finished[reason] += 1
        self._journal.tell(seq.request.request_id, Ended, reason, seq.num_generated)
        self.reports.add(seq, reason)
        self._forget_end(seq)
        del self._sequences[seq]
        self._names.discard(seq.request.request_id)
