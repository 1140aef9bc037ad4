"""Drives a cache as an engine would and looks over its shoulder: audit, views and text are checked at every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import inside
import numpy as np
import numpy.typing as npt
from breadth import AUDITED_THEN, AUDITED_WHOLLY

from kvtier import FinishedRequest, GroupSpec, KVCache, RecurrentState, Request, Scheduler, Step
from kvtier.audit.run import AuditLevel
from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.pools.block_pool import BlockPools, Col, Mark
from kvtier.testing import CanaryEngine, SimulatedEngine, expected_tokens

STORE, LOAD = Direction.STORE, Direction.LOAD


class HeldEngine(CopyEngine):
    """A copy engine that ends transfers when the test says so, and orders writers behind copies as a stream does.

    ``hold``: directions that wait for ``end``; the others end at the next poll. With ``can_order`` False a writer
    cannot be ordered behind a copy: the clock runs to the deadline instead, as with a copy that never ends. With
    ``breaks`` it raises instead. Without ``has_bytes`` there is nothing to copy.
    """

    def __init__(
        self,
        memory: TierMemory,
        hold: Iterable[Direction] = (STORE, LOAD),
        can_order: bool = True,
        breaks: bool = False,
        has_bytes: bool = True,
    ) -> None:
        super().__init__(memory)
        self.has_bytes = has_bytes
        self.hold = set(hold)
        self.can_order = can_order
        self.breaks = breaks
        self.live: dict[int, Transfer] = {}
        self.submitted: list[Transfer] = []
        self.ordered: list[int] = []  # tickets that a writer waited for
        self.clock_s = 0.0
        self._moved: set[int] = set()
        self.ended: list[Outcome] = []

    def submit(self, transfer: Transfer) -> None:
        self.live[transfer.ticket] = transfer
        self.submitted.append(transfer)
        if transfer.direction not in self.hold:
            self.end(transfer.ticket)

    def end(self, *tickets: int, error: str = "", bad: Sequence[int] | None = None, flip: bool = False) -> None:
        """Ends these transfers (all that are under way if none is named), well or with ``error``.

        ``bad``: positions of the blocks that did not arrive; without it none did. ``flip``: a bit of a load's first
        block flips on the way.
        """
        for ticket in tickets or tuple(self.live):
            transfer, wrong = self.live.pop(ticket), np.empty(0, np.int64)
            if not error:
                wrong = self._move(transfer)
                if flip and self.has_bytes:
                    self.memory.flip_device_bit(transfer, 0)
                    wrong = self.memory.check(transfer)
            elif bad is not None and self.has_bytes and ticket not in self._moved:
                changed = self.memory.copy_some(transfer, ~np.isin(np.arange(len(transfer.groups)), bad))
                bad = [*bad, *changed.tolist()]  # they arrived, and are not what was stored
            chosen = None if bad is None else np.array(bad, np.int64)
            self.ended.append(Outcome(ticket, error, chosen) if error else Outcome.of_check(transfer, wrong))

    def release(self) -> None:
        """Ends everything under way, and whatever comes from now on at the next poll."""
        self.hold = set()
        self.end()

    def _move(self, transfer: Transfer) -> npt.NDArray[np.int64]:
        if not self.has_bytes or transfer.ticket in self._moved:
            return np.empty(0, np.int64)
        self._moved.add(transfer.ticket)
        return self.memory.copy(transfer)

    def poll(self) -> Sequence[Outcome]:
        ended, self.ended = self.ended, []
        return ended

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        self.ordered += tickets
        if self.breaks:
            raise RuntimeError("cudaStreamWaitEvent")
        if not self.can_order:
            self.clock_s += timeout_s
            return False
        for ticket in tickets:  # the bytes are read before the writer runs; the end is reported later
            if ticket in self.live:
                self._move(self.live[ticket])
        return True

    def wait(self, timeout_s: float) -> bool:
        return bool(self.ended)

    def wake(self) -> None:
        pass

    def now(self) -> float:
        return self.clock_s

    def close(self, timeout_s: float) -> bool:
        self.live.clear()
        return True


def engine_of(cache: KVCache) -> Any:
    """The cache's copy engine."""
    return cache.copy_engine


def is_zero(cache: KVCache, groups: Any, blocks: Any) -> npt.NDArray[np.bool_]:
    """bool [n]: which of these device blocks hold zeros only."""
    arena = inside.arena(cache)
    at, sizes = inside.spans(arena, groups, blocks)
    return np.array([not arena.bytes[a : a + n].any() for a, n in zip(at.tolist(), sizes.tolist(), strict=True)], bool)


