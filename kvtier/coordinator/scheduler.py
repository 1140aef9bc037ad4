"""Who computes what in the next step: continuous batching with chunked prefill over tiers that can be short.

Owns       the service order (priority, then arrival), the waiting and the running requests, and the step under way.
Promises   the first in service order always advances; a request that holds blocks never waits behind one that holds
           none; a preemption happens only if it frees what is lacking; nothing valid by the API raises. Keeps I5, I7,
           I8, I9, I10, I30.
Does not   touch bytes or wait for copies (unless this very step needs a block that a store still reads on an engine
           that cannot order the writer behind it).

``schedule``, ``commit`` and ``cancel`` come from one thread; ``add``, ``abort`` and ``finish`` from any.
"""

from __future__ import annotations

import threading
from bisect import insort
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.match import Match
from kvtier.coordinator.plan import GOES_ON, STOPPED, advance, extend_rows, fill_step, plan_running
from kvtier.coordinator.request import FinishedRequest, FinishReason, Request, State, Tracked
from kvtier.coordinator.step import Step
from kvtier.errors import ConfigError, DuplicateRequest, InvalidRequest, StepError
from kvtier.gpu_pool.block_table import Phase, Sealed

if TYPE_CHECKING:
    from kvtier.cache import KVCache

Counts = npt.NDArray[np.int64]


