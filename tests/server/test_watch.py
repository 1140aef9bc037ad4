"""/ and /watch: what the page is told, to whom, and what that may cost. The page itself: test_page.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from patience import PATIENCE_S, wait_until

from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.remote.breaker import Tried
from runner import AsyncLLM, SamplingParams, needle
from runner.server.errors import ApiError
from runner.server.page import sampler as sampling, snapshot
from runner.server.page.finished import KEPT as FINISHED
from runner.server.page.routes import STATIC
from runner.server.page.sampler import Listener, Sampler
from runner.server.page.snapshot import PLACES, Snapshots
from server.running import Running, gate, serving

SECRET = "w7 w8 w9"


@pytest.fixture(autouse=True)
def quick(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.server.config.app.state.sampler, "every_s", 0.02)


@contextlib.contextmanager
def watching(web: httpx.Client, **options: Any) -> Iterator[Iterator[tuple[str, Any]]]:
    """(name, data) of each event."""
    with web.stream("GET", "/watch", **options) as told:
        assert (told.status_code, told.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")

        def events() -> Iterator[tuple[str, Any]]:
            name = ""
            for line in told.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field in ("data", "retry"):
                    yield (name if field == "data" else field), json.loads(value)

        yield events()


def refusal(web: httpx.Client) -> httpx.Response:
    """What is told instead of a stream, which would never end."""
    with web.stream("GET", "/watch") as told:
        assert told.status_code >= 400
        told.read()
        return told


def numbers(past: dict[str, Any], told: dict[str, Any]) -> dict[str, int]:
    return dict(zip(past["columns"], told["numbers"], strict=True))


def test_the_past_comes_first_and_then_snapshots(web: httpx.Client, running: Running) -> None:
    with watching(web) as events:
        assert next(events) == ("retry", 2000)
        name, past = next(events)
        assert (name, len(past["values"]), past["server"]["models"]) == ("history", len(past["columns"]), ["needle"])
        seen = [next(events) for _ in range(3)]
    assert [name for name, _ in seen] == ["snapshot"] * 3
    times = [told["numbers"][0] for _, told in seen]
    assert times == sorted(set(times))
    with watching(web) as events:  # whoever comes later has the same past
        _, later = [next(events) for _ in range(2)][1]
    assert later["values"][0][-3:] and set(times) <= set(later["values"][0])


def test_pools_and_tokens_are_those_of_the_metrics(web: httpx.Client, llm: AsyncLLM) -> None:
    ask = {"prompt": needle.make_prompt(200, seed=31).text, "max_tokens": 3, "ignore_eos": True}
    web.post("/reset_prefix_cache")
    before = llm.cache.stats()
    for _ in range(2):
        assert web.post("/v1/completions", json=ask).status_code == 200
    with watching(web) as events:
        (_, past), (_, told) = [next(events) for _ in range(3)][1:]
    found, stats = numbers(past, told), llm.cache.stats()
    for tier, pools in (("device", stats.device), ("host", stats.host)):
        for group, pool in pools.items():
            assert sum(found[f"{tier}.{group}.{place}"] for place in PLACES) == pool.usable
            assert past["server"]["tiers"][tier]["usable"][group] == pool.usable
    grown = {source: found[f"tokens.{source}"] for source in ("device", "host", "computed")}
    assert sum(grown.values()) == stats.prefix_tokens["queried"]
    assert grown["device"] - before.prefix_tokens["device"] == 192
    assert found["generated"] == stats.generated_tokens
    assert past["server"]["ends"] == list(stats.ends)
    for name, of in stats.ends.items():
        assert [found[f"ends.{name}.{what}"] for what in ("hits", "missed", "pays")] == [of.hits, of.missed, of.pays]
    assert sum(of.hits for of in stats.ends.values()) == sum(of.hits for of in before.ends.values()) + 1
    assert found["stored_bytes"] == stats.transfers.stored_bytes
    last = told["finished"][-1]
    assert [last[name] for name in ("prompt", "device", "host", "generated", "reason")] == [200, 192, 0, 3, "length"]


def test_a_store_is_told_of_if_there_is_one(
    web: httpx.Client, running: Running, stored: tuple[AsyncLLM, Iterator[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = Snapshots(running.server.served, running.server.served.finished)
    assert not [name for name in without.columns if "remote" in name]
    assert (without.facts()["remote"], without.take(0)["remote"]) == (None, None)
    llm, prompts = stored
    with serving(llm) as one, httpx.Client(base_url=one.url, timeout=PATIENCE_S) as client:
        one.server.config.app.state.sampler.every_s = 0.02
        body = {"prompt": next(prompts), "max_tokens": 2, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        with watching(client) as events:
            (_, past), (_, told) = [next(events) for _ in range(3)][1:]
        found, stats = numbers(past, told), llm.cache.stats()
        assert stats.remote is not None
        assert (past["server"]["remote"], told["remote"]) == ({"kind": "file"}, "on")
        assert found["tokens.remote"] == stats.prefix_tokens["remote"] >= 288
        assert sum(found[f"tokens.{source}"] for source in ("device", "host", "remote", "computed")) \
            == stats.prefix_tokens["queried"]  # fmt: skip
        assert found["remote.fetched_bytes"] == stats.remote.fetched_bytes > 0
        last = told["finished"][-1]
        assert [last[name] for name in ("device", "host", "remote", "prompt")] == [0, 0, 288, 300]
        snapshots = Snapshots(one.server.served, one.server.served.finished)
        remote = llm.cache.core.coordinator.door.remote
        for _ in range(3):
            remote.breaker.on_end(Tried.MOVE, False, 0.0)
        assert snapshots.take(0)["remote"] == "alone"
        remote.breaker.on_end(Tried.MOVE, True, 0.0)
        monkeypatch.setattr(remote, "is_on", False)
        assert snapshots.take(0)["remote"] == "off"


def test_blocks_that_loads_bring_are_told_apart(
    running: Running, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(running.server.served, running.server.served.finished)
    nothing, keys = np.zeros(3, np.int32), np.zeros((3, 2), np.uint64)

    def transfer(direction: Direction, state: TransferState) -> Transfer:
        groups = np.array([0, 0, 2], np.int32)
        return Transfer(1, direction, groups, nothing, nothing, keys, 0, 0, state=state)

    live = [transfer(Direction.LOAD, TransferState.IN_FLIGHT), transfer(Direction.STORE, TransferState.IN_FLIGHT)]
    live.append(transfer(Direction.LOAD, TransferState.EXPIRED))
    monkeypatch.setattr(llm.cache.core.coordinator.connector.ledger, "live", lambda: live)
    stats = llm.cache.stats()
    stats = replace(stats, device={name: replace(pool, held=1, empty=0) for name, pool in stats.device.items()})
    found = dict(zip(snapshots.columns, snapshots._numbers(stats, 0), strict=True))
    told = {group: (found[f"device.{group}.held"], found[f"device.{group}.loading"]) for group in stats.device}
    assert told == {"full": (0, 1), "sliding": (1, 0), "chunked": (0, 1)}


def test_a_request_is_named_as_its_client_names_it_and_no_text_is_told(web: httpx.Client, running: Running) -> None:
    body = {"prompt": SECRET, "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 2}
    with web.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "watched-1"}) as told:
        answers = told.iter_lines()
        next(answers)
        with watching(web) as events:
            open_ones = next(s["running"] for name, s in events if name == "snapshot" and s["running"])
    assert {(one["id"], one["answer"]) for one in open_ones} <= {("cmpl-watched-1", 0), ("cmpl-watched-1", 1)}
    assert all(one["prompt"] == 3 and one["state"] in ("prefill", "decode") for one in open_ones)
    with watching(web) as events:
        told = (s for name, s in events if name == "snapshot")
        ended = next(s for s in told if any(f["id"] == "cmpl-watched-1" for f in s["finished"]))
    mine = next(f for f in ended["finished"] if f["id"] == "cmpl-watched-1")
    assert (mine["reason"], mine["prompt"]) == ("abort", 3)
    assert not any(word in json.dumps([open_ones, ended]) for word in SECRET.split())


def test_reasons_to_wait_are_told_in_words(running: Running, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_ROWS", 2)
    snapshots = Snapshots(running.server.served, running.server.served.finished)
    prompt = needle.make_prompt(12_000, seed=33).token_ids  # more than a step computes

    async def ask(name: str) -> None:
        async for _ in llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1), name):
            pass

    async def go() -> dict[str, Any]:
        asked = [asyncio.create_task(ask(f"twin-{i}")) for i in range(4)]
        while llm.load()["waiting_tokens"] < 4 * len(prompt):
            await asyncio.sleep(0.001)
        all_are_here.set()
        told = snapshots.rest()
        while not any(one["wait"] == "twin" for one in told["waiting"]):
            await asyncio.sleep(0.001)
            told = snapshots.rest()
        seen.set()
        await asyncio.gather(*asked)
        return told

    gate(monkeypatch, llm, all_are_here := threading.Event(), seen := threading.Event())
    try:
        told = asyncio.run(asyncio.wait_for(go(), PATIENCE_S / 2))
    finally:
        all_are_here.set()
        seen.set()
    first = told["running"][0]["id"]
    assert f"request '{first}' is computing its prefix" in {one["why"] for one in told["waiting"]}
    assert len(told["waiting"]) == 2 or told["unnamed"] == 0
    assert len(told["running"]) + len(told["waiting"]) + told["unnamed"] <= 4


def test_listeners_are_bounded_and_leave_when_they_go(web: httpx.Client, running: Running) -> None:
    sampler = running.server.config.app.state.sampler
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sampler, "most_listeners", 2)
        events = [stack.enter_context(watching(web)) for _ in range(2)]
        assert [next(one)[0] for one in events] == ["retry"] * 2
        refused = refusal(web)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_listeners")
        assert refused.headers["retry-after"] == "10"
    wait_until(lambda: not sampler.listeners, "the server sees that they have left")
    wait_until(lambda: sampler._task is None, "nobody listens: nobody looks")


class Counting:
    """A source whose snapshots are numbered."""

    columns = ("time", "n")

    def __init__(self) -> None:
        self.taken = 0

    def facts(self) -> dict[str, Any]:
        return {}

    def take(self, now_ms: int) -> dict[str, Any]:
        self.taken += 1
        return {"numbers": [now_ms, self.taken]}

    def rest(self, owner: str | None) -> dict[str, Any]:
        return {}


def test_a_slow_listener_misses_snapshots_and_nothing_is_kept_for_it() -> None:
    async def go() -> None:
        sampler = Sampler(Counting(), kept=5)
        slow, gone = sampler.listen(), sampler.listen()
        gone.close()
        gone.close()
        for _ in range(22):
            sampler.sample()
        assert slow._newest is not None and b"22]" in slow._newest
        told = await slow.next() or b""
        assert b"22]" in told and told.count(b"event: ") == 1
        assert sampler.history.columns()[1] == [18, 19, 20, 21, 22]
        slow.close()
        assert not sampler.listeners

    asyncio.run(go())


def test_each_snapshot_is_taken_once_for_all_and_the_past_is_written_once() -> None:
    async def go() -> None:
        source = Counting()
        sampler = Sampler(source, every_s=PATIENCE_S)
        listeners = [sampler.listen() for _ in range(50)]
        streams = [sampler.events(one) for one in listeners]
        first = [await anext(stream) for stream in streams]
        assert len({id(part) for part in [sampler._history(), sampler._history()]}) == len(set(first)) == 1
        before = source.taken
        told = await asyncio.gather(*(anext(stream) for stream in streams))
        assert source.taken - before == len({id(one) for one in told}) == 1
        for one in listeners:
            one.close()

    asyncio.run(go())


def test_a_stream_without_news_says_so_and_one_that_ends_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "QUIET_S", 0.001)

    async def go() -> None:
        listener = Listener(lambda _: None)
        assert (await listener.next() or b"").startswith(b": ")
        listener.put(b"data: 1\n\n")
        listener.end()
        assert await listener.next() == b"data: 1\n\n", "the last one: it tells of the end"
        assert [await listener.next() for _ in range(2)] == [None] * 2
        sampler = Sampler(Counting())
        sampler.close()
        with pytest.raises(ApiError) as caught:
            sampler.listen()
        assert caught.value.status_code == 503

    asyncio.run(go())


def test_a_snapshot_that_fails_is_logged_and_the_next_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Counting):
        def take(self, now_ms: int) -> dict[str, Any]:
            told = super().take(now_ms)
            if self.taken == 1:
                raise RuntimeError("planted")
            return told

    async def go() -> None:
        sampler = Sampler(Failing(), every_s=0.001)
        listener = sampler.listen()
        assert b",2]" in (await listener.next() or b"")
        listener.close()

    asyncio.run(go())
    assert [record.message for record in caplog.records] == ["no snapshot for the page"]


def test_who_watches_while_the_server_ends_is_let_go(llm: AsyncLLM) -> None:
    with contextlib.ExitStack() as stack, httpx.Client(timeout=PATIENCE_S) as web:
        server = stack.enter_context(serving(llm))
        web.base_url = httpx.URL(server.url)
        events = stack.enter_context(watching(web))
        next(events)
        server.server.should_exit = True
        assert all(name in ("history", "snapshot") for name, _ in events)  # to its end: a cut stream raises


def test_the_page_needs_no_key_and_its_data_do(llm: AsyncLLM) -> None:
    options = {"api_keys": ("key",), "allowed_origins": ("http://page",)}
    with serving(llm, **options) as running, httpx.Client(base_url=running.url) as web:
        assert [web.get(path).status_code for path in ("/", "/page/app.js", "/page/style.css")] == [200] * 3
        assert refusal(web).json()["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": "Bearer key", "Origin": "http://page"}
        with web.stream("GET", "/watch", headers=headers) as told:
            assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, "http://page")


def test_a_server_may_have_no_page(llm: AsyncLLM) -> None:
    with serving(llm, page=False) as running, httpx.Client(base_url=running.url) as web:
        assert [web.get(path).status_code for path in ("/", "/page/app.js", "/watch")] == [404] * 3


def test_files_of_the_page_come_with_a_policy_and_only_they_come(web: httpx.Client) -> None:
    page = web.get("/")
    assert "<script" not in page.text.replace('<script type="module" src="page/app.js">', "")
    assert not any(mark in page.text for mark in ("style=", "onclick=", "http:", "https:"))
    for path in ("/", *(f"/page/{file.name}" for file in STATIC.iterdir())):
        told = web.get(path)
        assert told.status_code == 200
        assert told.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in told.headers["content-security-policy"]
        assert told.headers["x-content-type-options"] == "nosniff"
        assert web.get(path, headers={"If-None-Match": told.headers["etag"]}).status_code == 304
        assert web.head(path).status_code == 200
    assert web.head("/watch").headers["content-type"].startswith("text/event-stream")  # and it ends
    for path in ("/page/", "/page/none.js", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/..%2froutes.py"):
        assert web.get(path).status_code == 404


def test_only_the_last_requests_are_kept(web: httpx.Client, running: Running) -> None:
    for _ in range(2):
        told = web.post("/v1/completions", json={"prompt": ["w1"] * (FINISHED // 2 + 3), "max_tokens": 1})
        assert told.status_code == 200
    assert len(running.server.served.finished.rows) == FINISHED
