"""What goes wrong is told in OpenAI's shape, to whom it concerns and to nobody else."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest
from patience import PATIENCE_S, wait_until

from kvtier import RequestTooLarge
from runner import AsyncLLM, needle
from runner.engine.outputs import CompletionOutput
from runner.errors import NonFiniteLogits
from runner.server import streaming
from runner.server.errors import as_api_error, failed_answer
from server.running import Running, serving

PROMPT = needle.make_prompt(200, seed=3)
ASK = {"model": "needle", "prompt": PROMPT.text, "temperature": 0}
ENDLESS = ASK | {"max_tokens": 20_000, "ignore_eos": True}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_token": 5}, "max_token"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 129}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"file": "/etc/passwd"}}, "prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream": True, "echo": True, "logprobs": 1}, "stream"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"prompt": [461]}, None),
    ],
)
def test_a_bad_field_is_named(web: httpx.Client, more: dict[str, Any], param: str | None) -> None:
    told = web.post("/v1/completions", json=ASK | more)
    error = told.json()["error"]
    assert told.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


def test_what_changes_nothing_or_only_says_who_asks_passes(client: openai.OpenAI) -> None:
    extra = {"best_of": 1, "use_beam_search": False, "metadata": {"a": "b"}, "suffix": None}
    assert client.completions.create(**ASK, user="me", extra_body=extra).choices[0].text + " ." == PROMPT.answer


def test_a_prompt_that_never_fits_is_told_what_would(client: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**ASK, "prompt": [5] * 60_000})
    error = caught.value.body
    longest = error["longest"]
    assert error["code"] == "context_length_exceeded"
    assert error["needs"]["full"] == 60_000 // 16
    assert f"full: {error['have']['full']}" in error["message"]
    assert error["message"].startswith(f"the longest prompt that fits has {longest:,} tokens")
    assert running.server.served.longest == longest


def test_another_models_name_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(**{**ASK, "model": "other"})
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert client.models.retrieve("needle").id == client.models.list().data[0].id == "needle"


def test_paths_and_methods_that_there_are_not(web: httpx.Client) -> None:
    for told, status in ((web.get("/v1/nothing"), 404), (web.get("/v1/completions"), 405)):
        assert told.status_code == status
        assert told.json()["error"]["message"]


def test_too_many_waiting_are_sent_away_and_told_when_to_come_back(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.llm, "max_waiting_requests", 1)
    computing, go_on = threading.Event(), threading.Event()
    forward = running.llm.model.forward

    def held(*args: Any) -> Any:
        computing.set()
        assert go_on.wait(PATIENCE_S)
        return forward(*args)

    monkeypatch.setattr(running.llm.model, "forward", held)
    first = threading.Thread(target=client.completions.create, kwargs=ASK)
    first.start()
    assert computing.wait(PATIENCE_S)
    try:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**ASK)
        assert httpx.get(f"{running.url}/v1/load").json()["server_load"] == 1
        assert httpx.get(f"{running.url}/health").status_code == 200
    finally:
        go_on.set()
        first.join(PATIENCE_S)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


def test_a_forward_that_fails_fails_its_request_alone(
    running: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = running.llm.model.forward, iter(range(10**9))

    def fails_at_first(*args: Any) -> Any:
        if next(calls) in (0, 3):
            raise RuntimeError("planted")
        return forward(*args)

    monkeypatch.setattr(running.llm.model, "forward", fails_at_first)
    with pytest.raises(openai.InternalServerError):
        client.completions.create(**ASK)
    with pytest.raises(openai.APIError) as caught:  # in the stream: it has begun
        list(client.completions.create(**ASK, stream=True))
    assert caught.value.type == "server_error"
    assert client.completions.create(**ASK).choices[0].text + " ." == PROMPT.answer


def test_a_stream_that_fails_says_so_and_ends(
    running: Running, web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = running.llm.model.forward, iter(range(10**9))

    def fails_later(*args: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("planted")
        return forward(*args)

    monkeypatch.setattr(running.llm.model, "forward", fails_later)
    told = web.post("/v1/completions", json=ASK | {"stream": True})
    events = [line.removeprefix("data: ") for line in told.text.split("\n\n") if line]
    assert told.status_code == 200
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "server_error"
    assert "planted" not in told.text


def test_a_stream_that_waits_says_that_it_is_there(
    running: Running, web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is wrong with it afterwards comes as an event: its status is out already."""
    monkeypatch.setattr(streaming, "START_WAIT_S", 0.05)
    monkeypatch.setattr(streaming, "PING_S", 0.1)
    go_on, forward = threading.Event(), running.llm.model.forward

    def held(*args: Any) -> Any:
        assert go_on.wait(PATIENCE_S)
        raise RuntimeError("planted")

    monkeypatch.setattr(running.llm.model, "forward", held)
    with web.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        assert response.status_code == 200
        assert [next(lines), next(lines)] == [": waiting"] * 2
        go_on.set()
        told = [line for line in lines if line != ": waiting"]
    assert json.loads(told[0].removeprefix("data: "))["error"]["code"] == "failed"
    assert told[1:] == ["data: [DONE]"]
    monkeypatch.setattr(running.llm.model, "forward", forward)


def test_a_dead_engine_shows_everywhere(mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mortal.thread, "death", RuntimeError("planted"))
    with serving(mortal, exit_on_engine_death=False) as running, httpx.Client(base_url=running.url) as web:
        told = [
            web.get("/health"),
            web.get("/ready"),
            web.post("/v1/completions", json=ASK),
            web.post("/reset_prefix_cache"),
        ]
    assert [t.status_code for t in told] == [503] * 4
    assert {t.json()["error"]["code"] for t in told} == {"engine_dead"}


def test_a_request_that_leaves_itself_no_token_is_its_clients_fault(web: httpx.Client, llm: AsyncLLM) -> None:
    body = {**ASK, "allowed_token_ids": [12], "bad_words": [llm.tokenizer.decode([12])]}
    told = web.post("/v1/completions", json=body)
    assert (told.status_code, told.json()["error"]["code"]) == (400, "no_token_left"), told.text


def test_each_end_that_is_an_error_has_a_status() -> None:
    def told(reason: str | None, stops: bool = False) -> tuple[int, str] | None:
        error = NonFiniteLogits("float16") if reason == "error" else None
        found = failed_answer(CompletionOutput(0, "", [], finish_reason=reason, error=error), stops)
        return found and (found.status_code, found.error["code"])

    assert [told(reason) for reason in (None, "stop", "length")] == [None] * 3
    assert told("capacity") == (500, "capacity")
    assert told("load_error") == (500, "load_error")
    assert told("error") == (500, "failed")
    assert told("abort") == (500, "aborted")
    assert told("abort", True) == (503, "stopping")
    assert as_api_error(RequestTooLarge({"a": 3}, {"a": 2})).error["longest"] is None
    assert "planted" not in as_api_error(ZeroDivisionError("planted")).error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request_in_the_engine(running: Running, stream: bool) -> None:
    engine = running.llm.engine
    before = engine.generated_tokens
    with httpx.Client(base_url=running.url) as web:
        if stream:
            with web.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True, "n": 2}) as response:
                next(response.iter_bytes())
                wait_until(lambda: running.llm.load()["running"] == 2, "both run")
        else:
            with pytest.raises(httpx.ReadTimeout):
                web.post("/v1/completions", json=ENDLESS, timeout=httpx.Timeout(PATIENCE_S, read=0.3))
    wait_until(lambda: not any(running.llm.load().values()), "nothing is left")
    assert engine.generated_tokens - before < ENDLESS["max_tokens"], "it ended because all was computed"
