"""A host tier in two halves: a scheduler in one process, bytes in several workers."""

from __future__ import annotations

import pickle
import random

import inside
import numpy as np
import pytest
from breadth import sized

from core.outside import BLOCKS, GROUPS, ROW, SOUND, UNKIND, Outside, Sequence, content
from kvtier import Fragment, OutsideGroup
from kvtier.cpu_offload.engines import Outcome
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.host_tier.orders import Copy, End, Orders, RelayEngine, Report
from kvtier.host_tier.plan import HostPlan
from kvtier.host_tier.scheduler import HostTierScheduler
from kvtier.host_tier.worker import SPOILED, HostTierWorker
from kvtier.testing import Faults, SimulatedEngine


class Relayed(Outside):
    """The engine of ``test_host_tier``, with workers that each have the whole of its memory; steps are messages."""

    def __init__(self, seed=0, faults=SOUND, host_memory=12_000, verify="full", deadline_s=40.0, workers=2, tick_s=1.0):
        self.groups = [
            OutsideGroup(name, attention, tokens, BLOCKS, tuple(Fragment(n * BLOCKS * ROW, ROW, ROW) for n in layers))
            for name, (attention, tokens, layers) in GROUPS.items()
        ]
        self.memories = [np.zeros(6 * BLOCKS * ROW, np.uint8) for _ in range(workers)]
        self.engines = []

        def make(memory):
            self.engines.append(SimulatedEngine(memory, seed + len(self.engines), faults))
            return self.engines[-1]

        def plan():
            return HostPlan(self.groups, 6 * BLOCKS * ROW, host_memory, verify)

        self.workers = [HostTierWorker(plan(), memory, deadline_s, make) for memory in self.memories]
        self.tier = HostTierScheduler(plan(), deadline_s * tick_s, workers)
        inside.relay_clock(self.tier, lambda: self.engines[0].now() * tick_s)
        self.free = [list(range(BLOCKS)) for _ in self.groups]
        self.lent, self.late = {}, set()
        self.found = self.wrong = 0
        self.told: dict[int, list[str]] = {}  # what each worker has said of a load
        self.loads: dict[int, Copy] = {}
        self.steps = 0

    def step(self):
        """What a step's orders do in each worker."""
        self.steps += 1
        taken = self.tier.take_orders()
        self.loads |= {copy.ticket: copy for copy in taken.copies if copy.is_load}
        orders = pickle.dumps(taken)
        for worker in self.workers:
            mine: Orders = pickle.loads(orders)
            worker.begin(mine)
            worker.load(mine)

    def write(self, g, seq, j):
        self.step()
        touched = {(int(f) + self.first(g), int(seq.tables[g][j]) + 1) for f in range(2)}
        for k, (engine, memory) in enumerate(zip(self.engines, self.memories, strict=True)):
            engine.compute(set(), touched)
            for layer in GROUPS[self.groups[g].name][2]:
                self.row(layer, seq.tables[g][j], memory)[:] = content(self.name(g, seq, j), layer) ^ k

    def row(self, layer, block, memory=None):
        at = (layer * BLOCKS + int(block)) * ROW
        return (self.memories[0] if memory is None else memory)[at : at + ROW]

    def poll(self, running):
        self.step()
        whole = Report()
        for worker, memory in zip(self.workers, self.memories, strict=True):
            ended = worker.poll()
            for ticket, (_, end) in ended.report.ends.items():
                if ticket in self.loads and end.error:
                    self.check_wiped(self.loads[ticket], slice(None) if end.bad is None else end.bad, memory)
            whole.merge(pickle.loads(pickle.dumps(ended.report)))
            for ticket in ended.loaded:
                self.told.setdefault(ticket, []).append("")
            for ticket, why in ended.failed.items():
                self.told.setdefault(ticket, []).append(why)
        self.tier.report(whole)
        hits = {seq.ticket: seq.hit for seq in running}
        super().poll(running)
        for seq in running:  # the second worker's bytes are its own
            hit = hits.get(seq.ticket)
            if hit is not None and seq.ticket is None and seq.done == hit.end:
                for g, j in zip(hit.groups, hit.at, strict=True):
                    for layer in GROUPS[self.groups[g].name][2]:
                        right = content(self.name(g, seq, j), layer) ^ 1
                        self.wrong += not np.array_equal(self.row(layer, seq.tables[g][j], self.memories[1]), right)

    def check(self):
        assert self.tier.audit() == []

    def edges(self):
        live = inside.tier_connector(self.tier).ledger.live()
        self.late |= {f"store {t.ticket} " for t in live if t.state is TransferState.EXPIRED}
        return [e for engine in self.engines for e in engine.missing_edges if not any(late in e for late in self.late)]


def test_a_text_comes_back_in_every_worker():
    engine = Relayed()
    text = list(range(46))
    assert engine.serve(text) == 0
    assert engine.serve(text) == 44
    assert engine.serve([*text, 7, 8, 9]) == 44
    assert engine.wrong == 0
    assert engine.edges() == []
    assert {len(said) for said in engine.told.values()} == {2}, "each worker has told each load once"


