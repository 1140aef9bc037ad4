"""Copies beside an asynchronous compute stream: every order is asked for, and the simulated device sees one removed."""

from __future__ import annotations

import inside
import numpy as np
import pytest
from breadth import sample
from core.driving import prompt

from kvtier import ChunkedLocal, ConfigError, FullAttention, KVCache, Request, Scheduler, SlidingWindow
from kvtier.audit.run import AuditLevel
from kvtier.coordinator.scheduler import Scheduler as SchedulerClass
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.transfer import Direction
from kvtier.pools.block_pool import BlockPools, Mark
from kvtier.testing import CanaryEngine, Faults, SimulatedDevice, canary_spec, expected_tokens
from kvtier.testing.device import Event
from kvtier.testing.order import STREAMS

GROUPS = {"full": (FullAttention(), 2), "win": (SlidingWindow(5), 2), "chunk": (ChunkedLocal(8), 4)}


class Bench:
    """A cache on a simulated device whose forwards are slow, and small pools that both tiers fight for."""

    def __init__(
        self,
        seed: int,
        store: str = "eager",
        faults: Faults | None = None,
        look_s: float = 0.2,
        lag_s: float = 0.0,
        **options,
    ) -> None:
        self.device = SimulatedDevice(seed, faults or Faults(max_delay_s=6.0), look_s=look_s, lag_s=lag_s)
        self.spec = canary_spec(GROUPS, num_layers=1)
        self.cache = KVCache(
            self.spec,
            device_blocks={"full": 14, "win": 10, "chunk": 6},
            host_blocks={"full": 20, "win": 12, "chunk": 8},
            store=store,
            deadline_s=500.0,
            key_secret=b"streams",
            copy_engine=self.device.engine,
            **options,
        )
        self.scheduler = Scheduler(self.cache, max_batched_tokens=6, max_running=4)
        self.canary = CanaryEngine(self.cache, device=self.device)
        self.wrong: list[str] = []

    def serve(self, count: int = 24) -> None:
        """Requests over three stems, all at once; texts are compared, missing orders collected."""
        requests = [
            Request(f"r{i}", [*prompt(i % 3, 4 + 5 * (i % 4)), i % 7], max_new_tokens=1 + i % 4) for i in range(count)
        ]
        done = self.canary.run(self.scheduler, requests)
        for request in requests:
            expected = expected_tokens(self.spec, request.prompt_token_ids, request.max_new_tokens)
            if done[request.request_id].token_ids != expected:
                self.wrong.append(request.request_id)


def serve(seed: int, **options) -> Bench:
    """A bench that has served, and closed its cache."""
    bench = Bench(seed, **options)
    try:
        bench.serve()
        if not bench.device.missing_edges:
            assert bench.cache.audit() == []
    finally:
        bench.cache.close()
    return bench


@pytest.mark.parametrize(("store", "lag_s"), [(store, lag_s) for store in ("eager", "lazy") for lag_s in (0.0, 9.0)])
@pytest.mark.parametrize("seed", sample(range(6), [0]))
def test_no_order_is_missing_and_every_text_is_right(seed, store, lag_s):
    """``lag_s``: the streams get their copies late, from a thread of their own."""
    bench = serve(seed, store=store, verify="full", faults=Faults(0.05, 0.05, 0.05, 0.0, 6.0), lag_s=lag_s)
    assert bench.device.missing_edges == []
    assert bench.wrong == []


def without_wait(direction: Direction):
    """``StreamsEngine._give`` that forgets to put one direction behind the compute stream."""
    give, nothing = StreamsEngine._give, Event(np.zeros(STREAMS, np.int64), done=True)

    def given(self, copy, mark):
        give(self, copy, nothing if copy.transfer.direction is direction else mark)

    return given


def found(monkeypatch, owner, name, replacement, wanted: set[str], seeds: int = 8, **options) -> set[str]:
    """The edges that are reported missing when one function is replaced; seeds are tried up to one that is wanted."""
    edges: set[str] = set()
    monkeypatch.setenv("KVTIER_AUDIT", "0")  # the device alone must see it
    monkeypatch.setattr(owner, name, replacement)
    for seed in range(seeds):
        bench = Bench(seed, **options)
        try:
            bench.serve()
        except Exception as problem:
            edges.add(type(problem).__name__)
        finally:
            bench.cache.close()
        edges |= {text.split(":")[0] for text in bench.device.missing_edges}
        if edges & wanted:
            break
    return edges


