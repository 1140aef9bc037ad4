"""Several keys on one server: each holder sees its own requests, by whatever name, and may do what its key allows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kvtier import Journal
from runner import AsyncLLM, UnknownRequest, needle
from runner.engine.explanations import Explanations
from server.running import Running, serving
from server.test_explain import events
from server.test_watch import watching


@dataclass
class Tenants:
    """A server with two keys, and a client with each; ``admin`` has the admin key."""

    running: Running
    first: httpx.Client
    second: httpx.Client
    admin: httpx.Client


@contextlib.contextmanager
def shared(llm: AsyncLLM, **settings: Any) -> Iterator[Tenants]:
    settings = {"api_keys": ("one", "two"), "admin_api_keys": ("boss",), **settings}
    with serving(llm, **settings) as running, contextlib.ExitStack() as stack:
        running.server.config.app.state.sampler.every_s = 0.02
        clients = [
            stack.enter_context(httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {key}"}))
            for key in ("one", "two", "boss")
        ]
        yield Tenants(running, *clients)


@pytest.fixture(scope="module")
def tenants(llm: AsyncLLM) -> Iterator[Tenants]:
    with shared(llm) as tenants:
        yield tenants


def ask(web: httpx.Client, name: str = "", **more: Any) -> dict[str, Any]:
    body = {"prompt": "w1 w2 w3", "max_tokens": 2, "ignore_eos": True, **more}
    answer = web.post("/v1/completions", json=body, headers={"X-Request-Id": name} if name else {})
    assert answer.status_code == 200, answer.text
    return answer.json()


def parts(web: httpx.Client, name: str) -> list[dict[str, Any]] | None:
    """Of an explanation; None if there is none for this client."""
    answer = web.get(f"/v1/requests/{name.replace('#', '%23')}/explain")
    assert answer.status_code in (200, 404), answer.text
    return answer.json()["parts"] if answer.status_code == 200 else None


def watched(web: httpx.Client) -> dict[str, Any]:
    """The next snapshot."""
    with watching(web) as told:
        return next(data for name, data in told if name == "snapshot")


def engine_names(llm: AsyncLLM) -> list[str]:
    """What the engine calls its newest request, from the server's inside: "id#number"."""
    newest = llm.cache.journal.since()[-1].request_id
    return [newest, newest.partition("#")[0], newest.rpartition("-")[0]]


def test_nobody_explains_anothers_request_by_any_name(tenants: Tenants, llm: AsyncLLM) -> None:
    told = ask(tenants.first, "secret-of-one", n=2)
    names = [told["id"], "secret-of-one", *engine_names(llm)]
    assert [parts(tenants.second, name) for name in names] == [None] * len(names)
    assert len(parts(tenants.first, "secret-of-one") or []) == 2
    assert len(parts(tenants.admin, "secret-of-one") or []) == 2


def test_a_holder_explains_its_own_by_the_name_on_its_page(tenants: Tenants) -> None:
    told = ask(tenants.first, "on-my-page")
    row = next(one for one in watched(tenants.first)["finished"] if one["id"] == told["id"])
    assert parts(tenants.first, row["engine_id"].partition("#")[0])
    assert parts(tenants.second, row["engine_id"].partition("#")[0]) is None


def test_the_same_name_of_another_holder_replaces_nothing(tenants: Tenants) -> None:
    ask(tenants.first, "same", prompt="w1 w2 w3")
    ask(tenants.second, "same", prompt="w1 w2 w3 w4 w5")
    told = [(parts(web, "same") or [{}])[0].get("prompt_tokens") for web in (tenants.first, tenants.second)]
    assert told == [3, 5]


def test_each_holder_watches_its_own_requests(tenants: Tenants) -> None:
    for web, name in ((tenants.first, "of-one"), (tenants.second, "of-two")):
        ask(web, name)
    mine, its, all_of_them = (watched(web) for web in (tenants.first, tenants.second, tenants.admin))
    assert ["of-one" in json.dumps(one) for one in (mine, its, all_of_them)] == [True, False, True]
    assert ["of-two" in json.dumps(one) for one in (mine, its, all_of_them)] == [False, True, True]
    engine_ids = {one["engine_id"] for one in its["finished"]}
    assert not any(name in json.dumps(mine) for name in engine_ids)