class Serving:
    """A cache, its scheduler and the canary engine. Every step is audited, every view checked, every text compared.

    No load leaves what it was refused for.
    """

    def __init__(
        self, cache: KVCache, max_batched_tokens: int = 64, max_running: int = 8, audit_every: int = 1
    ) -> None:
        self.cache = cache
        self.spec = cache.spec
        self.scheduler = Scheduler(cache, max_batched_tokens=max_batched_tokens, max_running=max_running)
        self.canary = CanaryEngine(cache) if cache.device == "cpu" else None
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, FinishedRequest] = {}
        self.steps = 0
        self.audit_every = audit_every
        if self.canary is not None:
            inside.at_end_of_loads(cache, self._check_wiped)

    def _check_wiped(self, load: Transfer, good: npt.NDArray[np.bool_]) -> None:
        assert is_zero(self.cache, load.groups[~good], load.device[~good]).all(), f"load {load.ticket} left something"

    @property
    def engine(self) -> Any:
        return engine_of(self.cache)

    def add(self, request_id: str, prompt: Sequence[int], max_new_tokens: int = 1, **options: Any) -> Request:
        request = Request(request_id, prompt, max_new_tokens, **options)
        if self.canary is not None:
            self.canary.add(request)
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    def begin(self) -> tuple[Step, npt.NDArray[np.int64]]:
        """schedule and forward: the step and its sampled ids."""
        step = self.scheduler.schedule()
        self.steps += 1
        self._audit_step()
        check_step(self.cache, step)
        if self.canary is not None and step.num_tokens:
            ids = self.canary.forward(step)
        else:
            ids = np.zeros(len(step.sample_rows), np.int64)
        return step, ids

    def end(self, step: Step, ids: npt.NDArray[np.int64]) -> list[FinishedRequest]:
        """commit; texts of what has ended are compared with the oracle's."""
        finished = self.scheduler.commit(step, ids)
        self._audit_step()
        for done in finished:
            assert done.request_id not in self.finished, "a request is reported twice"
            self.finished[done.request_id] = done
            if self.canary is not None:
                check_text(self.cache, self.requests[done.request_id], done)
        return finished

    def cancelled(self) -> Step:
        """A step whose forward fails after it has written everything: schedule and cancel."""
        step = self.scheduler.schedule()
        self.steps += 1
        check_step(self.cache, step)
        if self.canary is not None:
            self.canary.write(step)
        self.scheduler.cancel(step)
        self._audit_step()
        return step

    def audit(self) -> None:
        assert self.cache.audit() == []

    def _audit_step(self) -> None:
        """Unless the scheduler has just done so; ``make test`` does it less often in long runs, as `conftest.py`."""
        every = max(self.audit_every, 1 if self.steps <= AUDITED_WHOLLY else AUDITED_THEN)
        if self.cache.checks.level is not AuditLevel.FULL and self.steps % every == 0:
            self.audit()

    def step(self) -> Step:
        step, ids = self.begin()
        self.end(step, ids)
        return step

    def run(self, limit: int = 2000) -> dict[str, FinishedRequest]:
        """Steps until nothing is left to do; fails after ``limit`` steps."""
        start = self.steps
        while self.scheduler.has_work():
            assert self.steps - start < limit, f"no end after {limit} steps: {self.scheduler.why_waiting()}"
            if not self.step().num_tokens:
                self.scheduler.wait(0.05)
        for _ in range(40):  # copies that were given up are not work, but their late ends are news
            if not self.cache.stats().transfers.live:  # only a step could change it
                break
            if isinstance(self.engine, SimulatedEngine):
                self.engine.end_lost()
            self.step()
        self.check_quiet()
        return self.finished

    def steps_until(self, condition: Any, limit: int = 200) -> None:
        """Steps until ``condition()`` holds."""
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError("the condition never came true")

    def serve(self, request_id: str, prompt: Sequence[int], max_new_tokens: int = 1, **options: Any) -> FinishedRequest:
        """One request, alone."""
        self.add(request_id, prompt, max_new_tokens, **options)
        return self.run()[request_id]

    def check_quiet(self) -> None:
        """I27: nothing is held once all work is done."""
        stats = self.cache.stats()
        for name, pool in (*stats.device.items(), *stats.host.items()):
            assert (pool.held, pool.fenced) == (0, 0), (name, pool)
            assert pool.empty + pool.cached + pool.quarantined + pool.lent == pool.usable, (name, pool)
        assert sum(pool.quarantined for pool in stats.device.values()) == 0
        assert sum(pool.quarantined for pool in stats.host.values()) <= stats.transfers.corrupt_blocks
        assert stats.transfers.live == 0
        if isinstance(self.engine, SimulatedEngine):
            assert self.engine.missing_edges == []

    def known(self, request_id: str) -> int:
        """Tokens that a running request has, prompt and text so far; 0 if it does not run."""
        rows = [s.row for s in self.scheduler.running if s.request.request_id == request_id]
        return int(inside.coordinator(self.cache).tables.arrays.total[rows[0]]) if rows else 0

    def is_running(self, request_id: str) -> bool:
        return self.known(request_id) > 0


