"""``CacheManager``: the pools for an engine with a scheduler of its own."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import inside
import numpy as np
import pytest
from breadth import sized

from core.driving import HeldEngine, prompt
from kvtier import (
    CacheClosed,
    CacheManager,
    ChunkedLocal,
    ConfigError,
    DuplicateRequest,
    FullAttention,
    InvalidRequest,
    KVCache,
    KVEvents,
    Request,
    RequestTooLarge,
    Scheduler,
    Shortage,
    SlidingWindow,
    StepError,
)
from kvtier.coordinator.step import Step
from kvtier.testing import CanaryEngine, Faults, SimulatedEngine, canary_spec, expected_tokens

KINDS = {"full": (FullAttention(), 4), "window": (SlidingWindow(10), 2), "chunk": (ChunkedLocal(8), 4)}
SPEC = canary_spec(KINDS)
BAD_LINK = Faults(fail=0.1, tear=0.1, corrupt=0.1, max_delay_s=4.0)


@pytest.fixture
def make(make_cache):
    def made(blocks=16, host=64, max_running=4, faults=None, seed=0, **options):
        sizes = {"device_blocks": dict.fromkeys(KINDS, blocks), "host_blocks": dict.fromkeys(KINDS, host)}
        engine = (lambda memory: SimulatedEngine(memory, seed, faults)) if faults else "threads"
        cache = KVCache(SPEC, **sizes, copy_engine=engine, **options)
        caches.append(cache)
        return cache, CacheManager(cache, 64, max_running), CanaryEngine(cache)

    caches = []
    yield made
    for cache in caches:
        cache.close()


def start(manager, canary, request):
    canary.add(request)
    sequence = manager.open(request)
    assert manager.start(sequence) is None
    while sequence.is_loading:
        manager.wait(1.0)
        manager.poll()
    return sequence


def run(manager, canary, sequence, chunk=6):
    """The sequence alone, to its end."""
    while True:
        step = manager.plan([(sequence, min(chunk, sequence.num_tokens - sequence.num_computed))])
        assert isinstance(step, Step), step
        for report in manager.commit(step, canary.forward(step)):
            canary.forget(report.request_id)
            return report


def settle(cache, manager):
    while cache.stats().transfers.live:
        manager.wait(1.0)
        manager.poll()


def test_a_sequence_runs_to_its_end_and_is_found_by_the_next(make):
    cache, manager, canary = make()
    report = run(manager, canary, start(manager, canary, Request("a", prompt(0, 13), 6)), 5)
    assert report.token_ids == expected_tokens(SPEC, prompt(0, 13), 6)
    assert (report.finish_reason, report.cached_tokens) == ("length", {"device": 0, "host": 0})
    again = manager.open(Request("b", prompt(0, 13), 6))
    assert (manager.match(again).num_tokens, manager.match(again).host_tokens) == (12, 0)
    assert cache.stats().requests == {"waiting": 1, "running": 0, "finished": 1, "preemptions": 0}
    assert manager.close(again, "abort").finish_reason == "abort"
    settle(cache, manager)
    assert not manager.has_work()
    assert cache.audit() == []


def test_what_was_pushed_out_comes_back_from_the_host(make):
    cache, manager, canary = make(blocks=8)
    for k in range(6):
        run(manager, canary, start(manager, canary, Request(f"a{k}", prompt(k, 21), 2)))
    settle(cache, manager)
    request = Request("b", prompt(0, 21), 4)
    sequence = manager.open(request)
    hit = manager.match(sequence)
    assert (hit.num_tokens, hit.host_tokens, hit.is_pending) == (20, 20, False)
    canary.add(request)
    assert manager.start(sequence) is None
    assert sequence.is_loading
    while not sequence.is_running:
        manager.wait(1.0)
        assert manager.poll() in ([], [sequence])
    assert sequence.cached_tokens == {"device": 0, "host": 20}
    assert run(manager, canary, sequence).token_ids == expected_tokens(SPEC, prompt(0, 21), 4)


def test_a_sequence_waits_for_a_prefix_that_another_one_brings(make):
    cache, manager, canary = make(blocks=12, faults=Faults(max_delay_s=4.0))
    for k in range(6):
        run(manager, canary, start(manager, canary, Request(f"a{k}", prompt(k, 21), 2)))
    settle(cache, manager)
    requests = [Request(name, prompt(0, 21), 4) for name in "bc"]
    first, second = [manager.open(request) for request in requests]
    assert manager.start(first) is None
    assert first.is_loading
    assert manager.match(second).is_pending
    assert manager.start(second) == Shortage({}), "it would compute what is on its way"
    while first.is_loading:
        manager.wait(1.0)
        manager.poll()
    assert manager.start(second) is None
    assert second.cached_tokens == {"device": 20, "host": 0}
    for request, sequence in zip(requests, (first, second), strict=True):
        canary.add(request)
        assert run(manager, canary, sequence).token_ids == expected_tokens(SPEC, prompt(0, 21), 4)


def test_blocks_are_given_to_all_sequences_or_to_none(make):
    cache, manager, canary = make(blocks=8, host=8)
    sequences = [start(manager, canary, Request(f"{k}", prompt(k, 20), 2)) for k in range(2)]
    before = cache.core.coordinator.pools.arrays.meta.copy()
    short = manager.plan([(sequence, 20) for sequence in sequences])
    assert isinstance(short, Shortage)
    assert short.groups["full"] == (8, 6)
    assert np.array_equal(cache.core.coordinator.pools.arrays.meta, before), "nothing has changed hands"
    assert cache.audit() == []
    step = manager.plan([(sequences[0], 10)])
    manager.commit(step, canary.forward(step))
    assert [s.num_computed for s in sequences] == [10, 0]


def test_a_start_without_room_says_what_is_lacking(make):
    cache, manager, canary = make(blocks=6, host=8, max_running=8)
    for k in range(6):
        start(manager, canary, Request(f"{k}", prompt(k, 9), 2))
    late = manager.open(Request("late", prompt(9, 9), 2))
    assert manager.start(late) == Shortage(dict.fromkeys(KINDS, (1, 0)))
    assert late.is_idle
    assert cache.audit() == []


def test_what_ends_with_an_error_is_not_found_again(make):
    cache, manager, canary = make()
    sequence = start(manager, canary, Request("a", prompt(0, 21), 5))
    for _ in range(4):
        step = manager.plan([(sequence, min(6, sequence.num_tokens - sequence.num_computed))])
        manager.commit(step, canary.forward(step))
    settle(cache, manager)
    assert manager.close(sequence, "error").finish_reason == "error"
    assert manager.match(manager.open(Request("b", prompt(0, 21), 5))).num_tokens == 0


def test_who_holds_content_of_what_ends_with_an_error_while_it_loads_the_rest_is_idle_again(make_cache):
    """Its load brings other blocks, and ends well: it would run on bad ones."""
    spec, engines = canary_spec({"full": (FullAttention(), 4)}), []
    cache = make_cache(spec, 20, 20, copy_engine=lambda memory: engines.append(HeldEngine(memory)) or engines[0])
    manager, canary, text = CacheManager(cache, 64, 4), CanaryEngine(cache), prompt(0, 25)
    run(manager, canary, start(manager, canary, Request("before", text, 1)), 25)
    engines[0].release()
    manager.poll()
    pools, group = inside.pools(cache), np.zeros(4, np.int32)
    pools.unpublish(group, pools.find(group, KVEvents(cache).keys_of(Request("before", text, 1))["full"][2:6]))
    bad, holds = (manager.open(Request(name, text[:n], 1)) for name, n in (("bad", 9), ("holds", 25)))
    assert manager.start(holds) is None and holds.is_loading
    manager.close(bad, "error")
    assert cache.audit() == [] and holds.is_idle
    engines[0].release()
    assert manager.poll() == [holds] and "failed" in holds.problem
    assert manager.match(holds).num_tokens == 0


def test_a_step_is_the_one_that_a_scheduler_makes():
    made = []
    for drive in ("manager", "scheduler"):
        cache = KVCache(SPEC, device_blocks=dict.fromkeys(KINDS, 16))
        request = Request("a", prompt(0, 13), 3)
        if drive == "manager":
            manager = CacheManager(cache, 64, 4)
            sequence = manager.open(request)
            assert manager.start(sequence) is None
            step = manager.plan([(sequence, 13)])
        else:
            scheduler = Scheduler(cache, 64, 4)
            scheduler.add(request)
            step = scheduler.schedule()
        arrays = [step.token_ids, step.positions, step.query_start, step.seq_lens, step.sample_rows]
        for name in KINDS:
            view = step.group(name)
            arrays += [view.block_table, view.slot_mapping, *view.paged()]
        made.append([array.copy() for array in arrays])
        cache.close()
    assert all(np.array_equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("faults", [None, BAD_LINK], ids=["sound", "bad"])
@pytest.mark.parametrize("seed", range(sized(2, 30)))
def test_random_schedules_give_right_texts(make, seed, faults):
    rnd = random.Random(seed)
    store = rnd.choice(["eager", "lazy"])
    cache, manager, canary = make(20, 40, 4, faults, seed, verify="full", store=store)
    prompts = [prompt(k, rnd.randrange(5, 40)) for k in range(4)]
    idle, running, texts, done = [], [], {}, 0

    def abort_idle():
        """A canary cannot take back what a cancelled step has told it."""
        for sequence in [s for s in running if s.is_idle]:
            running.remove(sequence)
            assert manager.close(sequence, "abort").finish_reason == "abort"
            canary.forget(sequence.request.request_id)

    for k in range(sized(120, 1000)):
        if len(idle) + len(running) < 4:
            tokens = [*rnd.choice(prompts)[: rnd.randrange(3, 40)], *prompt(100 + k, rnd.randrange(1, 4))]
            request = Request(f"r{k}", tokens, rnd.randrange(1, 8))
            texts[request.request_id] = expected_tokens(SPEC, tokens, request.max_new_tokens)
            canary.add(request)
            idle.append(manager.open(request))
        for sequence in manager.poll():
            if sequence.is_idle:
                running.remove(sequence)
                idle.append(sequence)
        if idle and manager.start(idle[0]) is None:
            running.append(idle.pop(0))
        able = [s for s in running if s.is_running]
        rnd.shuffle(able)
        wants = [(s, rnd.randint(1, min(8, s.num_tokens - s.num_computed))) for s in able[: rnd.randint(1, 4)]]
        step = manager.plan(wants)
        if isinstance(step, Shortage):
            if step.groups:
                victim = rnd.choice(able)
                manager.stop(victim)
                running.remove(victim)
                idle.append(victim)
        elif rnd.random() < 0.1:
            manager.cancel(step)
            abort_idle()
        else:
            for report in manager.commit(step, canary.forward(step)):
                assert report.token_ids == texts[report.request_id]
                canary.forget(report.request_id)
                done += 1
            running = [s for s in running if not s.is_finished]
        if rnd.random() < 0.02:
            cache.reset()
            assert cache.audit() == []  # all other calls end with an audit
    assert done > sized(4, 30)


def test_a_text_that_has_outgrown_the_pools_ends_with_capacity(make):
    cache, manager, canary = make(blocks=8, host=8, max_running=2)
    sequence = start(manager, canary, Request("a", prompt(0, 20), 60))
    while isinstance(step := manager.plan([(sequence, min(6, sequence.num_tokens - sequence.num_computed))]), Step):
        manager.commit(step, canary.forward(step))
    assert sequence.num_tokens == 33
    assert manager.stop(sequence).finish_reason == "capacity"
    assert sequence.is_finished
    settle(cache, manager)
    assert not manager.has_work()


def test_the_last_report_is_given_before_the_audit_asks_for_it(make):
    _, manager, canary = make(store="off")
    sequence = start(manager, canary, Request("a", prompt(0, 5), 1))
    step = manager.plan([(sequence, 5)])
    assert [report.finish_reason for report in manager.commit(step, canary.forward(step))] == ["length"]


def test_a_reset_sends_those_back_whose_prefix_is_being_loaded(make):
    cache, manager, canary = make(blocks=8, faults=Faults(max_delay_s=50.0), deadline_s=1000.0)
    for k in range(6):
        run(manager, canary, start(manager, canary, Request(f"a{k}", prompt(k, 21), 2)))
    for _ in range(100):
        manager.poll()
    sequence = manager.open(Request("b", prompt(0, 21), 4))
    assert manager.start(sequence) is None
    assert sequence.is_loading
    cache.reset()
    assert sequence.is_idle
    assert "reset" in sequence.problem
    assert manager.start(sequence) is None, "nothing to load any more"
    assert manager.poll() == [], "it has begun anew since"
    manager.stop(sequence)
    assert manager.match(sequence).num_tokens == 0
    assert cache.audit() == []


def test_what_cannot_be_is_refused_and_changes_nothing(make):
    cache, manager, canary = make(max_running=2)
    with pytest.raises(InvalidRequest, match=r"kvtier\.Request"):
        manager.open("a")
    with pytest.raises(RequestTooLarge):
        manager.open(Request("long", prompt(0, 1000), 1))
    one, two, three = (manager.open(Request(name, prompt(k, 9), 3)) for k, name in enumerate("abc"))
    with pytest.raises(DuplicateRequest):
        manager.open(Request("a", prompt(0, 9), 3))
    for wants in ([(one, 1)], [("a", 1)]):
        with pytest.raises(StepError):
            manager.plan(wants)
    for sequence in (one, two):
        canary.add(sequence.request)
        assert manager.start(sequence) is None
    assert manager.start(three) == Shortage({"sequences": (1, 0)})
    for ask in (manager.start, manager.match):
        with pytest.raises(StepError, match="running already"):
            ask(one)
    for n in (0, 10, -1):
        with pytest.raises(StepError, match="9 tokens ahead"):
            manager.plan([(one, n)])
    for wants in ([(one, 5.5)], [(one, "3")], [(one, None)], [one], "no", None):
        with pytest.raises(StepError, match=r"no integer|takes a list"):
            manager.plan(wants)
    for reason in ("finished", ["stop"], None, np.array([1, 2])):
        with pytest.raises(InvalidRequest, match="reason must be one of"):
            manager.close(three, reason)
    with pytest.raises(StepError, match="tokens ahead"):
        manager.plan([(one, 3), (one, 3)])
    step = manager.plan([(one, 9), (two, 3)])
    with pytest.raises(StepError, match="not committed"):
        manager.plan([])
    for act, sequence in ((manager.stop, one), (manager.close, one), (manager.start, three)):
        with pytest.raises(StepError, match="commit or cancel"):
            act(sequence)
    with pytest.raises(StepError, match="token ids"):
        manager.commit(step, [1, 2])
    assert cache.audit() == []
    manager.commit(step, canary.forward(step))
    with pytest.raises(StepError, match="not under way"):
        manager.commit(step, [1])
    with pytest.raises(StepError, match="still has work"):
        Scheduler(cache)
    for sequence in (one, two, three):
        manager.close(sequence)
    with pytest.raises(StepError, match="not open here"):
        manager.close(one)
    settle(cache, manager)
    assert not manager.has_work()
    Scheduler(cache)
    with pytest.raises(StepError, match="driven by another"):
        manager.open(Request("d", prompt(0, 9), 3))
    with pytest.raises(ConfigError, match=r"kvtier\.KVCache"):
        CacheManager(SPEC)
    cache.close()
    with pytest.raises(CacheClosed):
        manager.poll()


def test_the_example_runs(capsys):
    path = Path(__file__).parents[3] / "examples" / "own_scheduler.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
    spec = importlib.util.spec_from_file_location("own_scheduler", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    said = capsys.readouterr().out.splitlines()
    assert said[2] == "round 2: six texts are right; tokens found in the cache: [48, 48, 48, 48, 48, 48]"
