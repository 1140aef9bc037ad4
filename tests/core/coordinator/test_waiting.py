"""Nobody sleeps through news: landed loads, deadlines, closing, and engines that break."""

from __future__ import annotations

import threading
import time

import inside
import numpy as np
import pytest
from patience import FOREVER_S, PATIENCE_S

from core.driving import STORE, HeldEngine
from kvtier import CacheClosed, FullAttention, KVCache, Request, Scheduler, SlidingWindow
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.transfer import Direction
from kvtier.machine.wakeup import Wakeup
from kvtier.testing import CanaryEngine, SimulatedEngine, canary_spec, expected_tokens

SPEC = canary_spec({"full": (FullAttention(), 4)})
PROMPT = list(range(30))


class SlowLoads(ThreadsEngine):
    """Loads end when they are told to. ``passed_s``: on its clock, beside the real time."""

    def __init__(self, memory):
        self.go, self.passed_s = threading.Event(), 0.0
        super().__init__(memory)

    def now(self):
        return super().now() + self.passed_s

    def _copy(self, transfer):
        if transfer.direction is Direction.LOAD:
            self.go.wait(FOREVER_S)
        return super()._copy(transfer)


def loading(**options):
    """A cache with one request whose prefix is being loaded, its scheduler, and the open step."""
    cache = KVCache(SPEC, device_blocks={"full": 20}, host_blocks={"full": 60}, **options)
    scheduler, engine = Scheduler(cache), CanaryEngine(cache)
    for name, prompt in (("a", PROMPT), ("b", [90 - t for t in range(76)])):
        engine.run(scheduler, [Request(name, prompt, 1)])
    request = Request("again", PROMPT, 1)
    scheduler.add(request)
    engine.add(request)
    step = scheduler.schedule()
    assert step.num_tokens == 0 and cache.stats().transfers.live == 1
    return cache, scheduler, engine, step


def test_a_load_that_lands_before_the_commit_does_not_leave_wait_asleep():
    cache, scheduler, engine, step = loading(copy_engine=SlowLoads)
    copier = cache.copy_engine
    copier.go.set()
    while inside.is_busy(copier):
        time.sleep(0.001)
    scheduler.commit(step, [])
    inside.woken(scheduler).clear()
    scheduler.wait(FOREVER_S)
    step = scheduler.schedule()
    (done,) = scheduler.commit(step, engine.forward(step))
    assert done.token_ids == expected_tokens(SPEC, PROMPT, 1)
    cache.close()


def test_wait_ends_at_the_deadline_of_a_copy_that_hangs():
    cache, scheduler, engine, step = loading(deadline_s=PATIENCE_S, copy_engine=SlowLoads)
    scheduler.commit(step, [])
    inside.woken(scheduler).clear()
    cache.copy_engine.passed_s = PATIENCE_S - 0.1
    scheduler.wait(FOREVER_S)
    done = []
    while not done:
        step = scheduler.schedule()
        done = scheduler.commit(step, engine.forward(step) if step.num_tokens else [])
    assert done[0].token_ids == expected_tokens(SPEC, PROMPT, 1)
    cache.copy_engine.go.set()
    cache.close()


@pytest.mark.parametrize("deadline_s", [float("inf"), 1e12])
def test_there_may_be_no_deadline(deadline_s):
    with KVCache(SPEC, device_blocks={"full": 8}, host_blocks={"full": 60}, deadline_s=deadline_s) as cache:
        scheduler, engine = Scheduler(cache), CanaryEngine(cache)
        for i in range(6):
            prompt = [i + t for t in range(28)]
            assert engine.run(scheduler, [Request(f"{i}", prompt, 2)])[f"{i}"].token_ids == expected_tokens(
                SPEC, prompt, 2
            )
        scheduler.add(Request("x", [1], 1))
        scheduler.wait(float("inf"))  # returns: there is mail
        while scheduler.has_work():
            step = scheduler.schedule()
            scheduler.commit(step, np.zeros(len(step.sample_rows), int))


class Broken(SimulatedEngine):
    """Cannot even begin a copy."""

    def submit(self, transfer):
        raise OSError("the link is gone")


def test_an_engine_that_raises_is_a_copy_that_failed():
    with KVCache(SPEC, device_blocks={"full": 12}, host_blocks={"full": 60}, copy_engine=Broken) as cache:
        done = CanaryEngine(cache).run(Scheduler(cache), [Request("a", PROMPT, 3)])["a"]
        assert done.token_ids == expected_tokens(SPEC, PROMPT, 3)
        assert cache.stats().transfers.failed_stores > 0
        assert cache.audit() == []


def test_nobody_waits_for_a_copy_of_what_a_reset_has_forgotten(make_serving):
    """A prefix that only a store under way will bring is waited for; after a reset it is computed at once."""
    serving = make_serving({"full": (FullAttention(), 4)}, 8, 64, hold=[Direction.STORE])
    serving.add("before", PROMPT[:29], 1)
    serving.step()
    serving.engine.hold = set()
    serving.add("flood", [90 - t for t in range(32)], 1)
    serving.steps_until(lambda: "flood" in serving.finished)
    serving.add("again", PROMPT[:29], 1)
    assert serving.step().num_tokens == 0
    assert "transfer" in serving.scheduler.why_waiting()["again"]
    serving.cache.reset()
    assert serving.cache.audit() == []
    assert serving.step().num_tokens == 29
    serving.engine.release()
    serving.run()


def test_after_close_there_is_no_work_and_nothing_to_abort():
    cache, scheduler, _, step = loading(copy_engine=SlowLoads)
    cache.copy_engine.go.set()
    cache.close()
    assert not scheduler.has_work()
    assert not scheduler.abort("again")
    with pytest.raises(CacheClosed):
        scheduler.commit(step, [])
    with pytest.raises(CacheClosed), cache:
        pass


