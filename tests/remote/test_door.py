"""A remote tier of an engine with its own memory, in one process and in several."""

from __future__ import annotations

import random

import inside
import numpy as np
import pytest
from breadth import sized
from core.outside import SOUND, UNKIND, Outside, chain
from core.test_relayed_books import Relayed
from patience import FOREVER_S

from kvtier import Fragment, FullAttention, OutsideGroup, SlidingWindow
from kvtier.remote.backends.uri import PATIENCE, SpillWhen
from kvtier.remote.names import of_worker, outside_namespace
from kvtier.testing import SimulatedEngine
from remote.fake_backend import FakeBackend, Shared

ID = {"model_id": "m", "key_secret": b"s"}
TICK_S = 0.001
TEXT = list(range(46))
HIT = 44


@pytest.fixture(autouse=True)
def small_objects(monkeypatch):
    """Objects of some blocks each."""
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", 60)


class Slow(SimulatedEngine):
    """Its clock ticks in milliseconds, so that questions are answered in time."""

    def now(self):
        return super().now() * TICK_S

    def order_after(self, tickets, timeout_s):
        return super().order_after(tickets, timeout_s / TICK_S)


class Sharing:
    """An engine with a remote."""

    def rest(self, most=300):
        """Until nothing is under way."""
        for _ in range(most):
            self.poll([])
            if not self.tier.has_work:
                return
        raise AssertionError("it never comes to rest")

    def serve(self, tokens):
        found = super().serve(tokens)
        self.rest()
        self.check()
        return found

    @property
    def stats(self):
        return self.tier.stats().remote

    @property
    def remote(self):
        return inside.behind_tier(self.tier)


class One(Sharing, Outside):
    """In one process. ``store``: its own."""

    def __init__(self, store, seed=0, faults=SOUND, host_memory=12_000, deadline_s=40.0, identity=ID):
        self.store = store
        super().__init__(seed, faults, host_memory, "full", deadline_s * TICK_S, remote_uri=store, **identity)


class Several(Sharing, Relayed):
    """With two workers. ``stores``: of the scheduler, and of each worker."""

    def __init__(self, *stores, seed=0, faults=SOUND, host_memory=12_000, deadline_s=40.0, identity=ID):
        self.stores = stores
        self.store = stores[0]
        super().__init__(seed, faults, host_memory, deadline_s=deadline_s, workers=len(stores) - 1, tick_s=TICK_S)
        self.tier.use_remote(stores[0], **identity)
        for rank, (worker, store) in enumerate(zip(self.workers, stores[1:], strict=True)):
            worker.use_remote(store, identity["key_secret"], rank)


@pytest.fixture(params=["one", "several"])
def make(request, monkeypatch):
    """Makes engines that share a remote."""
    monkeypatch.setattr("core.outside.SimulatedEngine", Slow)
    shared = Shared()

    def make(workers=2, hold=False, of=None, **options):
        faults = options.pop("store", {})
        seed = options.get("seed", 0)
        if request.param == "one":
            return One(FakeBackend(of or shared, hold, seed, **faults), **options)
        made = [FakeBackend(of or shared, hold, seed + k, **faults) for k in range(workers + 1)]
        return Several(*made, **options)

    make.shared = shared
    make.is_one = request.param == "one"
    return make


@pytest.mark.parametrize("least", [1, 60, 10**6])
def test_what_one_engine_computes_another_has(make, monkeypatch, least):
    monkeypatch.setattr("kvtier.remote.objects.LEAST_BYTES", least)
    one, other = make(), make()
    assert one.serve(TEXT) == 0
    assert other.serve(TEXT) == HIT
    assert (one.wrong, other.wrong) == (0, 0)
    assert one.stats.spilled_bytes > 0 and other.stats.fetched_bytes > 0
    assert other.stats.failed_fetches == other.stats.missed_objects == 0
    before = one.stats
    assert one.serve(TEXT) == HIT
    assert one.stats.spilled_objects == before.spilled_objects, "what is stored is not stored again"
    assert one.stats.looks == before.looks, "the host has it"


def test_each_worker_has_objects_of_its_own(make):
    make().serve(TEXT)
    namespaces = {name.split("/")[1] for name in make.shared.objects}
    assert len(namespaces) == (1 if make.is_one else 2)


@pytest.mark.parametrize("identity", [{"model_id": "other", "key_secret": b"s"}, {"model_id": "m", "key_secret": b"t"}])
def test_another_model_or_secret_shares_nothing(make, identity):
    make().serve(TEXT)
    other = make(identity=identity)
    assert other.serve(TEXT) == 0
    assert other.stats.fetched_objects == other.stats.failed_fetches == 0
    assert len({name.split("/")[1] for name in make.shared.objects}) == (2 if make.is_one else 4)


