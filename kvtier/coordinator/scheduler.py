"""Who computes what in the next step: continuous batching with chunked prefill over tiers that can be short.

Owns       the step under way.
Promises   the first in service order always advances; a request that holds blocks never waits behind one that holds
           none; a preemption happens only if it frees what is lacking; nothing valid by the API raises. Keeps I5, I7,
           I8, I9, I10, I30.
Does not   touch bytes or wait for copies (unless this very step needs a block that a store still reads on an engine
           that cannot order the writer behind it).

``schedule``, ``commit``, ``cancel`` and ``wait`` (which gives the link stores) come from one thread, that whose stream
the forwards run on; ``add``, ``abort``, ``finish``, ``fail``, ``wake`` and ``has_work`` from any.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier._integers import integer, number, shown
from kvtier.coordinator.admission import Admission
from kvtier.coordinator.advance import GOES_ON, STOPPED, advance
from kvtier.coordinator.counts import CANCELLED, DISOWNED, LOAD_FAILED, RESET, SentBack
from kvtier.coordinator.entries import Entries
from kvtier.coordinator.inbox import Inbox
from kvtier.coordinator.plan import extend_rows, plan_running, valid_ids
from kvtier.coordinator.reports import Reports
from kvtier.coordinator.request import FinishedRequest, FinishReason, Request, State, Tracked, Wait
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.step import Step
from kvtier.errors import ConfigError, InvalidRequest, MemoryUnavailable, StepError
from kvtier.gpu_pool.row_state import Geo
from kvtier.keys import Text

if TYPE_CHECKING:
    from kvtier.cache import KVCache


MOST = 2**24
"""Rows, and tokens a step, for which work arrays are set up: far more than any engine runs."""


def check_limits(max_batched_tokens: object, max_running: object) -> tuple[int, int]:
    """Both as plain ints; raises ``ConfigError`` for what a ``Scheduler`` does not take."""
    return _at_most(max_batched_tokens, "max_batched_tokens"), _at_most(max_running, "max_running")


def _at_most(value: object, name: str) -> int:
    most = integer(value)
    if most is None or not 1 <= most <= MOST:
        raise ConfigError(f"{name} must be an integer in 1..{MOST:,}, got {shown(value)}")
    return most


class Scheduler:
    """Schedules requests over ``cache``: up to ``max_batched_tokens`` tokens a step, ``max_running`` at a time."""

    def __init__(self, cache: KVCache, max_batched_tokens: int = 8192, max_running: int = 256) -> None:
        max_batched_tokens, max_running = check_limits(max_batched_tokens, max_running)
        if not hasattr(type(cache), "attach_scheduler"):
            raise ConfigError(f"cache must be a kvtier.KVCache, got {type(cache).__name__}")
        self._coordinator, _, _ = cache.parts
        self._cache = cache
        self._pools = self._coordinator.pools
        self._connector = self._coordinator.connector
        self._counts = self._coordinator.counts
        self._max_batched_tokens = max_batched_tokens
        self._inbox = Inbox()
        self._step: Step | None = None
        self._settled_seen = 0  # transfers that had ended when the last step was made
        self.reports = Reports()
        """What has ended, and counters."""
        self._most_generated = 0  # no row has sampled more tokens than this
        # Work arrays, reused by every step.
        groups = len(cache.spec.groups)
        self._used, self._need, self._later, self._total = np.zeros((4, groups), np.int64)
        try:
            self._roster = Roster(max_running)
            self._entries = Entries(groups, max_running, max_batched_tokens)
            self._ended = np.empty(max_running, np.uint8)
        except MemoryError as problem:
            setting = "max_running" if max_running > max_batched_tokens else "max_batched_tokens"
            raise MemoryUnavailable(
                f"work arrays for {max_batched_tokens:,} tokens of {max_running:,} requests do not fit into memory "
                f"({problem or 'out of memory'}); lower {setting}"
            ) from problem
        self._admission = Admission(self._coordinator, self._roster, self._preempt, self._finish)
        cache.attach_scheduler(self, max_running)  # last: other threads see it from here on

    # --- from any thread --------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises what ``add`` would raise, and queues nothing."""
        if not isinstance(request, Request):
            raise InvalidRequest(f"add() takes a kvtier.Request, not {type(request).__name__}")
        self._cache.check_driver(self)
        self._coordinator.check_possible(request)
        self._inbox.check_new(request.request_id)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ``RequestTooLarge``, ``DuplicateRequest``, ``InvalidRequest``: nothing changed."""
        self.check(request)
        chain = self._coordinator.chain
        text = Text(chain, chain.root(request.adapter, request.cache_salt, request.extra_keys), request.tokens)
        self._inbox.add(request.request_id, lambda arrival: Tracked(request, arrival, text))
        self._connector.wake()

    def abort(self, request_id: str) -> bool:
        """Ends a request early, reported as "abort"; False if there is none of this id that still goes on.

        What the step under way samples for it is not its text, even where that would have ended it.
        """
        return self._end(request_id, "abort")

    def finish(self, request_id: str) -> bool:
        """Ends a request because the engine says so (a stop string), reported as "stop"; False as in ``abort``."""
        return self._end(request_id, "stop")

    def fail(self, request_id: str) -> bool:
        """Ends a request whose forward went wrong (its logits are not finite), reported as "error"; False as in
        ``abort``.

        Nothing of its text's K and V is found again, in either tier: not what it has computed, nor the prefix that it
        was computed from. Other requests that run keep their blocks.
        """
        return self._end(request_id, "error")

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that are not reported yet, in the order in which they arrived; from any thread."""
        return self._inbox.request_ids()

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        named = isinstance(request_id, str)
        accepted = named and not self._cache.is_closed and self._inbox.end(request_id, reason)
        if accepted:
            self._connector.wake()
        return accepted

    def has_work(self) -> bool:
        """True until every request is reported and every transfer has settled.

        A transfer that is past its deadline is not waited for: its blocks stay quarantined until it ends after all.
        False once the cache is closed.
        """
        if self._cache.is_closed:
            return False
        return len(self._inbox) > 0 or self._connector.num_progressing > 0 or self._step is not None

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a transfer ends or a request arrives or ends, at most ``timeout_s`` seconds.

        Returns immediately if a request has arrived or is to end, or if the cache is closed; also if a transfer has
        ended since the last ``schedule`` and work is left. Raises ``ConfigError`` if ``timeout_s`` is not a number of
        seconds.
        """
        seconds = number(timeout_s)
        if seconds is None or not seconds >= 0:
            raise ConfigError(f"timeout_s must be a number of seconds, not negative, got {shown(timeout_s)}")
        news = self._connector.num_settled != self._settled_seen and self.has_work()
        if not self._inbox.has_mail and not news and not self._cache.is_closed:
            self._connector.wait(seconds)

    def wake(self) -> None:
        """Ends a ``wait``, or the next one at once: there is other work for its thread. From any thread or handler."""
        self._connector.wake()

    # --- looking in -------------------------------------------------------------------------------

    @property
    def running(self) -> tuple[Tracked, ...]:
        """Requests that hold a row, in service order; for auditing."""
        return tuple(self._roster.running)

    @property
    def waiting(self) -> tuple[Tracked, ...]:
        """Requests that hold nothing, in service order; for auditing."""
        return tuple(self._roster.waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._roster.waiting) + self._inbox.num_arrived

    @property
    def num_running(self) -> int:
        """Requests that hold a row, those included whose loads are under way."""
        return len(self._roster.running)

    def count_waiting(self) -> dict[str, int]:
        """Requests that hold nothing yet, by why they wait (``Wait``); from any thread."""
        counted = Counter(seq.wait.value for seq in self.waiting)
        counted[Wait.QUEUE.value] += self._inbox.num_arrived
        return {wait.value: counted[wait.value] for wait in Wait}

    @property
    def roster(self) -> Roster:
        """Who has which row; for auditing."""
        return self._roster

    def astray(self) -> set[str]:
        """Ids of requests that are neither queued nor running nor about to be reported; for auditing."""
        known, arrived = self._inbox.unreported()
        there = {seq.request.request_id for seq in (*self._roster.running, *self._roster.waiting)}
        return known ^ (there | arrived | {report.request_id for report in self.reports.pending})

    @property
    def num_free_rows(self) -> int:
        """Rows that no request holds; for auditing."""
        return self._roster.num_free_rows

    @property
    def step(self) -> Step | None:
        """The step that is neither committed nor cancelled yet; for auditing."""
        return self._step

    def progress(self, request_id: str) -> tuple[int, int] | None:
        """(tokens whose KV is there, tokens known) of a request that waits or runs; None if there is none such."""
        seq = self._inbox.find(request_id) if isinstance(request_id, str) else None
        if seq is None or seq.state is State.FINISHED:
            return None
        row, t = seq.row, self._coordinator.tables.arrays
        return (0, len(seq.tokens)) if row < 0 else (int(t.computed[row]), int(t.total[row]))

    def why_waiting(self) -> dict[str, str]:
        """For each waiting request that was looked at and did not get in: why."""
        return {seq.request.request_id: seq.wait_reason for seq in self.waiting if seq.wait_reason}

    # --- schedule ---------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decides the next forward pass. Raises ``StepError`` if the last step was neither committed nor cancelled."""
        self._cache.check_driver(self)
        if self._step is not None:
            raise StepError("the last step is not committed; call commit(step, ids) or cancel(step) first")
        self._connector.poll()
        self._settled_seen = self._connector.num_settled
        self._pools.tick()
        self._end_those(self._take_mail())
        if self._roster.has_loading or self._connector.has_failed_loads:
            self._settle_loads()
        self._entries.clear()
        if self._roster.waiting:
            self._admission.admit_urgent(self._entries)
        self._plan_running()
        if self._roster.waiting:
            self._admission.admit_waiting(self._entries)
        self._coordinator.launder(2 * self._max_batched_tokens)
        self._connector.submit_planned()
        self._step = self._entries.step(self._coordinator.tables, self._roster)
        self._cache.check_invariants("schedule")
        return self._step

    def reset_prefix_cache(self) -> bool:
        """``KVCache.reset_prefix_cache``; raises ``StepError`` too where another scheduler drives the cache."""
        self._cache.check_driver(self)
        return self._cache.reset_prefix_cache()

    def _take_mail(self) -> list[tuple[Tracked, FinishReason]]:
        """Queues arrivals; returns the requests that somebody ended."""
        if not self._inbox.has_mail:
            return []
        arrived, ended = self._inbox.take()
        for seq in arrived:
            self._roster.wait(seq)
        return ended

    def _settle_loads(self) -> None:
        """Requests whose loads have landed run; those whose loads failed start over, or end if the policy says so."""
        failed = self._connector.take_failed_loads()
        for seq in self._roster.loading():
            if seq.ticket in failed:
                if self._cache.on_load_error == "fail":
                    self._finish(seq, "load_error")
                else:
                    seq.use_host = False
                    self._back_to_waiting(seq, f"load failed: {failed[seq.ticket]}", LOAD_FAILED)
            elif not self._connector.is_live(seq.ticket):
                self._coordinator.start_running(seq)

    def _plan_running(self) -> None:
        """Adds what runs already to the step's entries; answers shortage until all that can go on does."""
        entries, coordinator = self._entries, self._coordinator
        tried: Any = None
        while self._roster.running:
            rows, ends = entries.rest()
            t, p = coordinator.tables.arrays, self._pools.arrays
            n, planned, short, taken = plan_running(
                *p,
                t.geometry,
                t.table,
                t.span,
                t.state,
                self._roster.rows(),
                entries.placed,
                entries.budget,
                entries.chunk_tokens,
                coordinator.spares_cached,
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
            if n and not taken:
                if not coordinator.make_clean(self._need):
                    tried = self._let_sit_out(rows[:n], ends[:n], tried)
                    continue
                coordinator.tables.reserve(int(ends[:n].max()))
                t = coordinator.tables.arrays
                arrays = t.geometry, t.table, t.span, entries.placed, rows[:n], ends[:n]
                extend_rows(*p, *arrays, self._need)
            entries.take(n, planned)
            return

    def _let_sit_out(self, rows: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], tried: Any) -> Any:
        """The planned blocks could not be allocated. If nothing has changed since the last attempt, a copy pins blocks:
        the last row that lacks some sits this step out."""
        seen = self._pools.arrays.meta.copy()
        if tried is not None and np.array_equal(seen, tried):
            t = self._coordinator.tables.arrays
            held = t.hi[:, rows] * t.geometry[:, Geo.BLOCK_TOKENS, None]
            self._entries.placed[rows[np.flatnonzero((held < ends).any(0))[-1]]] = 1
        return seen

    def _answer_shortage(self, position: int) -> None:
        """The running request at ``position`` lacks blocks for a single token: finds them, or lets it sit out, or ends
        it if nobody can help."""
        running = self._roster.running
        seq = running[position]
        if not self._coordinator.can_go_on(seq.row):
            self._finish(seq, "capacity")
            return
        rows = [s.row for s in running if s.state is State.RUNNING]
        used = self._pools.live + self._need
        if self._coordinator.trim_to_fit(rows, used):
            return
        younger = self._roster.younger(seq)
        able = [s for s in younger if self._coordinator.has_run(s)]
        victims = self._coordinator.choose_victims(able, self._need)
        cause = self._coordinator.lack("running", self._need, self._pools.live)
        for victim in victims:
            self._preempt(victim, cause)
        if victims or self._coordinator.trim_where_lacking(rows, used):
            return
        others_may_help = position > 0 or len(able) < len(younger) or self._connector.num_progressing > 0
        if others_may_help:
            self._entries.placed[seq.row] = 1
        else:
            self._finish(seq, "capacity")

    # --- commit -----------------------------------------------------------------------------------

    def commit(self, step: Step, next_token_ids: npt.ArrayLike) -> list[FinishedRequest]:
        """The forward is done: counts its tokens, publishes its blocks, plans their stores, reports what has ended.

        ``next_token_ids``: ints, one per entry of ``step.sample_rows``. Raises ``StepError`` if ``step`` is not the
        one under way or the ids do not fit it; then nothing changed.
        """
        ids = self._check_ids(step, next_token_ids)
        self._cache.check_step()
        self._end_step(step)
        self._counts.step(step.num_tokens)
        asked = self._take_mail()
        if len(step.rows):
            self._advance(ids, [seq.row for seq, _ in asked if seq.row >= 0])
        self._end_those(asked)
        self._connector.poll()
        self._connector.submit_planned()
        reports = self.reports.take()
        if reports:
            self._inbox.forget(report.request_id for report in reports)
        self._cache.check_invariants("commit")
        return reports

    def _check_ids(self, step: Step, next_token_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        self._cache.check_open()
        self._check_under_way(step)
        try:
            ids: npt.NDArray[Any] = np.asarray(next_token_ids)
        except Exception as problem:  # whatever an object's __array__ raises; torch refuses tensors of other devices
            raise StepError(f"token ids must be a flat list of integers: {problem}") from None
        samples = self._entries.due.samples
        if ids.shape != samples.shape:
            raise StepError(f"commit needs {len(samples)} token ids (one per sample row), got {ids.shape}")
        if not (ids.dtype == np.int64 and ids.flags.carray):  # the loops are compiled for nothing else
            if ids.size and ids.dtype.kind not in "iu":
                raise StepError(f"token ids must be integers, got {ids.dtype}")
            ids = np.array(ids, np.int64)
        if not valid_ids(ids):
            raise StepError("token ids must be in [0, 2**31)")
        return ids

    def _check_under_way(self, step: Step) -> None:
        if step is not self._step or step is None:
            raise StepError("this step is not under way (committed, cancelled, or of another scheduler)")

    def _end_step(self, step: Step) -> None:
        step.close()
        self._step = None

    def _advance(self, ids: npt.NDArray[np.int64], ended_rows: list[int]) -> None:
        coordinator, ended = self._coordinator, self._ended
        rows, ends, samples = self._entries.due
        tables, sealed = coordinator.tables, coordinator.tables.sealed
        if ended_rows:  # what is sampled for a request that somebody has ended is not its text
            ids = np.where(np.isin(rows[samples], ended_rows), -1, ids)
        self._counts.generated_tokens += int(np.count_nonzero(ids >= 0)) if ended_rows else len(ids)
        for k in self._entries.prefills:  # names the blocks that they have filled
            seq = self._roster.of_row(rows[k])
            coordinator.seal_prefill(seq, int(ends[k]))
        if self._most_generated >= tables.arrays.generated.shape[1]:
            self._most_generated = int(tables.arrays.num_generated.max())  # those who sit this step out go on later
            tables.reserve_generated(self._most_generated + 1)
        self._most_generated += 1
        sealed.reserve(len(rows) * len(self._need))
        sealed.count, num_ended = advance(
            *self._pools.arrays,
            *tables.arrays,
            coordinator.chain.secret,
            self._cache.spec.hit_tokens,
            rows,
            ends,
            samples,
            ids,
            ended,
            sealed.count,
            *sealed.arrays,
        )
        if sealed.count:
            coordinator.plan_stores()
        if num_ended:
            for i in np.flatnonzero(ended[: len(rows)] != GOES_ON):
                self._finish(self._roster.of_row(rows[i]), "stop" if ended[i] == STOPPED else "length")

    def cancel(self, step: Step) -> None:
        """The forward failed: nothing of it is published, its requests go back to waiting as if preempted.

        Those that somebody has ended meanwhile end; those whose text has outgrown the pools do so with "capacity".
        """
        self._cache.check_open()
        self._check_under_way(step)
        self._cache.check_step()
        self._end_step(step)
        self._counts.cancelled_steps += 1
        due = [self._roster.of_row(row) for row in self._entries.due.rows]
        self._end_those(self._take_mail())
        for seq in due:
            if seq.state is State.RUNNING:
                self._preempt(seq, CANCELLED)
        self._cache.check_invariants("cancel")

    # --- ends -------------------------------------------------------------------------------------

    def _preempt(self, seq: Tracked, cause: SentBack) -> None:
        """It goes back to waiting, or ends if it would never come back: its text has outgrown the pools."""
        if not self._coordinator.can_come_back(seq.row):
            self._finish(seq, "capacity")
            return
        seq.preemptions += 1
        self.reports.num_preemptions += 1
        self._back_to_waiting(seq, "preempted", cause)

    def _back_to_waiting(self, seq: Tracked, reason: str, cause: SentBack) -> None:
        self._counts.send_back(cause)
        self._leave(seq)
        seq.move(State.WAITING)
        seq.wait_again(reason)
        self._roster.wait(seq)

    def _leave(self, seq: Tracked) -> None:
        row = seq.row
        self._coordinator.leave(seq)
        self._roster.leave(seq, row)

    def _finish(self, seq: Tracked, reason: FinishReason) -> None:
        """It ends, for ``reason`` unless somebody has asked for another ending."""
        if seq.state is State.FINISHED:
            return
        reason = self._inbox.decide(seq, reason)
        if seq.row >= 0:
            self._leave(seq)
        else:
            self._roster.drop(seq)
        seq.move(State.FINISHED)
        self._counts.finished[reason] += 1
        self.reports.add(seq, reason)

    def _end_those(self, asked: list[tuple[Tracked, FinishReason]]) -> None:
        """Requests that somebody has asked to be ended; what those that have failed leave behind is disowned."""
        for seq, reason in asked:
            self._finish(seq, reason)
        failed = [seq for seq, reason in asked if reason == "error"]
        for seq in failed:
            self._coordinator.disown(seq)
        for seq in self._roster.loading() if failed else ():
            if any(seq.shares_prefix(other) for other in failed):
                self._back_to_waiting(seq, "what it was loading is that of a request that has failed", DISOWNED)

    def on_reset(self) -> None:
        """The cache was reset: requests whose loads are under way start over, and nobody waits for what was coming."""
        for seq in self._roster.running:
            seq.branches.clear()
        for seq in self._roster.waiting:
            seq.wait_settled = -1
        for seq in self._roster.loading():
            self._back_to_waiting(seq, "the cache was reset while its prefix was being loaded", RESET)
