"""A forked child has none of its parent's threads: what needs them says so at once, and touches nothing."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial
from typing import ClassVar

import inside
import numpy as np
import pytest

from core.driving import prompt
from core.forking import in_child
from core.outside import chain
from core.test_bad_doors import MEMORY, group
from kvtier import CacheManager, HostPlan, HostTier, HostTierScheduler, HostTierWorker, Request, Scheduler
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.host_tier.orders import Orders
from kvtier.remote.backends.uri import open_backend

REFUSED = r"CacheClosed: this {} is of the process that this one was forked from"


def refused(what: str, call) -> None:
    assert in_child(call).startswith(REFUSED.format(what))


def test_a_scheduler_with_a_host_tier_is_refused_in_a_child_and_goes_on_in_its_parent(make_serving):
    """A child that waited for its loads waited for ever."""
    serving = make_serving(blocks=8, host=32, copy_engine="threads")
    serving.serve("before", prompt(0, 20), 2)
    serving.add("under way", prompt(1, 9), 3)
    scheduler, cache = serving.scheduler, serving.cache
    for call in (
        scheduler.schedule,
        lambda: scheduler.add(Request("r", [1, 2], 1)),
        scheduler.reset_prefix_cache,
        cache.reset,
        cache.audit,
        lambda: cache.kv("full", 0),
        lambda: Scheduler(cache),
        lambda: CacheManager(cache),
    ):
        refused("cache", call)
    assert in_child(lambda: (scheduler.has_work(), scheduler.abort("under way"), scheduler.wait(1e9))) == str(
        (False, False, None)
    )
    serving.run()
    assert serving.serve("after", prompt(0, 20), 2).cached_tokens["device"] > 0


def test_a_cache_without_a_host_tier_has_no_threads_and_works_in_a_child(make_serving):
    serving = make_serving(blocks=8)
    assert in_child(lambda: serving.serve("r", prompt(0, 5), 2).finish_reason) == "length"


def test_host_tiers_and_their_halves_are_refused_in_a_child():
    plan = HostPlan([group()], 4096, 2048)
    with HostTier([group()], MEMORY.copy(), 2048, copy_engine="threads") as tier:
        keys = stored_by_threads(tier)
        text = tier.text(keys)
        hit = text.match(0, 33)
        for call in (
            tier.poll,
            partial(tier.wait, 1e9),
            partial(tier.overwrite, [0], [0]),
            partial(tier.text, keys),
            partial(text.match, 0, 33),
            partial(text.load, np.arange(len(hit.hosts))),
            partial(text.computed, [np.arange(8)], 32),
            tier.__enter__,
        ):
            refused("host tier", call)
        assert in_child(lambda: (tier.has_work, text.close())) == "(False, None)"
        text.load(np.arange(len(hit.hosts)))
        until_at_rest(tier)
        assert tier.audit() == []
    worker = HostTierWorker(plan, MEMORY.copy(), copy_engine="threads")
    for call in (
        partial(worker.begin, Orders()),
        partial(worker.load, Orders()),
        worker.poll,
        partial(worker.wait, 1e9),
        partial(worker.use_remote, "memory://", b"s"),
    ):
        refused("host tier", call)
    assert in_child(worker.close) == "True"
    assert worker.poll().loaded == ()
    worker.close()
    refused("host tier", HostTierScheduler(plan).take_orders)


def until_at_rest(tier: HostTier) -> None:
    while tier.has_work:
        tier.poll()
        tier.wait(0.1)


def stored_by_threads(tier: HostTier) -> np.ndarray:
    keys = chain(list(range(32)), 4)
    tier.text(keys).computed([np.arange(8)], 32, is_end=True)
    until_at_rest(tier)
    return keys


@pytest.mark.parametrize("uri", ["memory://", "file://{}"])
def test_a_store_in_a_child_fails_each_call_at_once_and_stays_its_parents(uri, tmp_path):
    store = open_backend(uri.format(tmp_path / "kv"))
    piece = memoryview(bytearray(b"12345678"))

    def ended(ticket: int) -> str:
        answers = []
        while not answers:
            store.wait(60.0)
            answers = store.poll()
        [answer] = answers
        assert answer.ticket == ticket
        return f"{answer.outcomes[0].value} {answer.reasons.get(0, '')}"

    def calls() -> str:
        told = []
        for ticket, call in enumerate((store.look, store.delete), 10):
            call(ticket, ["a"], 60.0)
            told.append(ended(ticket))
        for ticket, move in enumerate((store.put, store.get), 20):
            move(ticket, ["a"], [[piece]], 60.0)
            told.append(ended(ticket))
        assert all(line.startswith("failed this backend is of the process") for line in told), told
        return str(store.close(60.0))

    store.put(1, ["a"], [[piece]], 60.0)
    assert ended(1) == "ok "
    assert in_child(calls) == "True"
    store.look(2, ["a"], 60.0)
    assert ended(2) == "ok "
    assert store.close(60.0)


class Told(ThreadsEngine):
    """Tells which process has closed it."""

    closed_by: ClassVar[list[int]] = []

    def close(self, timeout_s):
        self.closed_by.append(os.getpid())
        return super().close(timeout_s)


@pytest.mark.parametrize("closes", [True, False], ids=["close", "drop"])
def test_a_child_neither_ends_copies_nor_gives_memory_back(closes, make_cache, monkeypatch):
    """Pinned memory is not even mapped there: what is unmapped at its address might be something else."""
    monkeypatch.setattr(Told, "closed_by", [])
    cache = make_cache(host=8, copy_engine=Told)
    tier = [HostTier([group()], MEMORY.copy(), 2048, "off", 30.0, Told, "memory://", model_id="m", key_secret=b"s")]
    freed = weakref.ref(inside.tier_arena(tier[0]))

    def end() -> str:
        if closes:
            tier[0].close()
            cache.close()
        tier.clear()
        gc.collect()
        return f"{Told.closed_by} {freed() is not None and freed().has_bytes}"

    assert in_child(end) == "[] True"
    tier[0].close()
    assert Told.closed_by == [os.getpid()]


def test_a_child_does_not_wait_for_a_lock_that_a_thread_had(make_cache):
    """Another thread was closing the cache when the process was forked."""
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(Told):
        def close(self, timeout_s):
            begun.set()
            goes_on.wait(60.0)
            return super().close(timeout_s)

    cache = make_cache(host=8, copy_engine=Slow)
    closing = threading.Thread(target=cache.close)
    closing.start()
    assert begun.wait(60.0)
    told = in_child(lambda: cache.close())
    goes_on.set()
    closing.join()
    assert told == "None"


def test_a_child_may_make_its_own():
    def own() -> bool:
        with HostTier([group()], MEMORY.copy(), 2048, copy_engine="threads") as tier:
            keys = stored_by_threads(tier)
            return tier.text(keys).match(0, 33).num_tokens == 32 and not tier.audit()

    with HostTier([group()], MEMORY.copy(), 2048, copy_engine="threads"):
        assert in_child(own) == "True"
