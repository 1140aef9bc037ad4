"""Who may ask: API keys, origins, request ids."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from runner import AsyncLLM
from runner.server.admission import Admission
from runner.server.errors import ApiError
from server.running import Running, serving


@pytest.fixture(scope="module")
def guarded(llm: AsyncLLM) -> Iterator[httpx.Client]:
    """A server with two keys that one web page may call."""
    options = {"api_keys": ("first", "sécond"), "allowed_origins": ("http://page",), "max_model_len": 64}
    with serving(llm, names=("a", "b"), **options) as running, httpx.Client(base_url=running.url) as web:
        yield web


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/load", "/openapi.json", "/nothing"])
def test_without_a_key_nothing_but_health_is_told(guarded: httpx.Client, path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
    ):
        told = guarded.get(path, headers=headers)
        assert (told.status_code, told.json()["error"]["code"]) == (401, "invalid_api_key")


def test_each_key_opens(guarded: httpx.Client) -> None:
    for key in ("first", "sécond"):
        told = guarded.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
        assert [card["id"] for card in told.json()["data"]] == ["a", "b"]
    assert guarded.get("/health").status_code == guarded.get("/ready").status_code == 200


def test_other_web_pages_are_not_allowed_to_look(guarded: httpx.Client, web: httpx.Client) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    mine = guarded.options("/v1/completions", headers=ask | {"Origin": "http://page"})
    assert mine.headers["access-control-allow-origin"] == "http://page"
    for client, origin in ((guarded, "http://other"), (web, "http://page")):
        assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": origin}).headers


def test_a_request_id_comes_back(web: httpx.Client) -> None:
    told = web.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert told.headers["x-request-id"] == "mine-1"
    assert told.json()["id"] == "cmpl-mine-1"
    made = {
        web.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] for given in ("", "a b", "x" * 129)
    }
    assert len(made) == 3
    assert all(name.isalnum() and len(name) == 32 for name in made)


def test_the_length_that_was_set_is_the_longest(guarded: httpx.Client) -> None:
    def told(length: int, **more: int) -> httpx.Response:
        body = {"prompt": [5] * length, "ignore_eos": True, **more}
        return guarded.post("/v1/completions", json=body, headers={"Authorization": "Bearer first"})

    assert told(64).json()["error"]["code"] == "context_length_exceeded"
    assert told(60, max_tokens=4).json()["usage"]["completion_tokens"] == 4
    assert told(60).json()["usage"]["completion_tokens"] == 4, "nobody has asked for the default of 16"
    beyond = told(60, max_tokens=5)
    assert beyond.status_code == 400
    error = beyond.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"].startswith("60 tokens of prompt and max_tokens=5 are 65 tokens; ")
    assert "64 tokens" in error["message"] and "at most 4" in error["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_may_not_ask_for_more_than_fits(guarded: httpx.Client, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "w1"}], field: 300_000}
    told = guarded.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer first"})
    assert told.status_code == 400 and told.json()["error"]["param"] == field
    assert f"{field}=300000" in told.json()["error"]["message"]


def test_nobody_is_sent_elsewhere_for_the_pages_of_the_documents(web: httpx.Client) -> None:
    """FastAPI's /docs and /redoc load scripts from a CDN."""
    assert [web.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404, 404, 200]


def test_only_so_many_are_open_at_once(running: Running) -> None:
    admission = Admission(2)
    tickets = [admission.enter(), admission.enter()]
    with pytest.raises(ApiError) as caught:
        admission.enter()
    assert caught.value.status_code == 429
    tickets[0].close()
    tickets[0].close()
    admission.enter().close()