@pytest.mark.parametrize("lag_s", sample([0.0, 4.0], [0.0]))
def test_c1_store_waits_for_the_writing_forward(monkeypatch, lag_s):
    edges = found(monkeypatch, StreamsEngine, "_give", without_wait(Direction.STORE), {"edge 1"}, lag_s=lag_s)
    assert "edge 1" in edges


@pytest.mark.parametrize("waits", [True, False])
def test_c4_load_waits_for_the_last_forward_of_an_ended_request(monkeypatch, waits):
    """A request is aborted while its chunk is on the compute stream; a load gets its blocks at the next schedule."""
    bench = Bench(0, faults=Faults(max_delay_s=0.0))
    bench.serve(1)  # prompt 0 is in both tiers
    inside.pools(bench.cache).forget_all()
    if not waits:
        monkeypatch.setattr(StreamsEngine, "_give", without_wait(Direction.LOAD))
    inside.set_forward_s(bench.device, 60.0)
    long, again = Request("long", prompt(5, 27), 1), Request("again", [*prompt(0, 4), 0], 1)
    for request in (long, again):
        bench.canary.add(request)
    bench.scheduler.add(long)
    for _ in range(4):
        step = bench.scheduler.schedule()
        assert len(bench.canary.forward(step)) == 0, "nothing to wait for"
        last = step is not None and int(step.seq_lens[0]) >= 24
        if last:
            bench.scheduler.abort("long")
            bench.scheduler.add(again)
        bench.scheduler.commit(step, [])
    while bench.scheduler.has_work():
        step = bench.scheduler.schedule()
        bench.scheduler.commit(step, bench.canary.forward(step) if step.num_tokens else [])
    assert bench.cache.stats().transfers.loaded_blocks > 0
    bench.cache.close()
    assert any("edge 2" in text for text in bench.device.missing_edges) is not waits


@pytest.mark.parametrize("waits", [True, False])
def test_c11_checksum_waits_for_the_writing_forward(monkeypatch, waits):
    """verify="full": a checksum of what is not written yet would bless wrong bytes for ever."""
    if not waits:
        monkeypatch.setattr(StreamsEngine, "_give", without_wait(Direction.STORE))
    unwritten, edges = 0, list[str]()
    for seed in range(6):
        bench = Bench(seed, faults=Faults(max_delay_s=0.0), verify="full")
        request = Request("long", prompt(0, 12), max_new_tokens=1)
        bench.scheduler.add(request)
        bench.canary.add(request)
        while bench.scheduler.has_work():
            step = bench.scheduler.schedule()
            bench.scheduler.commit(step, bench.canary.forward(step) if step.num_tokens else [])
        pools, arena = inside.host(bench.cache), inside.host_arena(bench.cache)
        size = int(arena.block_bytes[0])
        stored = np.flatnonzero(pools.arrays.mark[: int(arena.rows[0])] == Mark.READY)
        assert len(stored) == 6
        unwritten += sum(not arena.bytes[b * size : (b + 1) * size].any() for b in stored)
        edges += bench.device.missing_edges
        bench.cache.close()
    assert bool(unwritten) is not waits, "blocks whose bytes were taken before the forward wrote them"
    assert any("edge 1" in text for text in edges) is not waits


def test_edge_3_a_request_runs_only_once_its_load_was_seen_to_end(monkeypatch):
    def settle(self):
        for seq in self.roster.loading():
            inside.coordinator(self).start_running(seq)

    assert "edge 3" in found(monkeypatch, SchedulerClass, "_settle_loads", settle, {"edge 3"})


@pytest.mark.parametrize("lag_s", sample([0.0, 4.0], [4.0]))
def test_edge_4_whoever_gets_a_block_that_a_store_reads_waits_for_it(monkeypatch, lag_s):
    edges = found(monkeypatch, StreamsEngine, "order_after", lambda *_: True, {"edge 4"}, store="lazy", lag_s=lag_s)
    assert "edge 4" in edges


def test_edge_4_a_store_that_its_stream_has_not_been_given_yet_is_waited_for(monkeypatch):
    """Nothing is recorded yet that the compute stream could wait for: it would write before the store reads."""
    order_after = StreamsEngine.order_after

    def only_given(self, tickets, timeout_s):
        given = [c.transfer.ticket for c in self._under_way.values() if c.is_given()]
        return order_after(self, [t for t in tickets if t in given], timeout_s)

    edges = found(monkeypatch, StreamsEngine, "order_after", only_given, {"edge 1", "edge 4"}, store="lazy", lag_s=9.0)
    assert edges & {"edge 1", "edge 4"}, "the store is given to its stream behind the next writer of its block"