def test_open_requests_of_others_are_counted_and_not_named(tenants: Tenants, llm: AsyncLLM) -> None:
    body = {"prompt": "w1", "max_tokens": 20_000, "ignore_eos": True, "stream": True, "skip_special_tokens": False}
    with tenants.first.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "long-one"}) as told:
        lines = told.iter_lines()  # kept, and so the stream
        next(lines)
        mine, its, all_of_them = (watched(web) for web in (tenants.first, tenants.second, tenants.admin))
    assert [len(one["running"]) for one in (mine, its, all_of_them)] == [1, 0, 1]
    assert [one["unnamed"] for one in (mine, its, all_of_them)] == [0, 1, 0]
    assert "long-one" in json.dumps(mine) and "long-one" not in json.dumps(its)


def test_only_the_admin_key_empties_the_cache(tenants: Tenants) -> None:
    prompt = needle.make_prompt(100, seed=81).text
    ask(tenants.first, prompt=prompt)
    refused = tenants.second.post("/reset_prefix_cache")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_needed")
    assert ask(tenants.first, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert tenants.admin.post("/reset_prefix_cache").json() == {"reset": True}
    assert ask(tenants.first, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("keys", "admin", "asks_with", "status"),
    [
        (("one", "two"), (), "one", 403),
        (("one",), (), "one", 200),
        (("one",), ("boss",), "one", 403),
        ((), ("boss",), "", 403),
        ((), ("boss",), "boss", 200),
        ((), (), "", 200),
    ],
)
def test_who_may_empty_the_cache(
    llm: AsyncLLM, keys: tuple[str, ...], admin: tuple[str, ...], asks_with: str, status: int
) -> None:
    with serving(llm, api_keys=keys, admin_api_keys=admin) as running:
        headers = {"Authorization": f"Bearer {asks_with}"} if asks_with else {}
        told = httpx.post(f"{running.url}/reset_prefix_cache", headers=headers)
        assert told.status_code == status
        assert status == 200 or "--admin-api-key" in told.json()["error"]["message"]


def test_salted_by_key_holders_see_nothing_of_each_other(llm: AsyncLLM) -> None:
    prompt = needle.make_prompt(333, seed=82).text

    def cached(web: httpx.Client, **more: Any) -> int:
        details: dict[str, int] = ask(web, prompt=prompt, max_tokens=1, **more)["usage"]["prompt_tokens_details"]
        return details["cached_tokens"]

    with shared(llm, salt_by_api_key=True) as tenants:
        assert cached(tenants.first) == 0
        assert cached(tenants.first) > 300
        assert cached(tenants.second) == 0
        assert cached(tenants.second, cache_salt="mine") == 0
        assert cached(tenants.second, cache_salt="mine") > 300
        assert cached(tenants.first, cache_salt="mine") == 0
    with shared(llm, salt_by_api_key=True) as tenants:  # another process with the same keys, on the same cache
        assert cached(tenants.first) > 300
    with shared(llm) as tenants:
        assert cached(tenants.first) == 0


def test_a_part_is_its_wholes_owners_and_stays_so() -> None:
    journal = Journal(100)
    explanations = Explanations(journal, lambda start, end: None)
    explanations.name("answer", ["inner"], "me")
    explanations.name("inner", ["inner#0"])
    events(journal, "inner#0")
    for name in ("answer", "inner"):
        assert len(explanations.explain(name, "me").parts) == len(explanations.explain(name, None).parts) == 1
        for owner in ("you", ""):
            with pytest.raises(UnknownRequest):
                explanations.explain(name, owner)


def test_another_callers_request_is_not_named_even_if_its_caller_is_forgotten() -> None:
    journal = Journal(100)
    explanations = Explanations(journal, lambda start, end: None)
    explanations.name("mine", ["a"], "me")
    events(journal, "a", behind="nobody-knows#7")
    assert "nobody-knows" not in json.dumps(explanations.explain("mine", "me").to_dict())
    assert "nobody-knows" in json.dumps(explanations.explain("mine", None).to_dict())