class Scheduler:
    """Schedules requests over ``cache``: up to ``max_batched_tokens`` tokens a step, ``max_running`` at a time."""

    def __init__(self, cache: KVCache, max_batched_tokens: int = 8192, max_running: int = 256) -> None:
        for name, value in (("max_batched_tokens", max_batched_tokens), ("max_running", max_running)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        self._coordinator = cache.attach_scheduler(self, max_running)
        self._cache = cache
        self._pools = self._coordinator.pools
        self._connector = self._coordinator.connector
        self._max_batched_tokens = max_batched_tokens
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._waiting: list[Tracked] = []  # by service order
        self._running: list[Tracked] = []  # hold a row, by service order
        self._by_row: list[Tracked | None] = [None] * max_running
        self._ids = np.full(max_running, "", object)  # request id of each row
        self._order: npt.NDArray[np.int32] | None = None
        self._num_loading = 0
        self._step: Step | None = None
        self._reports: list[FinishedRequest] = []
        # Shared with other threads, under the lock.
        self._lock = threading.Lock()
        self._known: dict[str, Tracked] = {}
        self._arrived: list[Tracked] = []
        self._endings: dict[str, FinishReason] = {}
        self._arrivals = 0
        # Work arrays, reused by every step.
        groups = len(cache.spec.groups)
        self._skip = np.zeros(max_running, np.uint8)  # rows that have their place in this step, or sit it out
        self._rows = np.empty(max_running, np.int32)
        self._ends = np.empty(max_running, np.int64)
        self._sample = np.empty(max_running, np.int32)
        self._query_start = np.empty(max_running + 1, np.int32)
        self._seq_lens = np.empty(max_running, np.int64)
        self._token_ids = np.empty(max_batched_tokens, np.int64)
        self._positions = np.empty(max_batched_tokens, np.int64)
        self._need = np.zeros(groups, np.int64)
        self._lack = np.zeros(groups, np.int64)
        self._finished = 0
        self._preemptions = 0
        self.prompt_tokens = {"device": 0, "host": 0, "computed": 0}
        """Counter: prompt tokens of finished requests that were admitted, by where they came from."""

    # --- from any thread --------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises what ``add`` would raise, and queues nothing."""
        if not isinstance(request, Request):
            raise InvalidRequest(f"add() takes a kvtier.Request, not {type(request).__name__}")
        self._cache.check_open()
        self._coordinator.check_possible(request)
        with self._lock:
            self._check_new(request)

    def _check_new(self, request: Request) -> None:
        if request.request_id in self._known:
            raise DuplicateRequest(f"a request {request.request_id!r} is already waiting or running; use another id")

    def add(self, request: Request) -> None:
        """Queues a request. Raises ``RequestTooLarge``, ``DuplicateRequest``, ``InvalidRequest``: nothing changed."""
        self.check(request)
        chain = self._coordinator.chain
        root = chain.root(request.adapter, request.cache_salt, request.extra_keys)
        keys = chain.extend(root, request.prompt_token_ids, np.empty((0, 2), np.uint64))
        with self._lock:
            self._check_new(request)
            tracked = Tracked(request, self._arrivals, root, keys, request.prompt_token_ids)
            self._arrivals += 1
            self._known[request.request_id] = tracked
            self._arrived.append(tracked)
        self._connector.wake()

    def abort(self, request_id: str) -> bool:
        """Ends a request early, reported as "abort"; False if there is none of this id that still goes on."""
        return self._end(request_id, "abort")

    def finish(self, request_id: str) -> bool:
        """Ends a request because the engine says so (a stop string), reported as "stop"; False as in ``abort``."""
        return self._end(request_id, "stop")

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        with self._lock:
            seq = self._known.get(request_id)
            if seq is None or seq.state is State.FINISHED or request_id in self._endings:
                return False
            self._endings[request_id] = reason
        self._connector.wake()
        return True

    def has_work(self) -> bool:
        """True until every request is reported and every transfer has settled.

        A transfer that is past its deadline is not waited for: its blocks stay quarantined until it ends after all.
        """
        return bool(self._known) or self._connector.num_progressing > 0 or self._step is not None

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a transfer ends or a request arrives or ends, at most ``timeout_s`` seconds."""
        with self._lock:
            if self._arrived or self._endings:
                return
        self._connector.wait(timeout_s)

    @property
    def running(self) -> tuple[Tracked, ...]:
        """Requests that hold a row, in service order; for auditing."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Tracked, ...]:
        """Requests that hold nothing, in service order; for auditing."""
        return tuple(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._waiting) + len(self._arrived)

    @property
    def num_running(self) -> int:
        """Requests that hold a row, those included whose loads are under way."""
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._preemptions

    @property
    def num_finished(self) -> int:
        """Requests ended so far."""
        return self._finished

    def progress(self, request_id: str) -> tuple[int, int] | None:
        """(tokens whose KV is there, tokens known) of a request that waits or runs; None if there is none such."""
        seq = self._known.get(request_id)
        if seq is None or seq.state is State.FINISHED:
            return None
        if seq.row < 0:
            return 0, len(seq.tokens)
        t = self._coordinator.tables.arrays
        return int(t.computed[seq.row]), int(t.total[seq.row])

    def why_waiting(self) -> dict[str, str]:
        """For each waiting request that was looked at and did not get in: why."""
        return {seq.request.request_id: seq.wait_reason for seq in list(self._waiting) if seq.wait_reason}

    # --- schedule ---------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Decides the next forward pass. Raises ``StepError`` if the last step was neither committed nor cancelled."""
        self._cache.check_open()
        if self._step is not None:
            raise StepError("the last step is not committed; call commit(step, ids) or cancel(step) first")
        self._connector.poll()
        for seq, reason in self._take_mail():
            self._finish(seq, reason)
        self._settle_loads()
        self._skip[:] = 0
        count, tokens = self._admit_urgent()
        count, tokens = self._plan_running(count, tokens)
        count, tokens = self._admit(list(self._waiting), count, tokens)
        self._coordinator.launder(2 * self._max_batched_tokens)
        self._connector.submit_planned()
        self._step = self._build_step(count)
        return self._step

    def _take_mail(self) -> list[tuple[Tracked, FinishReason]]:
        """Queues arrivals; returns the requests that somebody ended."""
        if not self._arrived and not self._endings:
            return []
        with self._lock:
            arrived, self._arrived = self._arrived, []
            endings, self._endings = self._endings, {}
            ended = [(self._known[name], reason) for name, reason in endings.items()]
        for seq in arrived:
            insort(self._waiting, seq, key=_order)
        return ended

    def _settle_loads(self) -> None:
        """Requests whose loads have landed run; those whose loads failed start over, or end if the policy says so."""
        if not self._num_loading:
            return
        failed = self._connector.take_failed_loads()
        for seq in [s for s in self._running if s.state is State.LOADING]:
            if seq.ticket in failed:
                if self._cache.on_load_error == "fail":
                    self._finish(seq, "load_error")
                else:
                    seq.use_host = False
                    self._back_to_waiting(seq, f"load failed: {failed[seq.ticket]}")
            elif not self._connector.is_live(seq.ticket):
                self._num_loading -= 1
                self._coordinator.start_running(seq)

    def _plan_running(self, count: int, tokens: int) -> tuple[int, int]:
        """Appends what runs already to the step's entries; answers shortage until all that can go on does."""
        while self._running:
            tables, order = self._coordinator.tables.arrays, self._order_of_rows()
            budget, rows, ends = self._max_batched_tokens - tokens, self._rows[count:], self._ends[count:]
            n, planned, short = plan_running(
                tables, self._pools.free, order, self._skip, budget, rows, ends, self._need, self._lack
            )
            if short >= 0:
                self._answer_shortage(short)
            elif n == 0:
                break
            elif self._coordinator.make_clean(self._need):
                self._coordinator.tables.reserve(int(ends[:n].max()))
                extend_rows(self._pools.arrays, self._coordinator.tables.arrays, rows[:n], ends[:n])
                self._skip[rows[:n]] = 1
                return count + n, tokens + planned
        return count, tokens

    def _order_of_rows(self) -> npt.NDArray[np.int32]:
        """Rows of the running requests, in service order; kept until requests come or go."""
        if self._order is None:
            self._order = np.fromiter((seq.row for seq in self._running), np.int32, len(self._running))
        return self._order

    def _answer_shortage(self, position: int) -> None:
        """The running request at ``position`` lacks blocks for a single token: finds them, or lets it sit out."""
        seq, younger = self._running[position], self._running[position + 1 :]
        if self._coordinator.trim([s.row for s in self._running if s.state is State.RUNNING]):
            return
        victims = self._coordinator.choose_victims([s for s in reversed(younger) if s.ran], np.maximum(self._lack, 0))
        for victim in victims:
            self._preempt(victim)
        if victims:
            return
        others_may_help = position > 0 or any(not s.ran for s in younger) or self._connector.num_progressing > 0
        if others_may_help:
            self._skip[seq.row] = 1
        else:
            self._finish(seq, "capacity")

    def _admit_urgent(self) -> tuple[int, int]:
        """Admits waiting requests that come before running ones in service order; those that come later give way."""
        if not self._waiting or not self._running or self._waiting[0].order > self._running[-1].order:
            return 0, 0
        last = self._running[-1].order
        return self._admit([seq for seq in self._waiting if seq.order < last], 0, 0)

    def _admit(self, candidates: list[Tracked], count: int, tokens: int) -> tuple[int, int]:
        """Admits ``candidates``, which are in service order, while they fit; returns the step's entries and tokens.

        Requests that wait for a transfer, or for a running twin to compute their prefix, are passed by others;
        one that finds too few free blocks is not.
        """
        for seq in candidates:
            if seq.row >= 0 or self._waits(seq):
                continue
            budget = self._max_batched_tokens - tokens
            if not self._free_rows or budget <= 0:
                break
            match = self._make_room(seq)
            if match is None:
                break
            if match.pending:
                seq.wait_settled = self._connector.num_settled
                seq.wait_reason = "a transfer is bringing its prefix"
                continue
            row = self._free_rows.pop()
            self._waiting.remove(seq)
            promised = self._coordinator.promised()
            self._coordinator.admit(seq, match, row)
            self._enter(seq, row)
            if seq.state is State.RUNNING:
                end = self._first_chunk(seq, budget, promised)
                self._rows[count], self._ends[count] = row, end
                self._skip[row] = 1
                tokens += end - match.num_tokens
                count += 1
        return count, tokens

    def _enter(self, seq: Tracked, row: int) -> None:
        """An admitted request takes its place among those that hold a row."""
        self._by_row[row] = seq
        self._ids[row] = seq.request.request_id
        self._num_loading += seq.state is State.LOADING
        insort(self._running, seq, key=_order)
        self._order = None

    def _waits(self, seq: Tracked) -> bool:
        """Whether the request had better wait for content that is on its way; it holds nothing meanwhile."""
        if seq.wait_settled == self._connector.num_settled and self._connector.num_live:
            return True
        t = self._coordinator.tables.arrays
        if seq.twin is not None and seq.twin_until in seq.twin.branches:
            return True
        seq.twin = None
        for row in np.flatnonzero(t.phase == Phase.PREFILL):
            other = self._by_row[row]
            common = self._coordinator.common_prefix(seq, other) if other is not None else 0
            if other is not None and common:
                seq.twin, seq.twin_until = other, common
                seq.wait_reason = f"request {other.request.request_id!r} is computing its prefix"
                return True
        return False

    def _make_room(self, seq: Tracked) -> Match | None:
        """The request's hit once all that it needs is free, with nothing done in between; None if it must wait.

        Making room can start stores, which take host blocks, and can give up overdue transfers: then the hit is
        looked up again, so that what is admitted is what is there.
        """
        if seq.short_at is not None and self._running and seq.order > self._running[-1].order:
            have = self._pools.free - self._coordinator.promised()
            if np.all(have <= seq.short_at):
                return None  # nobody younger to give way and nothing freed since it last looked
        while True:
            match = self._coordinator.match(seq)
            if match.pending:
                return match
            begin, whole = self._coordinator.admission_need(seq, match)
            have = self._pools.free - self._coordinator.promised()
            if np.any(whole > have):
                if not self._answer_admission(seq, whole, have):
                    seq.short_at = have
                    return None
                continue
            seq.short_at = None
            version = self._connector.version
            if not self._coordinator.make_clean(begin):
                seq.wait_reason = str(self._coordinator.shortage(begin, self._pools.clean))
                return None
            if self._connector.version == version:
                return match

    def _answer_admission(self, seq: Tracked, need: Counts, have: Counts) -> bool:
        """Requests that come later in service order give way to a waiting one; True if that made enough room."""
        younger = [s for s in reversed(self._running) if s.order > seq.order and s.ran and not self._skip[s.row]]
        victims = self._coordinator.choose_victims(younger, np.maximum(need - have, 0))
        for victim in victims:
            self._preempt(victim)
        if victims:
            return True
        if not self._running and not self._connector.num_progressing:
            self._finish(seq, "capacity")  # blocks are quarantined, and what is left will never do
        seq.wait_reason = str(self._coordinator.shortage(need, have))
        return False

    def _first_chunk(self, seq: Tracked, budget: int, promised: Counts) -> int:
        """Extends a request just admitted by as much of its prompt as budget and free blocks allow; its new end."""
        t, row = self._coordinator.tables.arrays, seq.row
        start, total = int(t.computed[row]), int(t.total[row])
        end = min(total, start + budget)
        free = np.maximum(0, self._pools.free - promised)
        for g, group in enumerate(self._cache.spec.groups):
            end = min(end, (int(t.hi[g, row]) + int(free[g])) * group.block_tokens)
        end = max(end, start + 1)
        need = np.array(
            [
                max(0, -(-end // group.block_tokens) - int(t.hi[g, row]))
                for g, group in enumerate(self._cache.spec.groups)
            ]
        )
        if not self._coordinator.make_clean(need):
            end = start + 1  # its blocks were taken by the admission
        self._coordinator.tables.extend(row, end)
        return end

    def _build_step(self, count: int) -> Step:
        tables, rows = self._coordinator.tables, self._rows[:count]
        t = tables.arrays
        starts = t.computed[rows]
        sampled = fill_step(
            t,
            rows,
            self._ends[:count],
            self._token_ids,
            self._positions,
            self._query_start,
            self._seq_lens,
            self._sample,
        )
        query_start = self._query_start[: count + 1]
        for k in np.flatnonzero(t.phase[rows] == Phase.PREFILL):
            seq = self._by_row[rows[k]]
            assert seq is not None
            self._token_ids[query_start[k] : query_start[k + 1]] = seq.tokens[starts[k] : self._ends[k]]
        num_tokens = int(query_start[-1])
        return Step(
            tables,
            self._ids[rows].tolist(),
            rows,
            starts,
            self._seq_lens[:count],
            self._token_ids[:num_tokens],
            self._positions[:num_tokens],
            query_start,
            self._sample[:sampled],
        )

    # --- commit -----------------------------------------------------------------------------------

    def commit(self, step: Step, next_token_ids: npt.ArrayLike) -> list[FinishedRequest]:
        """The forward is done: counts its tokens, publishes its blocks, plans their stores, reports what has ended.

        ``next_token_ids``: ints, one per entry of ``step.sample_rows``. Raises ``StepError`` if ``step`` is not the
        one under way or the ids do not fit it; then nothing changed.
        """
        ids = self._check_ids(step, next_token_ids)
        self._step = None
        endings = self._take_mail()
        ending = {seq.row: reason for seq, reason in endings if seq.row >= 0}
        if len(step.rows):
            self._advance(step, ids, ending)
        for seq, reason in endings:
            self._finish(seq, reason)
        self._connector.poll()
        self._connector.submit_planned()
        reports, self._reports = self._reports, []
        if reports:
            with self._lock:
                for report in reports:
                    del self._known[report.request_id]
        return reports

    def _check_ids(self, step: Step, next_token_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        if step is not self._step or step is None:
            raise StepError("this step is not under way (committed, cancelled, or of another scheduler)")
        ids: npt.NDArray[Any] = np.asarray(next_token_ids)
        if ids.shape != step.sample_rows.shape:
            raise StepError(
                f"commit needs {len(step.sample_rows)} token ids (one per sample row), got shape {ids.shape}"
            )
        if ids.size and (ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 2**31):
            raise StepError("token ids must be integers in [0, 2**31)")
        return ids.astype(np.int64)

    def _advance(self, step: Step, ids: npt.NDArray[np.int64], ending: dict[int, FinishReason]) -> None:
        coordinator, rows = self._coordinator, step.rows
        tables = coordinator.tables
        tokens = np.full(len(rows), -1, np.int64)
        tokens[step.sample_rows] = ids
        for row in ending:
            tokens[rows == row] = -1  # what is sampled for a request that somebody has ended is not its text
        sealed: list[Sealed] = []
        for k in np.flatnonzero(tables.arrays.phase[rows] == Phase.PREFILL):
            seq = self._by_row[rows[k]]
            assert seq is not None
            seq.ran = True
            sealed += coordinator.seal_prefill(seq, int(step.seq_lens[k]))
        tables.reserve_generated(int(tables.arrays.num_generated[rows].max()) + 1)
        t, groups = tables.arrays, len(self._cache.spec.groups)
        ended = np.empty(len(rows), np.uint8)
        room = len(rows) * groups
        out = Sealed(np.empty(room, np.int32), np.empty(room, np.int32), np.empty((room, 2), np.uint64))
        unit = self._cache.spec.hit_tokens
        n = advance(self._pools.arrays, t, coordinator.chain.secret, unit, rows, step.seq_lens, tokens, ended, *out)
        sealed.append(Sealed(out.groups[:n], out.blocks[:n], out.keys[:n]))
        coordinator.stored(Sealed.join(sealed))
        for k in np.flatnonzero(ended != GOES_ON):
            seq = self._by_row[rows[k]]
            assert seq is not None
            self._finish(seq, "stop" if ended[k] == STOPPED else "length")

    def cancel(self, step: Step) -> None:
        """The forward failed: nothing of it is published, its requests go back to waiting as if preempted."""
        if step is not self._step or step is None:
            raise StepError("this step is not under way (committed, cancelled, or of another scheduler)")
        self._step = None
        for row in step.rows:
            seq = self._by_row[row]
            assert seq is not None
            self._preempt(seq)

    # --- ends -------------------------------------------------------------------------------------

    def _preempt(self, seq: Tracked) -> None:
        seq.preemptions += 1
        self._preemptions += 1
        self._back_to_waiting(seq, "preempted")

    def _back_to_waiting(self, seq: Tracked, reason: str) -> None:
        self._leave(seq)
        seq.move(State.WAITING)
        seq.wait_reason, seq.wait_settled = reason, -1
        insort(self._waiting, seq, key=_order)

    def _leave(self, seq: Tracked) -> None:
        row = seq.row
        self._num_loading -= seq.state is State.LOADING
        self._coordinator.leave(seq)
        self._running.remove(seq)
        self._order = None
        self._by_row[row] = None
        self._free_rows.append(row)

    def _finish(self, seq: Tracked, reason: FinishReason) -> None:
        if seq.state is State.FINISHED:
            return
        if seq.row >= 0:
            self._leave(seq)
        elif seq in self._waiting:
            self._waiting.remove(seq)
        seq.move(State.FINISHED)
        self._finished += 1
        prompt = len(seq.request.prompt_token_ids)
        if seq.cached_tokens is not None:
            for tier, n in seq.cached_tokens.items():
                self.prompt_tokens[tier] += n
            self.prompt_tokens["computed"] += prompt - sum(seq.cached_tokens.values())
        self._reports.append(
            FinishedRequest(
                request_id=seq.request.request_id,
                token_ids=[int(token) for token in seq.tokens[prompt:]],
                finish_reason=reason,
                cached_tokens=seq.cached_tokens or {"device": 0, "host": 0},
                preemptions=seq.preemptions,
            )
        )

    def on_reset(self) -> None:
        """The cache was reset: requests whose loads are under way start over, and nobody waits for a twin."""
        for seq in self._running:
            seq.branches.clear()
        for seq in [s for s in self._running if s.state is State.LOADING]:
            self._back_to_waiting(seq, "the cache was reset while its prefix was being loaded")


def _order(seq: Tracked) -> tuple[int, int]:
    return seq.order