@pytest.mark.parametrize("late", [False, True])
def test_the_compute_stream_is_marked_when_a_store_is_submitted_not_when_its_stream_gets_it(monkeypatch, late):
    """A forward launched after a store must not hold it up: it may be waiting for that very store."""
    give = StreamsEngine._give

    def mark_late(self, copy, mark):
        give(self, copy, self.runtime.record(self.runtime.compute_stream()))

    if late:
        monkeypatch.setattr(StreamsEngine, "_give", mark_late)
    bench = Bench(0, faults=Faults(max_delay_s=0.0), lag_s=5.0)
    hanging(bench, "stored", prompt(0, 4), steps=1)
    [store] = inside.connector(bench.cache).ledger.live()
    assert store.direction is Direction.STORE
    inside.set_forward_s(bench.device, 1e4)
    hanging(bench, "slow", prompt(1, 20), steps=1)  # a chunk of prompt: nobody waits for it
    bench.device.advance(50.0)
    assert (store in [copy.transfer for copy in bench.device.under_way()]) is late
    bench.cache.close()


def test_a_store_whose_submission_hangs_is_given_up_at_its_deadline():
    """The thread that should give it to its stream is stuck: nobody waits longer than for a copy that hangs."""
    bench = Bench(0, lag_s=1e9)
    for i in range(3):
        hanging(bench, f"r{i}", prompt(i, 20), steps=12)
    bench.device.advance(600.0)
    assert bench.cache.stats().transfers.live > 0
    bench.scheduler.commit(bench.scheduler.schedule(), [])
    stats = bench.cache.stats()
    assert stats.transfers.expired > 0
    assert sum(pool.quarantined for pool in stats.device.values()) > 0
    bench.cache.close()


class Queue:
    """A cache whose stores take as long as ``store_s`` tells, one after the other, and short forwards."""

    def __init__(self, monkeypatch, store_s, device_blocks: int, deadline_s: float = 30.0) -> None:
        self.device = SimulatedDevice(1, Faults(max_delay_s=0.0), look_s=1e-4, forward_s=0.01)
        copy = SimulatedDevice.copy

        def timed(device, stream, memory, transfer):
            outcome = copy(device, stream, memory, transfer)
            stream.queue[-1].seconds = store_s(transfer)
            return outcome

        monkeypatch.setattr(SimulatedDevice, "copy", timed)
        self.cache = KVCache(
            canary_spec({"full": (FullAttention(), 4)}),
            device_blocks={"full": device_blocks},
            host_blocks={"full": 256},
            copy_engine=self.device.engine,
            deadline_s=deadline_s,
        )
        self.scheduler = Scheduler(self.cache)
        self.canary = CanaryEngine(self.cache, device=self.device)
        self.served = 0

    def serve(self, pause_s: float = 0.0) -> tuple[float, float, str]:
        """Serves a prompt of three blocks; the seconds that its longest ``schedule`` and forward took, and its end."""
        request = Request(f"{self.served}", [100 * self.served + i for i in range(12)], 1)
        self.served += 1
        self.canary.add(request)
        self.scheduler.add(request)
        planning_s, forward_s, done = 0.0, 0.0, []
        for _ in range(100):
            begun_s = self.device.now()
            step = self.scheduler.schedule()
            planned_s = self.device.now()
            ids = self.canary.forward(step) if step.num_tokens else []
            planning_s = max(planning_s, planned_s - begun_s)
            forward_s = max(forward_s, self.device.now() - planned_s)
            done += self.scheduler.commit(step, ids)
            if done:
                break
            self.device.advance(pause_s)
        return planning_s, forward_s, done[0].finish_reason


@pytest.mark.parametrize("pause_s", [29.5, 31.0])
def test_no_forward_is_put_behind_a_store_that_is_behind_one_that_hangs(monkeypatch, pause_s):
    """Store 1 will soon be overdue, or is; the stores behind it are young, and will not end either."""
    queue = Queue(monkeypatch, lambda transfer: 1e4 if transfer.ticket == 1 else 0.001, device_blocks=16)
    queue.serve()
    queue.device.advance(pause_s)
    for _ in range(7):
        planning_s, forward_s, reason = queue.serve()
        assert planning_s <= 31.0, "longer than to a deadline"
        assert forward_s < 1.0
        assert reason == "length" or pause_s < 30.0, "what stores read that were under way is out of circulation"
    assert queue.device.missing_edges == []
    queue.cache.close()