def test_what_shapes_bytes_is_part_of_the_namespace():
    def group(name="g", attention=None, tokens=4, sizes=(16, 32), blocks=8):
        fragments = tuple(Fragment(0, 64, size) for size in sizes)
        return OutsideGroup(name, attention or FullAttention(), tokens, blocks, fragments)

    class Spec:
        def __init__(self, *groups, hash_tokens=4):
            self.groups, self.hash_tokens = groups, hash_tokens

    def name(*groups, model="m", secret=b"s", plan=(), **more):
        return outside_namespace(model, Spec(*groups, **more), secret, plan)

    other = [
        name(group(name="h")),
        name(group(tokens=8)),
        name(group(attention=SlidingWindow(8))),
        name(group(attention=SlidingWindow(9))),
        name(group(sizes=(32, 16))),
        name(group(), group(name="h")),
        name(group(), model="n"),
        name(group(), secret=b"t"),
        name(group(), plan=["tile", 8]),
        name(group(), hash_tokens=2),
        name(group()),
    ]
    assert len(set(other)) == len(other)
    assert name(group(blocks=9)) == name(group()), "the number of blocks shapes none"
    workers = [of_worker(other[0], rank, many) for rank, many in ((0, 1), (0, 2), (1, 2), (1, 3))]
    assert len({*workers, *other}) == len(workers) + len(other)


def test_a_damaged_object_is_a_miss_everywhere_and_is_deleted(make):
    one, other = make(), make()
    one.serve(TEXT)
    names = sorted(name for name in make.shared.objects if "/t/" in name)
    victim = names[-1]
    make.shared.objects[victim] = bytes([make.shared.objects[victim][0] ^ 1]) + make.shared.objects[victim][1:]
    assert other.serve(TEXT) == 0
    assert (other.wrong, other.stats.damaged_objects) == (0, 1)
    third = make()
    assert third.serve(TEXT) == HIT, "it was computed and stored again"
    assert third.wrong == 0


def test_a_block_that_has_changed_in_host_memory_is_not_stored(make):
    engine = make()
    seq = engine.begin(TEXT)
    engine.compute(seq, 46)
    stores = [engine.store] if make.is_one else engine.stores
    for store in stores:
        store.hold = True
    while not any(store.calls for store in stores[-1:]):
        engine.poll([])
    for memory in inside.host_memories(engine):
        memory[:] ^= 1
    for store in stores:
        store.end()
        store.hold = False
    engine.rest()
    assert make.shared.objects == {}
    assert engine.stats.failed_spills > 0


def test_an_object_that_is_gone_is_a_miss(make):
    one, other = make(), make()
    one.serve(TEXT)
    for name in [name for name in make.shared.objects if "/t/" in name][-1:]:  # of one worker
        del make.shared.objects[name]
    assert other.serve(TEXT) == 0 or make.is_one, "windows may do without"
    assert other.wrong == 0
    assert make().serve(TEXT) == HIT


def test_a_store_that_fails_is_left_alone(make):
    engine = make(store={"fail": 1.0})
    for k in range(6):
        assert engine.serve([1000 * k + i for i in range(46)]) == 0
    assert engine.stats.breaker_open
    calls = len(engine.store.made)
    engine.serve([70_000 + i for i in range(46)])
    assert len(engine.store.made) == calls, "a second has not passed"
    assert engine.wrong == 0


def test_after_a_reset_the_store_is_left_alone(make):
    one, other = make(), make()
    one.serve(TEXT)
    other.tier.reset()
    for store in [other.store] if make.is_one else other.stores:
        store.is_to_be_left_alone = True
    assert other.serve(TEXT) == 0
    assert not other.stats.is_on
    assert other.serve(TEXT) == HIT, "from the host"


def test_what_a_fetch_brings_after_a_reset_is_not_found(make):
    one = make()
    one.serve(TEXT)
    other = make(hold=True)
    text = other.tier.text(chain(TEXT))
    fetching(other, text)
    other.tier.reset()
    end(other)
    other.rest()
    other.check()
    assert other.tier.text(chain(TEXT)).match(0, 46).num_tokens == 0
    assert inside.tier_pools(other.tier).live.sum() == 0, "nothing is held"


def fetching(engine, text):
    """Until a fetch is under way in a remote that holds calls."""
    for _ in range(200):
        assert text.match(0, 46, ask_remote=True).is_sought
        if engine.remote.moves():
            break
        end(engine, "look")
        engine.poll([])
    engine.poll([])
    assert engine.remote.moves()