@pytest.mark.parametrize("seed", range(sized(2, 30)))
@pytest.mark.parametrize("faults", [SOUND, UNKIND], ids=["sound", "unkind"])
def test_random_engines_with_two_workers_never_read_what_was_not_written(seed, faults):
    rnd = random.Random(seed)
    engine = Relayed(seed, faults, host_memory=rnd.choice([3_000, 6_000, 20_000]), deadline_s=8.0)
    texts = [[rnd.randrange(1000) for _ in range(rnd.randrange(6, 40))] for _ in range(4)]
    running: list[Sequence] = []
    for step in range(sized(120, 1000)):
        if step % 50 == 49:
            for one in engine.engines:
                one.end_lost()
        engine.turn(rnd, running, texts)
    assert engine.wrong == 0
    stats = engine.tier.stats().transfers
    assert stats.stored_blocks > 50 and stats.loaded_blocks > 10
    if faults is UNKIND:
        assert stats.failed_loads and stats.failed_stores and stats.expired


# --- the relay ------------------------------------------------------------------------------------


def transfer(ticket, direction=Direction.STORE):
    ids = np.arange(1, 4, dtype=np.int32)
    return Transfer(ticket, direction, np.zeros(3, np.int32), ids, ids, np.empty((0, 2), np.uint64), 0, 0)


def test_a_copy_has_ended_once_every_worker_has_said_so_and_bad_blocks_add_up():
    relay = RelayEngine(3)
    for ticket in (1, 2, 3):
        relay.submit(transfer(ticket))
    assert [copy.ticket for copy in relay.take().copies] == [1, 2, 3]
    assert relay.take() == Orders()
    first, second, third = Report(), Report(), Report()
    first.add(1, End())
    first.add(2, End("torn", np.array([0]), corrupt=True))
    second.add(2, End("torn", np.array([2]), corrupt=True))
    second.add(1, End())
    relay.report(first.merge(second))
    assert list(relay.poll()) == [], "the third has said nothing"
    third.add(1, End())
    third.add(2, End())
    third.add(3, End("lost"))
    relay.report(third)
    one, two = relay.poll()
    assert one == Outcome(1)
    assert (two.ticket, two.error, two.bad.tolist(), two.corrupt) == (2, "torn", [0, 2], True)
    last = Report()
    last.add(3, End("gone", np.array([1])), workers=2)
    relay.report(last)
    assert relay.poll()[0] == Outcome(3, "lost; gone"), "all blocks, since one worker has lost them all"


def test_writers_are_ordered_by_the_workers():
    relay = RelayEngine(1)
    relay.submit(transfer(1))
    assert relay.order_after([1], 0.0)
    assert relay.order_after([1], 0.0)
    orders = relay.take()
    assert (orders.after, [copy.ticket for copy in orders.copies]) == ((1,), [1])


class Stuck(SimulatedEngine):
    """Cannot wait for stores."""

    def order_after(self, tickets, timeout_s):
        return False


def a_worker(engine=SimulatedEngine, deadline_s=5.0, faults=SOUND):
    made = []

    def make(memory):
        made.append(engine(memory, 0, faults))
        return made[-1]

    group = OutsideGroup("full", GROUPS["full"][0], 4, 8, (Fragment(0, 64, 64),))
    return HostTierWorker(HostPlan([group], 512, "4KiB"), np.zeros(512, np.uint8), deadline_s, make), made[0]


IDS = np.array([1], np.int32)


def test_a_store_whose_source_was_written_too_early_has_failed():
    for engine, error in ((SimulatedEngine, ""), (Stuck, SPOILED)):
        worker, _ = a_worker(engine)
        worker.begin(Orders((Copy(1, False, IDS * 0, IDS, IDS),), (1,)))
        report = Report()
        while not report.ends:
            report = worker.poll().report
        assert report.ends[1][1].error == error


def test_a_load_that_is_late_is_told_once_and_its_end_is_reported_later():
    worker, engine = a_worker(faults=Faults(lose=1.0))
    ended, told = 0, []
    worker.load(Orders((Copy(1, True, IDS * 0, IDS, IDS),)))
    for _ in range(40):
        found = worker.poll()
        told += found.failed
        ended += len(found.report.ends)
        engine.wait(1.0)
    assert (told, ended, worker.num_under_way) == ([1], 0, 1)
    engine.end_lost()
    found = worker.poll()
    assert (found.loaded, found.failed, list(found.report.ends), worker.num_under_way) == ((), {}, [1], 0)


def test_a_copy_that_cannot_even_begin_has_failed():
    worker, engine = a_worker()
    engine.submit = None
    worker.begin(Orders((Copy(1, False, IDS * 0, IDS, IDS),)))
    assert "TypeError" in worker.poll().report.ends[1][1].error
    assert worker.poll().report.ends == {}


def test_what_is_written_before_it_could_be_ordered_is_never_found():
    engine = Relayed()
    text = list(range(40))
    seq = engine.begin(text)
    engine.compute(seq, 40)
    engine.tier.spoil(np.zeros(1, np.int32), seq.tables[0][3:4])
    engine.leave(seq)
    for _ in range(20):
        engine.poll([])
    engine.check()
    assert engine.tier.text(seq.keys).match(0, 40).num_tokens == 0, "the store of that block brings nothing"