def test_a_queue_of_stores_that_moves_is_trusted_however_long_it_is(monkeypatch):
    """Each store takes 0.2 s. Those that have waited longer than a second for their turn do not hang."""
    queue, longest, most = Queue(monkeypatch, lambda transfer: 0.2, device_blocks=60), 0.0, 0
    for _ in range(60):
        planning_s, _, reason = queue.serve(0.02)
        assert reason == "length"
        longest, most = max(longest, planning_s), max(most, inside.connector(queue.cache).ledger.num_live)
        queue.device.advance(0.05)
    assert most * 0.2 > 2.0, "the queue is short"
    assert longest < 0.05, "the host has waited for copies"
    assert queue.device.missing_edges == []
    queue.cache.close()


@pytest.mark.parametrize("seed", sample(range(6), range(2)))
@pytest.mark.parametrize("lag_s", [0.0, 3.0])
def test_whoever_only_polls_gets_to_the_end_however_late_copies_are_given(seed, lag_s):
    """Nobody calls ``wait``: a poll finds no event to ask for yet, and time must pass all the same."""
    bench = Bench(seed, look_s=1.0, lag_s=lag_s)
    hanging(bench, "stored", prompt(0, 16), steps=60)
    assert not bench.scheduler.has_work()
    assert bench.cache.stats().transfers.stored_blocks > 0
    bench.cache.close()


def test_quiesce_waits_until_all_copies_have_ended():
    bench = Bench(2, faults=Faults(max_delay_s=3.0), lag_s=2.0)
    hanging(bench, "stored", prompt(0, 12), steps=2)
    assert inside.connector(bench.cache).ledger.live()
    assert bench.cache.copy_engine.quiesce(100.0)
    assert not bench.device.under_way()
    inside.set_faults(bench.device, Faults(lose=1.0))
    hanging(bench, "lost", prompt(1, 12), steps=2)
    assert not bench.cache.copy_engine.quiesce(100.0)
    bench.cache.close()


@pytest.mark.usefixtures("unaudited")  # it takes keys away from blocks that are being stored
def test_edge_5_a_host_key_is_findable_only_once_its_store_was_seen_to_end():
    assert not forgotten_while_its_store_is_under_way()


@pytest.mark.usefixtures("unaudited")  # the device alone must see it
def test_edge_5_a_host_key_that_is_findable_too_early_is_seen(monkeypatch):
    choose = BlockPools.take_for_stores

    def choose_and_make_ready(host, device, groups, blocks, keys):
        chosen = choose(host, device, groups, blocks, keys)
        host.make_ready(chosen[0], chosen[2])
        return chosen

    monkeypatch.setattr(BlockPools, "take_for_stores", choose_and_make_ready)
    assert forgotten_while_its_store_is_under_way()


def forgotten_while_its_store_is_under_way() -> list[str]:
    """The device forgets a prefix whose store is under way, then somebody asks for it again; what misses edge 5."""
    bench = Bench(0, faults=Faults(lose=1.0))
    for name in ("first", "again"):
        request = Request(name, prompt(0, 9), max_new_tokens=1)
        bench.canary.add(request)
        bench.scheduler.add(request)
        for _ in range(3):
            step = bench.scheduler.schedule()
            bench.scheduler.commit(step, bench.canary.forward(step) if step.num_tokens else [])
        inside.pools(bench.cache).forget_all()
    bench.cache.close()
    return [text for text in bench.device.missing_edges if "edge 5" in text]


def hanging(bench: Bench, name: str, tokens: list[int], steps: int = 3) -> None:
    """Serves a request on a bench whose copies do not end for now."""
    request = Request(name, tokens, max_new_tokens=1)
    bench.canary.add(request)
    bench.scheduler.add(request)
    for _ in range(steps):
        step = bench.scheduler.schedule()
        bench.scheduler.commit(step, bench.canary.forward(step) if step.num_tokens else [])


