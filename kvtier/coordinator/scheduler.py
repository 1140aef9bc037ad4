"""The work of the next step: continuous batching with chunked prefill over tiers that can be short.

Owns       the step under way.
Promises   the first in service order always advances, unless the engine lets it rest. A request that holds blocks
           never waits behind a request that holds none. A preemption happens only if it frees the lacking blocks. Input
           that is valid by the API never raises. Keeps I5, I7, I8, I9, I10, I30.
Does not   touch bytes or wait for copies. The exception: this very step needs a block that a store still reads, and the
           engine cannot order the writer behind the store.

``schedule``, ``commit``, ``cancel`` and ``wait`` (which gives the link stores) come from one thread. The forwards run
on this thread's stream. ``add``, ``abort``, ``finish``, ``fail``, ``wake`` and ``has_work`` come from any thread.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy.typing as npt

from kvtier.coordinator.admission import Admission
from kvtier.coordinator.core import HasCore, core_of
from kvtier.coordinator.counts import CANCELLED, DISOWNED, LOAD_FAILED, RESET
from kvtier.coordinator.extension import Extension
from kvtier.coordinator.inbox import Inbox
from kvtier.coordinator.reports import Reports
from kvtier.coordinator.request import FinishedRequest, FinishReason, Request
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.running import Running, check_limits, named
from kvtier.coordinator.step import Step
from kvtier.coordinator.tracked import State, Tracked
from kvtier.geometry.keys import Text
from kvtier.geometry.options import wait_seconds
from kvtier.machine.errors import InvalidRequest
from kvtier.machine.journal import Arrived, Ended, SentBack


class Scheduler:
    """Schedules requests over ``cache``: up to ``max_batched_tokens`` tokens a step, ``max_running`` at a time."""

    def __init__(self, cache: HasCore, max_batched_tokens: int = 8192, max_running: int = 256) -> None:
        max_batched_tokens, max_running = check_limits(max_batched_tokens, max_running)
        self._core = core = core_of(cache)
        self._coordinator = core.coordinator
        self._pools = self._coordinator.pools
        self._connector = self._coordinator.connector
        self._counts = self._coordinator.counts
        self._journal = self._coordinator.journal
        self._max_batched_tokens = max_batched_tokens
        self._inbox = Inbox()
        self._settled_seen = 0  # transfers that had ended when the last step was made
        self.reports = Reports(self._coordinator.tiers)
        """What has ended, and counters."""
        self._running = Running(core, max_batched_tokens, max_running)
        self._roster, self._entries = self._running.roster, self._running.entries
        self._admission = Admission(self._coordinator, self._roster, self._preempt, self._finish)
        self._coming = self._running.coming
        self._extension = Extension(self._coordinator, self._running, self._preempt, self._finish)
        core.take_over(self, max_running)  # last: other threads see it from here on

    # --- from any thread --------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises what ``add`` would raise, and queues nothing."""
        if not isinstance(request, Request):
            raise InvalidRequest(f"add() takes a kvtier.Request, not {type(request).__name__}")
        self._core.check_driver(self)
        self._coordinator.room.check_possible(request)
        self._inbox.check_new(request.request_id)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ``RequestTooLarge``, ``DuplicateRequest``, ``InvalidRequest``: nothing changed."""
        self.check(request)
        chain = self._coordinator.chain
        text = Text(chain, chain.root(request.adapter, request.cache_salt, request.extra_keys), request.tokens)
        self._inbox.add(request.request_id, lambda arrival: Tracked(request, arrival, text))
        self._connector.wake()

    def abort(self, request_id: str) -> bool:
        """Ends a request early, reported as "abort"; False if no request of this id still goes on.

        The token that the step under way samples for it is not its text, even if this token would have ended it.
        """
        return self._end(request_id, "abort")

    def finish(self, request_id: str) -> bool:
        """Ends a request because the engine says so (a stop string), reported as "stop"; False as in ``abort``."""
        return self._end(request_id, "stop")

    def fail(self, request_id: str) -> bool:
        """Ends a request whose forward went wrong (its logits are not finite), reported as "error"; False as in
        ``abort``.

        None of its text's K and V is found again, in either tier. This includes the prefix that it was computed from.
        Other requests that run keep their blocks.
        """
        return self._end(request_id, "error")

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that are not reported yet, in the order in which they arrived; from any thread."""
        return self._inbox.request_ids()

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        named = isinstance(request_id, str)
        accepted = named and not self._core.is_closed and self._inbox.end(request_id, reason)
        if accepted:
            self._connector.wake()
        return accepted

    @property
    def running_ids(self) -> list[str]:
        """Ids of the requests that hold a row, in service order."""
        return self._roster.names().copy()

    def has_work(self) -> bool:
        """True until every request is reported and every transfer has settled.

        A transfer that is past its deadline is not waited for: its blocks stay quarantined until it ends after all.
        False once the cache is closed.
        """
        if self._core.is_closed:
            return False
        return len(self._inbox) > 0 or self._coordinator.door.num_copies > 0 or self._running.step is not None

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a transfer ends or a request arrives or ends, at most ``timeout_s`` seconds.

        Returns immediately if a request has arrived or is to end, or if the cache is closed. It also does so if a
        transfer has ended since the last ``schedule`` and work is left. Raises ``ConfigError`` if ``timeout_s`` is not
        a number of seconds.
        """
        seconds = wait_seconds(timeout_s)
        news = self._connector.ledger.num_settled != self._settled_seen and self.has_work()
        if not self._inbox.has_mail and not news and not self._core.is_closed:
            self._connector.wait(min(seconds, self._coordinator.door.due_s(self._roster.waiting)))

    def wake(self) -> None:
        """Ends a ``wait``, or the next one at once: its thread has other work to do. From any thread or handler."""
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
    def num_arrived(self) -> int:
        """Requests that were added and not looked at yet."""
        return self._inbox.num_arrived

    @property
    def num_running(self) -> int:
        """Requests that hold a row, including requests whose loads are under way."""
        return len(self._roster.running)

    @property
    def max_running(self) -> int:
        """Requests that can hold a row at a time: rows are numbers below this."""
        return len(self._roster.running) + self._roster.num_free_rows

    def count_waiting(self) -> dict[str, int]:
        """Requests that hold nothing yet, by why they wait (``Wait``); from any thread."""
        return self._roster.count_waiting(self._inbox.num_arrived)

    @property
    def roster(self) -> Roster:
        """The request of each row; for auditing."""
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
        return self._running.step

    def progress(self, request_id: str) -> tuple[int, int] | None:
        """(tokens whose KV is there, tokens known) of a request that waits or runs; None if there is none."""
        seq = self._inbox.find(request_id) if isinstance(request_id, str) else None
        if seq is None or seq.state is State.FINISHED:
            return None
        row, t = seq.row, self._coordinator.tables.arrays
        return (0, len(seq.tokens)) if row < 0 else (int(t.computed[row]), int(t.total[row]))

    def why_waiting(self) -> dict[str, str]:
        """Why each waiting request that was looked at was not admitted."""
        return {seq.request.request_id: seq.wait_reason for seq in self.waiting if seq.wait_reason}

    # --- schedule ---------------------------------------------------------------------------------

    def schedule(self, resting: Collection[str] = ()) -> Step:
        """Decides the next forward pass. Raises ``StepError`` if the last step was neither committed nor cancelled.

        ``resting``: ids of requests that sit this step out if they run, for an engine that shares its time out: any
        collection of them, else ``StepError``. They keep their blocks. Who has just been admitted computes all the
        same. The caller sees to it that none rests for ever.
        """
        self._core.check_driver(self)
        if self._running.step is not None:
            self._running.refuse_step()
        if not isinstance(resting, tuple) or resting:
            resting = named(resting)
        self._coordinator.door.poll()
        self._settled_seen = self._connector.ledger.num_settled
        self._pools.tick()
        if self._inbox.has_mail:
            self._end_those(self._take_mail())
        if self._roster.has_loading or self._connector.has_failed_loads:
            self._settle_loads()
        self._entries.clear()
        if resting:
            self._running.let_rest(resting)
        if self._roster.waiting:
            self._admission.admit_urgent(self._entries)
        if self._journal.is_on:
            self._coordinator.evictions.around(self._extension.plan, self._roster)
        else:
            self._extension.plan()
        if self._roster.waiting:
            self._coming.before_admission()
            self._admission.admit_waiting(self._entries)
        if self._roster.waiting:
            self._coming.after_admission()
        self._coordinator.retention.launder(2 * self._max_batched_tokens)
        self._connector.submit_planned()
        step = self._running.make_step()
        self._core.check("schedule")
        return step

    def reset_prefix_cache(self) -> bool:
        """``KVCache.reset_prefix_cache``; raises ``StepError`` too if another scheduler drives the cache."""
        self._core.check_driver(self)
        self._core.reset_prefix_cache()
        return True

    def _take_mail(self) -> list[tuple[Tracked, FinishReason]]:
        """Queues arrivals; returns the requests whose end was asked for."""
        arrived, ended = self._inbox.take()
        self._coming.has_new |= bool(arrived)
        for seq in arrived:
            self._roster.enqueue(seq)
            self._journal.tell(seq.request.request_id, Arrived.of, seq.request)
        return ended

    def _settle_loads(self) -> None:
        """Requests with landed loads run. Requests with failed loads start over, or end if the policy says so."""
        failed = self._connector.take_failed_loads()
        for seq in self._roster.loading():
            if seq.ticket in failed:
                if self._core.on_load_error == "fail":
                    self._finish(seq, "load_error")
                else:
                    seq.use_host = False
                    self._back_to_waiting(seq, f"load failed: {failed[seq.ticket]}", LOAD_FAILED)
            elif not self._connector.ledger.is_live(seq.ticket):
                self._coordinator.start_running(seq)

    # --- commit -----------------------------------------------------------------------------------

    def commit(self, step: Step, next_token_ids: npt.ArrayLike) -> list[FinishedRequest]:
        """The forward is done: counts its tokens, publishes its blocks, plans their stores, reports ended requests.

        ``next_token_ids``: ints, one per entry of ``step.sample_rows``. Raises ``StepError`` if ``step`` is not under
        way or the ids do not fit it; then nothing changed.
        """
        self._core.check_open()
        ids = self._running.check_ids(step, next_token_ids)
        self._core.check_step()
        self._running.end_step(step)
        self._counts.step(step.num_tokens)
        asked = self._take_mail() if self._inbox.has_mail else []
        if len(step.rows):
            for seq, reason in [*self._running.advance(ids, asked)]:
                self._finish(seq, reason)
        if asked:
            self._end_those(asked)
        self._coordinator.door.poll()
        self._connector.submit_planned()
        if self._journal.is_on:
            self._coordinator.evictions.note_rows(self._entries.due.rows, self._roster)
        reports = self.reports.take()
        if reports:
            self._inbox.forget(report.request_id for report in reports)
        self._core.check("commit")
        return reports

    def cancel(self, step: Step) -> None:
        """The forward failed: none of it is published, and its requests go back to waiting as if preempted.

        A request whose end was asked for meanwhile ends. A request whose text has outgrown the pools ends with
        "capacity".
        """
        self._core.check_open()
        self._running.check_under_way(step)
        self._core.check_step()
        self._running.end_step(step)
        self._counts.cancelled_steps += 1
        due = self._running.due()
        self._end_those(self._take_mail())
        for seq in due:
            if seq.state is State.RUNNING:
                self._preempt(seq, CANCELLED)
        self._core.check("cancel")

    # --- ends -------------------------------------------------------------------------------------

    def _preempt(self, seq: Tracked, cause: SentBack) -> None:
        """It goes back to waiting, or ends if it could never come back: its text has outgrown the pools."""
        if not self._coordinator.room.can_come_back(seq.row):
            self._finish(seq, "capacity")
            return
        seq.preemptions += 1
        self.reports.num_preemptions += 1
        self._back_to_waiting(seq, "preempted", cause)

    def _back_to_waiting(self, seq: Tracked, reason: str, cause: SentBack) -> None:
        self._counts.send_back(cause)
        if self._journal.is_on:
            self._journal.add(seq.request.request_id, cause)
        self._running.leave(seq, comes_back=True)
        self._coming.has_new = True
        seq.move(State.WAITING)
        seq.wait_again(reason)
        self._roster.enqueue(seq)

    def _finish(self, seq: Tracked, reason: FinishReason) -> None:
        """It ends for ``reason``, unless another ending was asked for."""
        if seq.state is State.FINISHED:
            return
        reason = self._inbox.decide(seq, reason)
        if seq.row >= 0:
            self._running.leave(seq)
        else:
            self._roster.drop(seq)
        seq.move(State.FINISHED)
        self._counts.finished[reason] += 1
        self._journal.tell(seq.request.request_id, Ended, reason, seq.num_generated)
        self.reports.add(seq, reason)

    def _end_those(self, asked: list[tuple[Tracked, FinishReason]]) -> None:
        """Ends requests whose end was asked for. Content of failed requests is disowned."""
        for seq, reason in asked:
            self._finish(seq, reason)
        failed = [seq for seq, reason in asked if reason == "error"]
        for seq in failed:
            self._coordinator.disown(seq)
        for seq in self._roster.loading_of(failed) if failed else ():
            self._back_to_waiting(seq, "what it was loading is that of a request that has failed", DISOWNED)

    def on_reset(self) -> None:
        """The cache was reset: requests whose loads are under way start over, and no request waits for content on its
        way."""
        for seq in self._roster.running:
            seq.course.branches.clear()
        for seq in self._roster.waiting:
            seq.waits_for = None
        for seq in self._roster.loading():
            self._back_to_waiting(seq, "the cache was reset while its prefix was being loaded", RESET)
