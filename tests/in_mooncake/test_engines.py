"""Engines over a Mooncake Store whose processes die, freeze and forget: texts are right, and nobody waits for long.

Every text is compared with the oracle's as it is served (``Serving``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from breadth import breadth
from core.driving import Serving, prompt
from driving import SLOW_S
from patience import PATIENCE_S
from remote.engines import TOKENS, open_engine
from remote.mooncake_cluster import CLIENT_TTL_S, HOST, PORT, Cluster

from kvtier.coordinator import seek
from kvtier.remote.tier import FETCH_S

Open = Callable[[], Serving]
HIT = TOKENS // 16 * 16
FROZEN_S = 120
"""For so long the master believes in a storage process that is silent."""


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Engines over this cluster; they wait patiently for answers, lest a busy machine decides what is a hit."""
    monkeypatch.setattr(seek, "LEAST_S", 1.0)
    made: list[Serving] = []

    def make() -> Serving:
        made.append(open_engine(f"mooncake://{HOST}:{PORT}?timeout_s=1"))
        return made[-1]

    yield make
    for engine in made:
        assert engine.cache.core.coordinator.door.remote.close(90.0)
        engine.cache.close()


def served(engine: Serving, k: int) -> int:
    """Serves prompt k; the tokens of it that came from the store. No request waits longer than for a fetch."""
    begun = time.monotonic()
    engine.add(name := f"r{len(engine.requests)}", prompt(k, TOKENS), 3)
    while name not in engine.finished:
        assert time.monotonic() - begun < FETCH_S + SLOW_S, engine.scheduler.why_waiting()
        if not engine.step().num_tokens:
            engine.scheduler.wait(0.05)
    return engine.finished[name].cached_tokens["remote"]


def settles(engine: Serving) -> None:
    """Until its spills have ended, or are given up."""
    until = time.monotonic() + PATIENCE_S
    while engine.scheduler.has_work():
        assert time.monotonic() < until, "there is work for ever"
        engine.step()
        engine.scheduler.wait(0.05)


def forget(engine: Serving) -> None:
    """All that it has itself."""
    settles(engine)
    engine.cache.core.coordinator.pools.forget_all()
    engine.cache.core.host.forget_all()


def until_hit(engine: Serving, k: int) -> None:
    """The store is well again: what the engine computes, it finds there later."""
    until = time.monotonic() + PATIENCE_S
    while served(engine, k) != HIT:
        assert time.monotonic() < until, engine.cache.stats().remote
        forget(engine)
        time.sleep(0.2)


def test_what_one_engine_stores_another_has(cluster: Cluster, opens: Open) -> None:
    one, other = opens(), opens()
    assert served(one, 0) == 0
    settles(one)
    assert served(other, 0) == HIT
    assert other.cache.stats().remote.failed_fetches == 0


@pytest.mark.parametrize("which", ["storage", "master"])
def test_a_process_is_killed_and_comes_back_with_nothing(cluster: Cluster, opens: Open, which: str) -> None:
    engine = opens()
    served(engine, 0)
    forget(engine)
    cluster.processes[which].kill()
    assert [served(engine, k) for k in (0, 1, 2)] == [0, 0, 0]
    forget(engine)
    cluster.start_storage() if which == "storage" else cluster.start_master()
    until_hit(engine, 0)


@pytest.mark.parametrize("seconds", [2 * CLIENT_TTL_S, pytest.param(60, marks=breadth)])
@pytest.mark.parametrize("which", ["storage", "master"])
def test_a_process_freezes(cluster: Cluster, opens: Open, which: str, seconds: float) -> None:
    """Whatever comes of the first requests, all are served, and the store is left alone at last."""
    engine = opens()
    served(engine, 0)
    forget(engine)
    cluster.processes[which].freeze()
    begun, k = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        served(engine, k := k + 1)
    cluster.processes[which].thaw()
    forget(engine)
    until_hit(engine, 0)


def test_an_engine_meets_a_storage_process_that_hangs(tmp_path: Path, opens: Open) -> None:
    """The library waits for a minute: moves wait behind it, but requests no longer than for a fetch, and few of them.
    Questions are answered, and closing does not wait either."""
    cluster = Cluster(tmp_path, client_ttl_s=FROZEN_S)
    try:
        cluster.start_storage()
        writer = opens()
        for k in range(8):
            served(writer, k)
        settles(writer)
        engine = opens()
        cluster.processes["storage"].freeze()
        begun, took = time.monotonic(), []
        for k in range(8):
            took.append(-time.monotonic())
            assert served(engine, k) == 0
            took[-1] += time.monotonic()
        stats, remote = engine.cache.stats().remote, engine.cache.core.coordinator.door.remote
        assert (stats.breaker_open, sum(seconds > FETCH_S - 1 for seconds in took) <= 4) == (True, True), took
        assert time.monotonic() - begun < 4 * FETCH_S + SLOW_S
        assert stats.look_latency.counts[-1] == 0, "questions are answered"
        assert not remote.close(0.2)
        cluster.processes["storage"].thaw()
        assert remote.close(SLOW_S)
        until_hit(opens(), 0)
    finally:
        cluster.close()