def test_nobody_is_left_asleep_behind_a_request_that_ends_with_capacity(make_serving):
    """A load that hangs takes its blocks out of circulation; its request ends, and the next one runs in that step."""
    serving = make_serving({"full": (FullAttention(), 2)}, 3, 3, hold=[], deadline_s=10.0)
    serving.serve("before", [1, 2, 3, 4, 5], 1)
    inside.pools(serving.cache).forget_all()
    serving.engine.hold = {Direction.LOAD}
    serving.add("hangs", [1, 2, 3, 4, 5], 1)
    serving.step()
    serving.add("behind", [7, 8], 1)
    serving.engine.clock_s = 11.0
    assert serving.step().request_ids == ["behind"]
    assert serving.finished["hangs"].finish_reason == "capacity"
    assert serving.finished["behind"].finish_reason == "length"
    serving.engine.release()
    serving.run()


class HeldWaits(HeldEngine):
    """Notes how long it is asked to wait."""

    def __init__(self, memory):
        super().__init__(memory)
        self.asked_s: list[float] = []

    def wait(self, timeout_s):
        self.asked_s.append(timeout_s)
        return super().wait(timeout_s)


class Nap(Wakeup):
    """Does not sleep, but notes for how long it should."""

    def __init__(self):
        super().__init__()
        self.asked_s: list[float] = []

    def wait(self, timeout_s):
        self.asked_s.append(timeout_s)
        return self.is_set()


def storing(make_cache, **options):
    """A request that is done, and whose store is under way."""
    cache = make_cache(SPEC, 8, 8, copy_engine=HeldWaits, **options)
    scheduler, engine, request = Scheduler(cache), CanaryEngine(cache), Request("a", range(9), 1)
    scheduler.add(request)
    engine.add(request)
    step = scheduler.schedule()
    assert len(scheduler.commit(step, engine.forward(step))) == cache.stats().transfers.live == 1
    inside.sleep_on(scheduler, Nap())
    return cache, scheduler, cache.copy_engine


def test_a_copy_that_was_given_up_does_not_keep_wait_awake(make_cache):
    """Its deadline is past for good: an engine that is idle beside it would never sleep again."""
    cache, scheduler, copier = storing(make_cache, deadline_s=5.0)
    copier.clock_s += 5.0
    scheduler.commit(scheduler.schedule(), [])
    assert cache.stats().transfers.expired == cache.stats().transfers.live == 1
    scheduler.wait(3.0)
    assert copier.asked_s == [3.0]


def test_news_that_leave_nothing_to_do_do_not_keep_wait_awake(make_cache):
    """The last commit takes note of the last copy: an idle engine, which does not schedule, would never sleep."""
    cache, scheduler, copier = storing(make_cache)
    step = scheduler.schedule()
    copier.end()
    scheduler.commit(step, [])
    assert not scheduler.has_work() and cache.stats().transfers.live == 0
    scheduler.wait(3.0)
    assert inside.woken(scheduler).asked_s == [3.0]


def test_wait_submits_what_a_cancelled_step_has_left_to_store(make_serving):
    """Its requests name the windows that they leave behind: nobody is to sleep beside stores that have not begun."""
    serving = make_serving({"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}, 32, 64, hold=[])
    serving.add("a", PROMPT[:9], 12)
    serving.steps_until(lambda: serving.known("a") == 15)
    serving.scheduler.wait(0.0)  # takes note of the arrival
    serving.cancelled()
    planned = inside.connector(serving.cache).books.planned
    assert planned
    serving.scheduler.wait(0.01)
    assert inside.connector(serving.cache).books.planned == ()
    assert [t.ticket for t in serving.engine.submitted][-len(planned) :] == list(planned)
    serving.run()


def test_stores_that_are_refused_while_somebody_waits_are_news(make_serving, monkeypatch):
    serving = make_serving({"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}, 32, 64, hold=[STORE])
    serving.add("a", PROMPT[:9], 12)
    serving.steps_until(lambda: serving.known("a") == 15)
    serving.scheduler.wait(0.0)  # takes note of the arrival
    serving.cancelled()
    assert inside.connector(serving.cache).books.planned

    def refuse(transfer):
        raise RuntimeError("no link")

    slept: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(serving.engine, "submit", refuse)
        patch.setattr(serving.engine, "wait", slept.append)
        serving.scheduler.wait(9.0)
    assert slept == []
    assert inside.connector(serving.cache).books.planned == ()
    serving.engine.release()
    serving.run()


@pytest.mark.parametrize("copying", [False, True])
def test_closing_wakes_whoever_waits(copying: bool):
    if copying:
        cache, scheduler, _, step = loading(copy_engine=SlowLoads)
        scheduler.commit(step, [])
    else:
        cache = KVCache(SPEC, device_blocks={"full": 20})
        scheduler = Scheduler(cache)
    connector, asleep = inside.connector(scheduler), threading.Event()
    inside.woken(scheduler).clear()
    wait = connector.wait
    connector.wait = lambda timeout_s: (asleep.set(), wait(timeout_s))
    waiting = threading.Thread(target=scheduler.wait, args=(FOREVER_S,))
    closing = threading.Thread(target=cache.close)
    waiting.start()
    assert asleep.wait(PATIENCE_S)
    closing.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    if copying:
        cache.copy_engine.go.set()
    closing.join(PATIENCE_S)
    assert cache.is_closed


def test_wait_ends_when_the_next_copy_is_overdue(make_cache):
    _, scheduler, copier = storing(make_cache, deadline_s=5.0)
    copier.clock_s += 2.0
    scheduler.wait(3600.0)
    assert copier.asked_s == [3.0]