def scheduled(step: Step) -> dict[str, int]:
    """Tokens that each request computes in this step."""
    return dict(zip(step.request_ids, np.diff(step.query_start).tolist(), strict=True))


# --- oracles: plain Python, written from the contract ---------------------------------------------


def sees(group: GroupSpec, i: int, j: int) -> bool:
    """Whether token i sees token j, word for word from the contract."""
    if j > i:
        return False
    kind, attention = type(group.attention).__name__, group.attention
    if kind == "SlidingWindow":
        return i - attention.window_tokens < j
    if kind == "ChunkedLocal":
        return j // attention.chunk_tokens == i // attention.chunk_tokens
    return True


def visible_blocks(group: GroupSpec, start: int, end: int) -> set[int]:
    """Logical blocks that tokens [start, end) see or fill."""
    if start >= end:
        return set()
    first = next(j for j in range(end) if sees(group, start, j))
    return set(range(first // group.block_tokens, (end - 1) // group.block_tokens + 1))


def check_text(cache: KVCache, request: Request, done: FinishedRequest) -> None:
    """The text is what a model without a cache gives, or its beginning if the request was ended early."""
    prompt, shapes = list(request.prompt_token_ids), {"adapter": request.adapter, "extra_keys": request.extra_keys}
    if done.finish_reason in ("stop", "length") and len(done.token_ids):
        expected = expected_tokens(cache.spec, prompt, request.max_new_tokens, request.eos_token_ids, **shapes)
        ended_by_engine = done.finish_reason == "stop" and done.token_ids[-1] not in request.eos_token_ids
        expected = expected[: len(done.token_ids)] if ended_by_engine else expected
    else:
        expected = expected_tokens(cache.spec, prompt, len(done.token_ids), **shapes) if done.token_ids else []
    assert done.token_ids == expected, f"{done.request_id}: wrong text"
    assert sum(done.cached_tokens.values()) < len(prompt)
    assert min(done.cached_tokens.values()) >= 0


def check_step(cache: KVCache, step: Step) -> None:
    """I15, I16: all index arrays of a step against each other and against the masks."""
    rows, starts = len(step.request_ids), step.positions[step.query_start[:-1]] if step.num_tokens else np.empty(0, int)
    assert len(step.query_start) == rows + 1
    assert len(step.seq_lens) == rows
    assert int(step.query_start[-1]) == step.num_tokens == len(step.token_ids) == len(step.positions)
    counts = np.diff(step.query_start)
    assert np.all(counts > 0), "an entry without a token"
    assert np.array_equal(starts + counts, step.seq_lens)
    for r in range(rows):
        at = slice(int(step.query_start[r]), int(step.query_start[r + 1]))
        assert np.array_equal(step.positions[at], np.arange(starts[r], step.seq_lens[r]))
    for g, group in enumerate(cache.spec.groups):
        check = _check_states if isinstance(group.attention, RecurrentState) else _check_view
        check(cache, step, g, group, starts)


def _check_view(cache: KVCache, step: Step, g: int, group: GroupSpec, starts: npt.NDArray[np.int64]) -> None:
    view, bt, pools = step.group(group.name), group.block_tokens, inside.coordinator(cache).pools
    m, base = group.entry_tokens, int(pools.arrays.meta[g, Col.BASE])
    table, slots = view.block_table, view.slot_mapping if m == 1 else view.entries().slot
    last = step.positions % m == m - 1
    assert table.dtype == np.int32
    assert slots.dtype == np.int64
    assert table.shape[0] == len(step.request_ids)
    assert len(slots) == np.count_nonzero(last)
    if m > 1:
        assert np.array_equal(view.entries().token, np.flatnonzero(last))
    for r in range(len(step.request_ids)):
        start, end = int(starts[r]), int(step.seq_lens[r])
        first = group.attention.first_visible(start) // bt
        held = set(range(first, -(-end // bt)))
        assert held == set(np.flatnonzero(table[r]).tolist()), (
            f"{group.name} entry {r}: null where it must not be, or a stale id"
        )
        at = slice(int(step.query_start[r]), int(step.query_start[r + 1]))
        positions = step.positions[at][last[at]]
        own = slice(np.count_nonzero(last[: at.start]), np.count_nonzero(last[: at.stop]))
        block = table[r, positions // bt].astype(np.int64)
        assert np.array_equal(slots[own], block * (bt // m) + positions % bt // m)
    ids = table[table != 0]
    assert np.all((ids > 0) & (ids <= pools.usable[g]))
    assert np.all(pools.arrays.refs[base + ids] > 0), "a view names a block that nobody holds"
    written = np.unique(slots // (bt // m))
    assert len(np.unique(slots)) == len(slots), "two tokens go to one slot"
    assert np.all(pools.arrays.refs[base + written] == 1), "a block with several owners is written"
    assert np.all(pools.arrays.mark[base + written] == Mark.NONE), "a findable block is written"
    if m == 1:
        _check_paged(step, group, table, starts)


def _check_states(cache: KVCache, step: Step, g: int, group: GroupSpec, starts: npt.NDArray[np.int64]) -> None:
    """Each entry goes on from the state before its first token, and its last segment ends it; others end at
    boundaries."""
    got, bt, pools = step.group(group.name).states(), group.block_tokens, inside.coordinator(cache).pools
    entry, base = got.entry.tolist(), int(pools.arrays.meta[g, Col.BASE])
    assert [array.dtype.name for array in got] == ["int32", "int32", "int64", "int32"]
    assert np.array_equal(got.source > 0, starts > 0), "a state is lacking, or goes on from nothing"
    assert sorted(set(entry)) == list(range(len(starts)))
    for r in range(len(starts)):
        ends = got.end[got.entry == r].tolist()
        assert ends == sorted(set(ends)) and ends[-1] == step.seq_lens[r]
        assert all(n % bt == 0 and starts[r] < n for n in ends[:-1])
    assert entry == sorted(entry)
    assert len(set(got.target.tolist())) == len(entry), "two states go to one block"
    held = np.unique(np.concatenate([got.source[got.source > 0], got.target]))
    assert np.all((held > 0) & (held <= pools.usable[g]))
    assert np.all(pools.arrays.refs[base + held] > 0), "a view names a block that nobody holds"
    assert np.all(pools.arrays.refs[base + got.target] == 1), "a block with several owners is written"
    assert np.all(pools.arrays.mark[base + got.target] == Mark.NONE), "a findable block is written"


def _check_paged(step: Step, group: GroupSpec, table: npt.NDArray[np.int32], starts: npt.NDArray[np.int64]) -> None:
    """FlashInfer's form rebuilt entry by entry: one per request, or one per request and chunk."""
    bt, qo, kv, indices, last = group.block_tokens, [0], [0], [], []
    for r in range(len(starts)):
        cuts = [int(starts[r]), int(step.seq_lens[r])]
        if type(group.attention).__name__ == "ChunkedLocal":
            chunk = group.attention.chunk_tokens
            cuts = sorted({*cuts, *range(-(-cuts[0] // chunk) * chunk, cuts[1], chunk)})
        for a, b in pairwise(cuts):
            first = group.attention.first_visible(a) // bt
            pages = table[r, first : -(-b // bt)].tolist()
            indices += pages
            qo.append(qo[-1] + b - a)
            kv.append(kv[-1] + len(pages))
            last.append(b - (b - 1) // bt * bt)
    got = step.group(group.name).paged()
    for name, array, expected in zip(
        ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len"), got, (qo, kv, indices, last), strict=True
    ):
        assert array.dtype == np.int32, name
        assert array.flags.c_contiguous, name
        assert array.tolist() == expected, f"{group.name}: {name}"


# --- state ----------------------------------------------------------------------------------------


def snapshot(cache: KVCache) -> dict[str, Any]:
    """A deep copy of everything that an allocation could change."""
    coordinator, state = inside.coordinator(cache), {}
    for tier, pools in (("device", inside.pools(cache)), ("host", inside.host(cache))):
        if pools is not None:
            state |= {f"{tier}.{name}": array.copy() for name, array in pools.arrays._asdict().items()}
    state |= {f"row.{name}": array.copy() for name, array in coordinator.tables.arrays._asdict().items()}
    state["transfers"] = [(t.ticket, t.state, t.direction) for t in inside.connector(cache).ledger.live()]
    if cache.core.driver is not None:
        roster = cache.core.driver.roster
        state["running"] = [seq.request.request_id for seq in roster.running]
        state["waiting"] = [seq.request.request_id for seq in roster.waiting]
    return state


def assert_same(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Two snapshots are equal, array by array."""
    assert before.keys() == after.keys()
    for name, value in before.items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, after[name]), f"{name} has changed"
        else:
            assert value == after[name], f"{name} has changed"


def conserved(pools: BlockPools) -> bool:
    """I1 over the counters."""
    m = pools.arrays.meta
    return bool(
        np.all(m[:, [Col.EMPTY, Col.CACHED, Col.FENCED, Col.QUARANTINED]].sum(1) + pools.held == m[:, Col.ROWS] - 1)
    )


def prompt(seed: int, n: int) -> list[int]:
    """``n`` tokens that no other seed begins with."""
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(0, 97, n)]
