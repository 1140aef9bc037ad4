"""What a hostile reading of the checks asked of them: each test was red when it was written."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import inside
import numpy as np
import pytest
from breadth import sized
from core.driving import prompt

from kvtier import EventKind, FullAttention, KVCache, KVEvents, Request, Scheduler, SlidingWindow
from kvtier.coordinator.admission import Admission
from kvtier.coordinator.reports import Reports
from kvtier.cpu_offload.books import TransferCounts
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.ends import Ends
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.testing import CanaryEngine, Faults, SimulatedDevice, canary_spec
from model.walk import SHORT_WALKS, fails, replay, short_walk
from model.world import Config, Counts, World


def test_a_store_that_never_ends_does_not_hang_the_compute_stream():
    """README: "a copy that hangs is given up at its deadline"; LIVENESS.md: nothing is assumed of the copy engine."""
    device = SimulatedDevice(0, Faults(lose=1.0), forward_s=1.0)
    spec = canary_spec({"full": (FullAttention(), 2)}, num_layers=1)
    cache = KVCache(
        spec, device_blocks={"full": 8}, host_blocks={"full": 16}, deadline_s=50.0, copy_engine=device.engine
    )
    scheduler = Scheduler(cache, 16, 1)
    canary = CanaryEngine(cache, device=device)
    canary.run(scheduler, [Request(f"r{i}", prompt(i, 9), 1) for i in range(3)])
    cache.close()
    assert device.now() < 1000.0, f"a forward pass waited until {device.now():,.0f} s for a copy given up at 50 s"


@pytest.mark.parametrize("shared", [False, True])
def test_a_simulated_device_that_a_cache_does_not_know_is_refused_where_blocks_move(shared):
    """A forward that has not run yet would read where its blocks were (found by the soak, seed 20261121)."""
    spec = canary_spec({"full": (FullAttention(), 2), "near": (SlidingWindow(4), 2)}, num_layers={"full": 1, "near": 2})
    memory = {"device_bytes": 100_000} if shared else {"device_blocks": {"full": 9, "near": 9}}
    with KVCache(spec, key_secret=b"tests", **memory) as cache:
        assert cache.core.coordinator.pools.shared is shared
        if not shared:
            CanaryEngine(cache, device=SimulatedDevice(0))
            return
        with pytest.raises(ValueError, match="host tier"):
            CanaryEngine(cache, device=SimulatedDevice(0))


class Raw:
    """A stream runtime that, like a GPU, keeps no Python object alive for what it was given, and is still busy."""

    def compute_stream(self):
        return None

    def new_stream(self, name):
        return None

    def record(self, stream):
        return object()

    def wait(self, stream, event):
        pass

    def is_done(self, event):
        return False

    def copy(self, stream, memory, transfer):
        return lambda: None

    def sleep(self, events, timeout_s):
        return False

    def wake(self):
        pass

    def hurry(self, on):
        pass

    def now(self):
        return 0.0

    def close(self, timeout_s):
        return False


@pytest.mark.parametrize("closed", [True, False])
def test_memory_outlives_copies_that_did_not_end(closed):
    """LIVENESS.md on close: "then the memory is left to whoever still writes it"."""
    spec = canary_spec({"full": (FullAttention(), 2)}, num_layers=1)
    cache = KVCache(
        spec, device_blocks={"full": 8}, host_blocks={"full": 8}, copy_engine=lambda m: StreamsEngine(m, Raw())
    )
    scheduler, canary = Scheduler(cache, 16, 1), CanaryEngine(cache)
    request = Request("r", prompt(0, 9), 1)
    scheduler.add(request)
    canary.add(request)
    step = scheduler.schedule()
    scheduler.commit(step, canary.forward(step))
    assert cache.stats().transfers.live, "a copy is under way"
    storages = [weakref.ref(arena.storage) for arena in cache.arenas]
    if closed:
        cache.close()
    del cache, scheduler, canary, step
    gc.collect()
    assert all(storage() is not None for storage in storages), "freed under a copy that still runs"


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_submit_that_fails_half_way_leaves_its_blocks_alone(direction, monkeypatch):
    """A runtime that raises after the stream was given the copy: bytes move, so the blocks must not be handed out."""
    device = SimulatedDevice(0, Faults(max_delay_s=0.0), look_s=0.0, forward_s=0.0)
    spec = canary_spec({"full": (FullAttention(), 2)}, num_layers=1)
    cache = KVCache(
        spec, device_blocks={"full": 8}, host_blocks={"full": 16}, deadline_s=50.0, copy_engine=device.engine
    )
    scheduler, canary = Scheduler(cache, 16, 1), CanaryEngine(cache, device=device)
    if direction == "load":
        request = Request("r", prompt(0, 9), 1)
        scheduler.add(request)
        canary.add(request)
        while scheduler.has_work():
            step = scheduler.schedule()
            scheduler.commit(step, canary.forward(step) if step.num_tokens else [])
            device.advance(1.0)
        inside.pools(cache).forget_all()
    copy = SimulatedDevice.copy
    inside.set_faults(device, Faults(max_delay_s=30.0))

    def breaks(self, stream, memory, transfer):
        outcome = copy(self, stream, memory, transfer)
        if transfer.direction.value == direction:
            raise RuntimeError("the second batched call was refused")
        return outcome

    monkeypatch.setattr(SimulatedDevice, "copy", breaks)
    for i in range(4):
        request = Request(f"x{i}", prompt(0 if direction == "load" else i, 9), 1)
        scheduler.add(request)
        canary.add(request)
        for _ in range(6):
            step = scheduler.schedule()
            scheduler.commit(step, canary.forward(step) if step.num_tokens else [])
    edges = device.missing_edges
    cache.close()
    assert edges == []


def test_audit_level_1_sees_a_counter_that_is_off_by_one(monkeypatch, make_cache):
    """KVTIER_AUDIT=1: "counters against each other"."""
    from kvtier import InvariantBroken
    from kvtier.pools.pool_state import Col

    monkeypatch.setenv("KVTIER_AUDIT", "1")
    cache = make_cache(blocks=8)
    scheduler = Scheduler(cache)
    scheduler.add(Request("A", [1, 2, 3, 4, 5], 4))
    step = scheduler.schedule()
    inside.pools(cache).arrays.meta[0, Col.EMPTY] += 1
    try:
        with pytest.raises(InvariantBroken):
            scheduler.commit(step, np.array([7]))
    finally:
        inside.pools(cache).arrays.meta[0, Col.EMPTY] -= 1
        cache.close()


ENDS = {
    "capacity": lambda scheduler: inside.finish(scheduler, scheduler.roster.running[-1], "capacity"),
    "stop": lambda scheduler: inside.finish(scheduler, scheduler.roster.running[0], "stop"),
    "abort": lambda scheduler: inside.finish(scheduler, scheduler.roster.running[-1], "abort"),
}


@pytest.mark.parametrize("reason", ENDS)
def test_the_world_sees_requests_that_end_for_no_reason(monkeypatch, reason):
    """A scheduler that ends a request after every seventh forward, although nobody asked and there is room."""
    end_those, count = Scheduler._end_those, [0]

    def ends(self, asked):
        end_those(self, asked)
        count[0] += 1
        if count[0] % 7 == 0 and self.roster.running:
            ENDS[reason](self)

    monkeypatch.setattr(Scheduler, "_end_those", ends)
    assert any(fails(*short_walk(seed)) for seed in SHORT_WALKS[:6]), "nothing noticed"
    assert count[0] >= 7


@pytest.mark.usefixtures("unaudited")
def test_the_walks_see_loads_fail_and_arrive_damaged_and_stores_wait(monkeypatch):
    """What the walks of test_machine.py are there to try must happen in them; they are audited there."""
    seen, counts = Counter(), Counts()
    ended, reset = Ends.load, Connector.reset

    def end_load(self, transfer, good, outcome, is_current):
        seen["failed"] += bool(outcome.error) and not outcome.corrupt
        seen["corrupt"] += outcome.corrupt
        return ended(self, transfer, good, outcome, is_current)

    def forget(self):
        seen["planned, and then reset"] += bool(self.books.planned)
        reset(self)

    monkeypatch.setattr(Ends, "load", end_load)
    monkeypatch.setattr(Connector, "reset", forget)
    monkeypatch.setattr(World, "_check", lambda self, step=False: None)
    wanted = {
        "failed": sized(1, 5),
        "corrupt": sized(1, 2),
        "planned, and then reset": 1,
        "steps with stores that wait": sized(50, 200),
        "host blocks damaged": sized(2, 10),
        "host blocks evicted": sized(100, 500),
        "copies given up": sized(1, 10),
    }
    for seed in SHORT_WALKS:
        replay(*short_walk(seed), counts)
        if all((seen + counts.seen)[what] >= often for what, often in wanted.items()):
            return
    pytest.fail(f"of {wanted} there were {seen + counts.seen}")


def test_the_walks_see_that_who_waits_for_no_room_is_left_waiting(monkeypatch):
    """A copy that is overdue keeps everybody waiting, though there is room."""
    waits = Admission._waits

    def waits_for_ever(self, seq):
        stands_still = self._connector.ledger.num_live > 0 and self._connector.ledger.num_progressing == 0
        return stands_still or waits(self, seq)

    config = Config({"full": ("full", 0, 2, 12, 20)}, streams=False, deadline_s=20.0)
    rules = [("submit", (0, 8, 0, 1)), *[("schedule", ()), ("commit", ())] * 3, ("pass_time", (60.0,))]
    rules += [("schedule", ()), ("commit", ()), ("submit", (1, 4, 0, 1)), ("schedule", ())]
    replay(config, rules)
    monkeypatch.setattr(Admission, "_waits", waits_for_ever)
    with pytest.raises(AssertionError, match="the first could run, and does not"):
        replay(config, rules)


def counts_anew(monkeypatch):
    """A reset forgets the counters as well."""
    reset = Connector.reset
    monkeypatch.setattr(Connector, "reset", lambda self: (reset(self), setattr(self, "counts", TransferCounts())))


def counts_twice(monkeypatch):
    """Prompts that are computed count twice."""
    add = Reports.add

    def added(self, seq, reason):
        add(self, seq, reason)
        if seq.cached_tokens is not None:
            self.prompt_tokens["computed"] += len(seq.request.prompt_token_ids)

    monkeypatch.setattr(Reports, "add", added)


def tells_only_what_has_come(monkeypatch):
    """Nobody hears that blocks have gone."""
    poll = KVEvents.poll
    monkeypatch.setattr(KVEvents, "poll", lambda self: [e for e in poll(self) if e.kind is EventKind.STORED])


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (counts_anew, "counters fell"),
        (counts_twice, "prompt tokens.computed"),
        (tells_only_what_has_come, "something else"),
    ],
)
def test_the_world_reads_counters_and_hears_events(monkeypatch, breaks, words):
    config = Config({"full": ("full", 0, 2, 8, 20), "window": ("window", 3, 2, 6, 20)}, streams=False)
    rules = [("submit", (0, 9, 0, 2)), *[("schedule", ()), ("commit", ())] * 4, ("end_copy", (0,)), ("drain", ())]
    rules += [("reset", ()), ("drain", ())]
    replay(config, rules)
    breaks(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        replay(config, rules)
