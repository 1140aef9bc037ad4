"""Routes that tell of the server, and the schema that tells of them all."""

from __future__ import annotations

import httpx

from runner import needle
from server.running import Running


def test_texts_and_ids(web: httpx.Client) -> None:
    prompt = needle.make_prompt(100, seed=3)
    told = web.post("/tokenize", json={"model": "needle", "prompt": prompt.text, "return_token_strs": True}).json()
    assert told["tokens"] == prompt.token_ids
    assert told["count"] == len(told["token_strs"]) == 100
    assert web.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": prompt.text}
    assert web.post("/detokenize", json={"tokens": [461]}).json()["error"]["param"] == "tokens"
    assert web.post("/tokenize", json={}).status_code == 400


def test_what_is_told_of_the_server(web: httpx.Client, running: Running) -> None:
    assert web.get("/version").json().keys() == {"version"}
    assert web.get("/load").json() == {"server_load": 0, "waiting": 0, "running": 0, "waiting_tokens": 0}
    assert web.get("/v1/models").json()["data"][0]["max_model_len"] == running.server.served.longest


def test_a_reset_forgets(web: httpx.Client) -> None:
    ask = {"prompt": needle.make_prompt(100, seed=8).text, "max_tokens": 1}

    def cached() -> int:
        return web.post("/v1/completions", json=ask).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert web.post("/reset_prefix_cache").json() == {"reset": True}
    assert cached() == 0


def test_metrics_count_what_was_served(web: httpx.Client) -> None:
    def tokens() -> float:
        told = web.get("/metrics")
        assert told.headers["content-type"].startswith("text/plain")
        name = 'vllm:generation_tokens_total{engine="0",model_name="needle"} '
        return float(next(line.removeprefix(name) for line in told.text.splitlines() if line.startswith(name)))

    before = tokens()
    web.post("/v1/completions", json={"prompt": "w1", "max_tokens": 5, "ignore_eos": True})
    assert tokens() - before == 5
