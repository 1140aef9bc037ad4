"""A served model: an ``AsyncLLM`` under a name, and the way from a request's body to the engine.

Owns       the threads that read prompts.
Promises   nothing here keeps the event loop busy. Tokenizing and templates run on a few threads of their own.
           Long requests have other threads than short ones. A text that is longer than any prompt can be is refused
           unread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from kvtier import ConfigError, InvalidRequest
from runner.api.async_llm import AsyncLLM
from runner.api.turns import OnTheSide
from runner.metrics.metrics import Metrics
from runner.metrics.tracing import Tracing, otlp
from runner.sampling.params import RequestOutputKind, SamplingParams, StructuredOutputs
from runner.server.admission import Admission
from runner.server.auth import Keys
from runner.server.errors import TOO_LONG, ApiError
from runner.server.page.finished import Finished
from runner.server.protocol import Conversation, Message, SamplingBody
from runner.server.settings import Settings

READERS = 2
"""Threads for short requests, and as many for long ones."""
LONG_BYTES = 64 * 1024
"""Bytes of a request's body from which on it is a long one."""
_COMPOSED = 4
"""Letters that a normalizer may make one of."""
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SHARED = tuple(field.name for field in fields(SamplingParams) if field.name in SamplingBody.model_fields)
"""Parameters that are fields of a request by the same name."""
_TEMPLATES_OWN = frozenset(
    {"chat_template", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding"}
    | {"truncation", "max_length", "tokenizer_kwargs", "conversation", "messages", "tools", "documents"}
    | {"add_generation_prompt", "continue_final_message"}
)
"""Names that ``chat_template_kwargs`` may not have: the server says it, or a field of the request does."""

T = TypeVar("T")


@dataclass(frozen=True)
class Read:
    """A prompt that was read: its text if it came as text, its ids, int64 [n], and where others may part from it."""

    text: str | None
    token_ids: np.ndarray
    boundaries: tuple[int, ...] = ()


class Served:
    """One model behind HTTP."""

    def __init__(self, llm: AsyncLLM, settings: Settings, metrics: Metrics) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = metrics
        self.keys = Keys(settings.api_keys, settings.admin_api_keys)
        self.admission = Admission(settings.max_connections * 15 // 16, self.on_refusal)
        self.finished = Finished()
        self.limit = _shortest(settings.max_model_len, llm.inputs.max_tokens)
        """Tokens of prompt and answer together, by the model and by what the server was told; None: no end."""
        self.room = llm.cache.stats().device_capacity_tokens
        """Tokens of the longest prompt that the pools can hold."""
        self.defaults = _defaults(llm)
        self.tracing = _tracing(llm, settings)
        self.explaining = OnTheSide()
        self._readers = {long: ThreadPoolExecutor(READERS, f"kvtier-read-{long}") for long in ("long", "short")}
        self._longest_token = _longest_token(llm.tokenizer)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer that can be."""
        return self.room if self.limit is None else min(self.limit, self.room)

    def check_model(self, name: str | None) -> None:
        """Raises ``ApiError`` 404 for a name that nothing is served under."""
        if name is not None and name not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise ApiError(
                404, f"there is no model {name[:80]!r}; it is {known}", param="model", code="model_not_found"
            )

    def on_refusal(self) -> None:
        """A request is not let in: too much is open already."""
        self.metrics.on_refusal("overloaded")

    def close(self) -> None:
        """Ends the threads once they have read what they are reading, and sends the spans of requests that ended."""
        for readers in self._readers.values():
            readers.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()

    async def on_thread(self, work: Callable[[], T], body_bytes: int) -> T:
        """Runs ``work`` on a reader's thread."""
        readers = self._readers["long" if body_bytes >= LONG_BYTES else "short"]
        return await asyncio.get_running_loop().run_in_executor(readers, work)

    # --- prompts, read on a thread ----------------------------------------------------------------

    def read(self, prompt: str | list[Any], add_special_tokens: bool = True) -> list[Read]:
        """The prompts of a completion. Raises ``InvalidRequest`` and ``ApiError`` 400."""
        rows = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        return [self._read(row, add_special_tokens) for row in rows]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens and all."""
        if token_ids and max(token_ids) >= self.llm.inputs.vocab_size:
            raise InvalidRequest(f"tokens: ids are from 0 to {self.llm.inputs.vocab_size - 1}")
        return str(self._tokenizer.decode(list(token_ids)))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's text of each id."""
        return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))

    @property
    def _tokenizer(self) -> Any:
        if self.llm.tokenizer is None:
            raise InvalidRequest("this model's folder has no tokenizer; send token ids")
        return self.llm.tokenizer

    def _read(self, prompt: str | list[int], add_special_tokens: bool) -> Read:
        text = prompt if isinstance(prompt, str) else None
        if text is None:
            return Read(None, self._checked(self.llm.inputs.encode(prompt)))
        self._check_text(len(text))
        if add_special_tokens:
            return Read(text, self._checked(self.llm.inputs.encode(text)))
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return Read(text, self._checked(self.llm.inputs.encode(ids)))

    def read_chat(self, body: Conversation, **options: Any) -> Read:
        """A conversation as a prompt; ``options``: for its template. Raises ``InvalidRequest`` and ``ApiError`` 400."""
        if not self.llm.inputs.has_template:
            told = "this model has no chat template; use /v1/completions with the prompt written out"
            raise ApiError(400, f"{told}, or start the server with --chat-template", param="messages")
        extra = body.chat_template_kwargs or {}
        if taken := sorted(extra.keys() & _TEMPLATES_OWN):
            raise ApiError(400, f"{taken[0]} is not for chat_template_kwargs", param="chat_template_kwargs")
        messages = [_for_template(m, f"messages.{i}") for i, m in enumerate(body.messages)]
        self._check_text(sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str)))
        goes_on = bool(body.continue_final_message)
        given: dict[str, Any] = {
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None,
            "documents": body.documents,
            "add_generation_prompt": bool(body.add_generation_prompt) and not goes_on,
            "continue_final_message": goes_on,
        }
        given = {name: value for name, value in given.items() if value is not None}
        prompt = self.llm.inputs.chat(messages, **(extra | given | options))
        ids = self.llm.inputs.encode(prompt["prompt_token_ids"])
        return Read(None, self._checked(ids), prompt["boundaries"])

    def _check_text(self, letters: int) -> None:
        """Refuses, unread, what has more tokens than any prompt may have, however few they are."""
        fewest = -(-letters // self._longest_token) if self._longest_token else 0
        if fewest > self.longest:
            raise self._too_long(f"at least {fewest:,}")

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        if self.limit is not None and len(ids) >= self.limit:
            raise self._too_long(f"{len(ids):,}")
        return ids

    def _too_long(self, tokens: str) -> ApiError:
        message = f"the prompt has {tokens} tokens; the longest prompt that fits has {self._longest_prompt:,}"
        return ApiError(400, message, param="prompt", code=TOO_LONG, more={"longest": self._longest_prompt})

    def _too_many(self, prompt_tokens: int, max_tokens: int, field: str) -> ApiError:
        both, left = f"{prompt_tokens + max_tokens:,}", max(1, self.longest - prompt_tokens)
        message = (
            f"{prompt_tokens:,} tokens of prompt and {field}={max_tokens} are {both} tokens; prompt and answer may "
            f"have {self.longest:,} tokens together, so ask for at most {left:,}"
        )
        return ApiError(400, message, param=field, code=TOO_LONG)

    @property
    def _longest_prompt(self) -> int:
        return self.room if self.limit is None else min(self.limit - 1, self.room)

    # --- sampling ---------------------------------------------------------------------------------

    def sampling(
        self,
        body: SamplingBody,
        prompt_tokens: int,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        default: int | None = None,
        field: str = "max_tokens",
        **more: Any,
    ) -> SamplingParams:
        """The engine's parameters. ``max_tokens``: what ``field`` asks for; None: ``default``, or as many as there is
        room for behind ``prompt_tokens``.

        Raises ``InvalidRequest`` and ``ApiError`` 400.
        """
        room = self.longest - prompt_tokens
        if max_tokens is None:
            max_tokens = max(1, room if default is None else min(default, room))
        elif room >= 0 and max_tokens > max(1, room):  # a prompt that is too long itself is told so later
            raise self._too_many(prompt_tokens, max_tokens, field)
        form = form_asked_for(body)
        asked = {name: getattr(body, name) for name in _SHARED} | {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "stop": body.stop or None,
            "logit_bias": _by_id(body.logit_bias),
            "structured_outputs": None if form is None else StructuredOutputs(**form[1]),
            "output_kind": RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        }
        said = {name: value for name, value in {**asked, **more}.items() if value is not None}
        return SamplingParams(**(self.defaults | said))


def _defaults(llm: AsyncLLM) -> dict[str, Any]:
    """Defaults of sampling, as the model's generation config has them, for what a request does not say."""
    config = getattr(llm.model.model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in _DEFAULTS}
    return {name: value for name, value in found.items() if value is not None}


def _tracing(llm: AsyncLLM, settings: Settings) -> Tracing | None:
    if not settings.traces_endpoint:
        return None
    if not llm.cache.journal.is_on:
        raise ConfigError("traces are told from the journal; load the model with journal_events=32768")
    return Tracing(llm.cache.journal, llm.explanations, settings.names[0], otlp(settings.traces_endpoint, "kvtier"))


def _shortest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _longest_token(tokenizer: Any) -> int:
    """Letters that one token can stand for at most; 0 if there is no end to it, as for words that are not known."""
    if tokenizer is None:
        return 0
    probe = "a  b \n\n\u20dd\U00010348 " + "z" * 300
    known = tokenizer.decode(tokenizer(probe, add_special_tokens=False)["input_ids"], skip_special_tokens=False)
    if probe.strip() not in known:
        return 0
    return _COMPOSED * max(map(len, tokenizer.get_vocab()))


def _by_id(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """OpenAI's logit_bias, whose keys are ids as text."""
    try:
        return None if bias is None else {int(token): value for token, value in bias.items()}
    except ValueError:
        raise ApiError(400, "logit_bias: keys are token ids", param="logit_bias") from None


def form_asked_for(body: SamplingBody) -> tuple[str, dict[str, Any]] | None:
    """The field that says what form the answer has, and the same in vLLM's words."""
    found: dict[str, dict[str, Any]] = {}
    if (asked := body.response_format) is not None and asked.type != "text":
        if asked.type == "json_object":
            found["response_format"] = {"json_object": True}
        elif asked.json_schema is None:
            raise ApiError(400, "response_format: json_schema is missing", param="response_format")
        else:
            found["response_format"] = {"json": asked.json_schema.json_schema}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    for kind in ("json", "regex", "choice", "grammar"):
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found[f"guided_{kind}"] = {kind: value}
    if len(found) > 1:
        raise ApiError(400, f"{' and '.join(found)} cannot both say what form the answer has", param=min(found))
    return next(iter(found.items()), None)


def _for_template(message: Message, where: str) -> dict[str, Any]:
    """A message as templates expect it: text for content, and arguments of tool calls as values."""
    plain = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":  # OpenAI's newer name of it, which few templates know
        plain["role"] = "system"
    if isinstance(message.content, list):
        plain["content"] = "\n".join(_text_of(part, f"{where}.content.{i}") for i, part in enumerate(message.content))
    plain.setdefault("content", "")
    for call in plain.get("tool_calls", ()):
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise ApiError(400, f"{where}.tool_calls: arguments are not JSON", param="messages") from None
    return plain


def _text_of(part: str | Mapping[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind in ("text", "input_text", "output_text", "refusal") and isinstance(text, str):
        return text
    raise ApiError(400, f"{where}: only parts of type text are taken; this model sees no images, audio or files",
                   param="messages")  # fmt: skip