@pytest.mark.parametrize("edge", [6, 7])
@pytest.mark.parametrize("pinned", [True, False])
def test_edges_6_and_7_a_host_block_is_pinned_while_a_copy_reads_or_writes_it(monkeypatch, edge, pinned):
    """While a load reads a host block (6), or a store writes it (7), another store looks for room.

    Two stores are on one stream, which orders them whatever happens; the second one has a stream of its own here.
    """
    bench = Bench(0, faults=Faults(max_delay_s=0.0))
    if edge == 6:
        bench.serve(1)
        inside.pools(bench.cache).forget_all()
    inside.set_faults(bench.device, Faults(lose=1.0))
    hanging(bench, "under way", [*prompt(0, 4), 0])
    if not pinned:
        monkeypatch.setenv("KVTIER_AUDIT", "0")
        bench.cache.checks.level = AuditLevel.OFF
        wanted = Direction.LOAD if edge == 6 else Direction.STORE
        for t in [t for t in inside.connector(bench.cache).ledger.live() if t.direction is wanted]:
            inside.host(bench.cache).unpublish(t.groups, t.host)
            inside.host(bench.cache).release(t.groups, t.host)
    if edge == 7:
        inside.streams(bench.cache.copy_engine)[Direction.STORE] = bench.device.new_stream("store")
    hanging(bench, "next", prompt(3, 9))
    seen = {text.split(":")[0] for text in bench.device.missing_edges}
    audited = {violation.invariant for violation in bench.cache.audit()}
    bench.cache.close()
    assert seen == (set() if pinned else {f"edge {edge}"})
    assert ("I17" in audited) is not pinned


def test_a_forward_that_samples_nothing_is_not_waited_for():
    """Prompt chunks stay on the compute stream while their blocks are already being stored."""
    bench = Bench(3, faults=Faults(max_delay_s=0.0))
    request = Request("long", prompt(0, 20), max_new_tokens=1)
    bench.scheduler.add(request)
    bench.canary.add(request)
    step = bench.scheduler.schedule()
    before = bench.device.now()
    assert len(bench.canary.forward(step)) == 0
    assert bench.device.now() == before, "no time has passed"
    assert not inside.arena(bench.cache).bytes.any(), "nothing is written yet"
    bench.scheduler.commit(step, [])
    assert bench.cache.stats().transfers.live > 0
    while bench.scheduler.has_work():
        step = bench.scheduler.schedule()
        bench.scheduler.commit(step, bench.canary.forward(step) if step.num_tokens else [])
    assert bench.device.missing_edges == []
    bench.cache.close()


def test_a_run_repeats_exactly():
    runs = []
    for _ in range(2):
        bench = Bench(5, faults=Faults(0.1, 0.1, 0.1, 0.0, 6.0), verify="full")
        bench.serve()
        runs.append((bench.cache.stats().transfers, bench.device.now(), inside.arena(bench.cache).bytes.tobytes()))
        bench.cache.close()
    assert runs[0] == runs[1]


def test_a_load_overtakes_stores():
    """Loads have a stream of their own: one ends while an older store is still under way."""
    bench = Bench(0, faults=Faults(max_delay_s=0.0))
    bench.serve(3)
    inside.pools(bench.cache).forget_all()
    inside.set_faults(bench.device, Faults(lose=1.0))
    for name, tokens in (("store", prompt(7, 9)), ("load", prompt(0, 9))):
        request = Request(name, tokens, max_new_tokens=3)
        bench.canary.add(request)
        bench.scheduler.add(request)
        for _ in range(3):
            step = bench.scheduler.schedule()
            bench.scheduler.commit(step, bench.canary.forward(step) if step.num_tokens else [])
    kinds = {copy.transfer.direction: copy.transfer.ticket for copy in bench.device.under_way()}
    assert set(kinds) == {Direction.STORE, Direction.LOAD}
    assert kinds[Direction.STORE] < kinds[Direction.LOAD] or len(bench.device.under_way()) > 2
    bench.device.finish(kinds[Direction.LOAD], "ok")
    assert Direction.STORE in {copy.transfer.direction for copy in bench.device.under_way()}
    bench.device.end_lost()
    bench.cache.close()


@pytest.mark.parametrize("value", ["3", "on", "-1"])
def test_an_audit_level_that_does_not_exist_is_refused(monkeypatch, make_cache, value):
    monkeypatch.setenv("KVTIER_AUDIT", value)
    with pytest.raises(ConfigError, match="KVTIER_AUDIT must be 0"):
        make_cache()
