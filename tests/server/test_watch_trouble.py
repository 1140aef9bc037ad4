"""/watch while something is wrong: a server that refuses most of what comes, and one whose engine has died."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from runner import AsyncLLM
from runner.server.page.finished import KEPT, PERCENTILES, TIMED, Finished
from runner.server.page.snapshot import Snapshots
from server.mortal import dies
from server.running import Running, serving
from server.test_owners import shared, watched
from server.test_watch import watching

ASK = {"prompt": "w1 w2", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture
def one(llm: AsyncLLM) -> Iterator[tuple[Running, httpx.Client]]:
    """A server whose counters are its own, around the engine of all."""
    with serving(llm) as running, httpx.Client(base_url=running.url, timeout=60) as web:
        yield running, web


@contextmanager
def full(llm: AsyncLLM, web: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The queue has one place, which is taken until the end of the block: the engine's thread is kept."""
    go_on = threading.Event()
    kept = llm.thread.call(lambda: go_on.wait(60))
    waits = threading.Thread(target=web.post, args=("/v1/completions",), kwargs={"json": ASK})
    with monkeypatch.context() as patch:
        patch.setattr(llm, "max_waiting_requests", 1)
        waits.start()
        try:
            while not llm.load()["waiting_tokens"]:
                web.get("/health")
            yield
        finally:
            go_on.set()
    waits.join()
    assert kept.result()


def told(snapshots: Snapshots, now_ms: int) -> tuple[dict[str, Any], dict[str, int]]:
    snapshot = snapshots.take(now_ms) | snapshots.rest()
    return snapshot, dict(zip(snapshots.columns, snapshot["numbers"], strict=True))


def test_who_is_refused_is_counted_and_pushes_nobody_out(
    one: tuple[Running, httpx.Client], llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, web = one
    snapshots = Snapshots(running.server.served, running.server.served.finished)
    assert web.post("/v1/completions", json=ASK, headers={"X-Request-Id": "real"}).status_code == 200
    snapshot, numbers = told(snapshots, 0)
    assert (snapshot["state"], numbers["refused"]) == ("serving", 0)
    with full(llm, web, monkeypatch):
        refused = [web.post("/v1/completions", json=ASK | {"stream": k % 2 == 0}) for k in range(KEPT + 3)]
        assert {one.status_code for one in refused} == {429}
        snapshot, numbers = told(snapshots, 1000)
        assert (snapshot["state"], numbers["refused"]) == ("overloaded", KEPT + 3)
        assert [row["id"] for row in snapshot["finished"]] == ["cmpl-real"]
    assert told(snapshots, 10_000)[0]["state"] == "overloaded"
    assert told(snapshots, 10_001)[0]["state"] == "serving"


def test_a_few_refusals_among_many_are_no_overload(one: tuple[Running, httpx.Client]) -> None:
    running, web = one
    snapshots = Snapshots(running.server.served, running.server.served.finished)
    told(snapshots, 0)
    assert web.post("/v1/completions", json={**ASK, "prompt": ["w1"] * 3}).status_code == 200
    running.admission.most_open, most = 0, running.admission.most_open
    try:
        assert [web.post("/v1/completions", json=ASK).status_code for _ in range(2)] == [429] * 2
        snapshot, numbers = told(snapshots, 1000)
        assert (snapshot["state"], numbers["refused"]) == ("serving", 2)
        assert [web.post("/v1/completions", json=ASK).status_code for _ in range(2)] == [429] * 2
        assert told(snapshots, 2000)[0]["state"] == "overloaded"
    finally:
        running.admission.most_open = most
    assert 'why="overloaded"} 4.0' in web.get("/metrics").text


def test_times_are_told_in_percentiles(one: tuple[Running, httpx.Client]) -> None:
    running, web = one
    snapshots = Snapshots(running.server.served, running.server.served.finished)
    assert snapshots.take(0)["times"] == {"first_token_s": None, "token_s": None}
    assert web.post("/v1/completions", json=ASK | {"max_tokens": 1}).status_code == 200
    times = snapshots.take(0)["times"]
    assert times["token_s"] is None and len(times["first_token_s"]) == len(PERCENTILES)
    assert web.post("/v1/completions", json=ASK | {"max_tokens": 9, "stream": True}).status_code == 200
    assert len(snapshots.take(0)["times"]["token_s"]) == len(PERCENTILES)


def test_percentiles_are_of_the_last_requests() -> None:
    finished = Finished()
    for k in range(TIMED + 37):
        finished.note_times(float(k), k + 10.0 * (k % 7), 1 + k % 11)
    last = range(37, TIMED + 37)
    first = sorted(float(k) for k in last)
    token = sorted(10.0 * (k % 7) / (k % 11) for k in last if k % 11)
    for name, values in (("first_token_s", first), ("token_s", token)):
        found = finished.times()[name]
        assert found == [pytest.approx(values[math.ceil(len(values) * p / 100) - 1], abs=1e-5) for p in PERCENTILES]


def test_a_dead_engine_is_told_with_its_reason_and_who_comes_later_pushes_nobody_out(
    mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(mortal, exit_on_engine_death=False) as running, httpx.Client(base_url=running.url) as web:
        finished = running.server.served.finished
        assert web.post("/v1/completions", json=ASK, timeout=60).status_code == 200
        assert Snapshots(running.server.served, finished).rest()["death"] is None
        body = ASK | {"max_tokens": 5_000, "stream": True}
        with web.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "cut"}, timeout=60) as cut:
            lines = cut.iter_lines()
            next(lines)
            monkeypatch.setattr(mortal.engine, "step", dies)
            assert '"engine_dead"' in "".join(lines)
        later = [web.post("/v1/completions", json=ASK).status_code for _ in range(KEPT + 3)]
        assert later == [503] * (KEPT + 3)
        with watching(web) as events:
            snapshot = next(told for name, told in events if name == "snapshot")
    assert (snapshot["state"], snapshot["death"]) == ("dead", "RuntimeError: planted death")
    ended = [(row["id"], row["reason"]) for row in snapshot["finished"]]
    assert [reason for _, reason in ended] == ["length", "error"] and ended[-1][0] == "cmpl-cut"


def test_of_several_keys_only_the_admins_reads_what_the_engine_died_of(
    mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared(mortal, exit_on_engine_death=False) as tenants:
        monkeypatch.setattr(mortal.engine, "step", dies)
        assert tenants.first.post("/v1/completions", json=ASK).status_code == 503
        told = [watched(web) for web in (tenants.first, tenants.second, tenants.admin)]
    assert [one["state"] for one in told] == ["dead"] * 3
    assert ["planted" in json.dumps(one) for one in told] == [False, False, True]
    assert [one["death"] is None for one in told] == [True, True, False]


def test_whoever_watches_hears_of_the_death_before_the_server_ends(
    mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(mortal) as running, httpx.Client(base_url=running.url, timeout=60) as web:
        with watching(web) as events:
            next(events)
            running.server.config.app.state.sampler.every_s = 1000.0
            monkeypatch.setattr(mortal.engine, "step", dies)
            assert web.post("/v1/completions", json=ASK).status_code == 503
            *_, (name, last) = events
        assert (name, last["state"]) == ("snapshot", "dead")