def quarantined(engine):
    return sum(pool.quarantined for pool in engine.tier.stats().host.values())


def end(engine, *kinds):
    for store in getattr(engine, "stores", None) or (engine.store,):
        store.end(*kinds)


def test_a_fetch_that_hangs_is_given_up_and_its_blocks_wait_for_its_end(make):
    make().serve(TEXT)
    other = make(hold=True, deadline_s=30.0)
    text = other.tier.text(chain(TEXT))
    fetching(other, text)
    other.tier.wait(0.0)  # takes note of what has woken it so far
    other.tier.wait(FOREVER_S)  # a sleep ends with the deadline
    for _ in range(100):
        inside.pass_time(other.engines, 1)
        other.poll([])
        other.check()
        if not text.match(0, 46, ask_remote=True).is_sought:
            break
    assert other.stats.expired == 1
    assert text.match(0, 46).num_tokens == 0
    assert quarantined(other) > 0
    end(other)
    other.rest()
    assert quarantined(other) == 0
    other.check()


def test_a_text_may_do_without_the_store(make):
    engine = make()
    text = engine.tier.text(chain(TEXT), with_remote=False)
    assert not text.match(0, 46, ask_remote=True).is_sought
    text.computed([np.zeros(11, np.int32), np.zeros(23, np.int32), np.zeros(11, np.int32)], 46, is_end=True)
    engine.rest()
    assert engine.store.made == [] and make.shared.objects == {}


def test_only_what_is_worth_it_is_fetched(make):
    make().serve(TEXT)
    other = make()
    other.tier.estimate_compute(lambda start, end: 1e-9)
    other.serve(TEXT)
    assert other.stats.not_worth == 0, "the speed of the remote is not known before its first fetch"
    make().serve([*TEXT, *range(100, 140)])
    other.serve([*TEXT, *range(100, 140), 5])
    assert other.stats.not_worth == 1


def test_a_tier_sleeps_no_longer_than_a_text_waits_for_its_answer(make):
    engine = make(hold=True, deadline_s=30.0)
    engine.tier.estimate_compute(lambda start, end: 0.01)
    text = engine.tier.text(chain(TEXT))
    assert text.match(0, 46, ask_remote=True).is_sought
    assert 0 < inside.remote_due_s(engine.tier) <= 0.02
    inside.pass_time(engine.engines, 25)
    assert not text.match(0, 46, ask_remote=True).is_sought
    assert 0 < inside.remote_due_s(engine.tier) <= 0.005, "the question has 30 ms"
    end(engine)


@pytest.mark.parametrize("seed", range(sized(2, 30)))
@pytest.mark.parametrize("faults", [SOUND, UNKIND], ids=["sound", "unkind"])
def test_random_engines_that_share_a_store_never_read_what_was_not_written(make, seed, faults):
    rnd = random.Random(seed)
    bad = rnd.choice([{}, {"fail": 0.1, "miss": 0.1}, {"damage": 0.2, "tear": 0.1, "swap": 0.2}, {"refuse": 0.3}])
    pair = [
        make(seed=seed + k, faults=faults, host_memory=rnd.choice([3_000, 6_000, 20_000]), deadline_s=8.0, store=bad)
        for k in range(2)
    ]
    texts = [[rnd.randrange(1000) for _ in range(rnd.randrange(6, 40))] for _ in range(4)]
    running = {id(engine): [] for engine in pair}
    for step in range(sized(100, 600)):
        engine = pair[rnd.randrange(2)]
        mine = running[id(engine)]
        if step % 50 == 49:
            for each in pair:
                for one in each.engines:
                    one.end_lost()
        engine.turn(rnd, mine, texts, reset=0.002)
    assert [engine.wrong for engine in pair] == [0, 0]
    assert sum(engine.stats.spilled_objects for engine in pair) > 0
    assert bad or faults is UNKIND or sum(engine.stats.fetched_objects for engine in pair) > 0


# --- real remotes ----------------------------------------------------------------------------------


def test_what_waits_for_evictions_is_stored_before_an_engine_ends(make, monkeypatch):
    monkeypatch.setattr("kvtier.remote.opening._ways", lambda uri: (SpillWhen.EVICTION, PATIENCE))
    engine, other = make(), make()
    engine.serve(TEXT)
    assert engine.store.shared.objects == {}
    engine.tier.flush_remote()
    engine.rest()
    engine.tier.close()
    assert other.serve(TEXT) == HIT
