"""POST /v1/chat/completions, through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from patience import PATIENCE_S

from runner import AsyncLLM, needle
from runner.engine import stems
from server.running import Running, serving

PROMPT = needle.make_prompt(200, seed=3)
ANSWER = PROMPT.answer.removesuffix(" .")
ASK = {"model": "needle", "temperature": 0, "messages": [{"role": "user", "content": PROMPT.text}]}
WITH_TOOLS = "{% if tools %}{{ tools[0].function.name }} {% endif %}{{ style }} {{ messages[0].role }} " + (
    "{{ messages[-1].content }} {{ messages[-1].tool_calls[0].function.arguments.x if messages[-1].tool_calls }}"
)
TOOL = {"type": "function", "function": {"name": "w7", "parameters": {"type": "object"}}}


def test_an_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(**ASK)
    assert told.choices[0].message.content == ANSWER
    assert told.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.to_dict() | {"prompt_tokens_details": None} == told.usage.to_dict() | {
        "prompt_tokens_details": None
    }


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "ask K17 ? ->"}]
    client.chat.completions.create(**ASK)
    told = client.chat.completions.create(**{**ASK, "messages": turns}, max_completion_tokens=2)
    assert told.usage.prompt_tokens_details.cached_tokens >= 160
    assert told.usage.completion_tokens == 2


def test_the_second_user_of_a_system_prompt_hits_up_to_its_end(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside tools that the template does not write, streamed, and with several answers."""
    system = {"role": "system", "content": " ".join(f"w{k % 120}" for k in range(200))}
    ask = {"max_tokens": 1, "stream_options": {"include_usage": True}, "n": 2, "tools": [TOOL]}

    def cached(said: str, **more: Any) -> int:
        turns = [system, {"role": "user", "content": f"{said} " * 400}]
        answer = web.post("/v1/chat/completions", json={**ask, **more, "messages": turns, "stream": True}).text
        usage = json.loads(answer.split("data: ")[-2])["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    with (
        AsyncLLM(llm.model, device_memory="16MiB", host_memory=0) as own,
        serving(own) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE_S) as web,
    ):
        opening = 4  # <bos> page section S0
        assert [cached(said) for said in ("w7", "w8", "0")] == [0] + [(200 + opening) // 16 * 16] * 2
        monkeypatch.setattr(stems, "LEAST", 10_000)
        assert [cached(said, cache_salt="not told") for said in ("w7", "w8")] == [0, 0]


def test_parts_of_text_are_taken_and_images_are_refused(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": PROMPT.text}]
    told = client.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": parts}]})
    assert told.choices[0].message.content == ANSWER
    parts.append({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})
    with pytest.raises(openai.BadRequestError, match="only parts of type text"):
        client.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": parts}]})


def test_the_template_gets_tools_roles_and_keywords(
    running: Running, web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.llm.tokenizer, "chat_template", WITH_TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "w7", "arguments": '{"x": "w9"}'}}
    messages = [{"role": "developer", "content": "w1"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ask = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"style": "w3"}, "return_token_strs": True}
    told = web.post("/tokenize", json=ask).json()
    assert [s for s in told["token_strs"] if s.startswith("w")] == ["w7", "w3", "w9"]
    chat = {"messages": [{"role": "user", "content": "w1"}], "tools": [TOOL], "max_tokens": 1}
    counts = [
        web.post("/v1/chat/completions", json=chat | {"tool_choice": choice}).json()["usage"]["prompt_tokens"]
        for choice in ("auto", "none")
    ]
    assert counts[0] == counts[1] + 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "messages"),
    ],
)
def test_what_is_refused_is_named(web: httpx.Client, more: dict, param: str) -> None:
    told = web.post("/v1/chat/completions", json=ASK | more)
    assert told.status_code == 400
    assert told.json()["error"]["param"] == param


def test_logprobs_of_an_answer(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.token for entry in told] == PROMPT.answer.split()
    assert [entry.top_logprobs[0].token for entry in told] == PROMPT.answer.split()
    assert {len(entry.top_logprobs) for entry in told} == {2}
    assert bytes(told[0].bytes).decode() == told[0].token
    told = client.chat.completions.create(**ASK, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in told] == [[]] * len(told)


def test_a_form_is_asked_for_by_its_schema(client: openai.OpenAI) -> None:
    def asked(schema: dict) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        told = client.chat.completions.create(**ASK, response_format=form, max_completion_tokens=4)
        return told.choices[0].message.content

    assert asked({"enum": [7]}) == "7"
    with pytest.raises(openai.BadRequestError) as caught:
        asked({"$ref": "#/nowhere"})
    assert caught.value.param == "response_format"


ROUTERS_OWN = {
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
}
ROUTERS_OWN |= {"include_reasoning": True, "continue_final_message": False, "ignore_eos": False, "logprobs": False}
"""What vllm-router 0.1.17 writes into every chat."""


def test_what_a_router_adds_to_a_chat_changes_nothing(web: httpx.Client) -> None:
    said = [web.post("/v1/chat/completions", json=body).json() for body in (ASK, ASK | ROUTERS_OWN)]
    assert said[0]["choices"] == said[1]["choices"]
    body = {"model": "needle", "prompt": "w1 w2", "max_tokens": 2, "echo": False, "skip_special_tokens": True}
    added = {"no_stop_trim": False, "return_hidden_states": False, "ignore_eos": False, "stream": False}
    assert web.post("/v1/completions", json=body | added).status_code == 200
    for name in ("no_stop_trim", "return_hidden_states"):
        refused = web.post("/v1/chat/completions", json=ASK | {name: True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_a_router_reads_a_prompt_without_an_answer(web: httpx.Client) -> None:
    """It asks for the ids of a request as it came, and looks for them among the blocks of events."""
    for added in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, ROUTERS_OWN):
        told = web.post("/v1/chat/completions/render", json=ASK | added | {"return_token_ids": True}).json()
        answer = web.post("/v1/chat/completions", json=ASK | added | {"return_token_ids": True}).json()
        assert told["token_ids"] == answer["choices"][0]["prompt_token_ids"]
    assert (told["model"], len(told["request_id"])) == ("needle", 32)
    told = web.post("/v1/completions/render", json={"prompt": ["w1 w2", "w3"]}).json()
    assert [one["token_ids"] for one in told] == [web.post("/tokenize", json={"prompt": p}).json()["tokens"]
                                                  for p in ("w1 w2", "w3")]  # fmt: skip
    for path, body in (("/v1/chat/completions/render", ASK), ("/v1/completions/render", {"prompt": "w1"})):
        assert web.post(path, json=body | {"model": "other"}).status_code == 404
    assert web.post("/v1/chat/completions/render", json={**ASK, "messages": []}).status_code == 400


def test_a_router_that_knows_no_rendering_reads_a_chat_by_tokenize(web: httpx.Client) -> None:
    told = web.post("/tokenize", json={"continue_final_message": False, "messages": ASK["messages"]}).json()
    usage = web.post("/v1/chat/completions", json=ASK).json()["usage"]
    assert told["count"] == len(told["tokens"]) == usage["prompt_tokens"]
    assert told["max_model_len"] > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/chat/completions/render"])
def test_without_a_template_clients_are_told_what_to_ask_instead(
    running: Running, web: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """And no word of Python, which they do not speak."""
    monkeypatch.setattr(running.llm.tokenizer, "chat_template", None)
    told = web.post(path, json={"messages": [{"role": "user", "content": "w1"}]})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "messages")
    assert "/v1/completions" in told.json()["error"]["message"]
    assert "generate()" not in told.text
