"""The forms of answers, for the OpenAPI document.

Owns       the names and types of all fields that an answer or an error has.
Does not   make answers: ``completions``, ``chat`` and ``errors`` do, and write plain dicts.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class PromptDetails(BaseModel):
    """Prompt tokens that were found in a cache, in all and by tier."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Choice(BaseModel):
    """One completion."""

    model_config = ConfigDict(extra="allow")

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


class Completion(BaseModel):
    """Answer of /v1/completions; chunks of a stream have the same form."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None


class ChatMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    """One answer."""

    model_config = ConfigDict(extra="allow")

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions; chunks of a stream have "delta" for "message"."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ErrorBody(BaseModel):
    """What is wrong, and with which parameter."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer but 2xx."""

    error: ErrorBody


class Rendered(BaseModel):
    """A prompt as the model reads it; vLLM's has more fields."""

    request_id: str
    model: str
    token_ids: list[int]


class Tokenized(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class ExplainedPart(BaseModel):
    """What became of one prompt and answer: see ``kvtier.Explanation``."""

    model_config = ConfigDict(extra="allow")

    request_id: str
    state: Literal["waiting", "loading", "running", "finished"]
    lines: list[str]
    hits: list[dict[str, Any]]
    waits: list[dict[str, Any]]
    preemptions: list[dict[str, Any]]
    pushed_out: list[dict[str, Any]]


class Explained(BaseModel):
    """Answer of /v1/requests/{id}/explain."""

    request_id: str
    state: Literal["waiting", "loading", "running", "finished"]
    text: str
    parts: list[ExplainedPart]


class Detokenized(BaseModel):
    """Answer of /detokenize."""

    prompt: str
