"""Requests of clients: OpenAI's fields, and vLLM's fields that OpenAI lacks.

Owns       the fields of each request, their types and their bounds.
Promises   an unknown field is refused by name, as OpenAI's own server does: an answer to another question is of no use.
           Fields that only identify the client are passed over (``PASSED_OVER``). So is a field of OpenAI or vLLM with
           the value that changes nothing (``NEUTRAL``).
Does not   know what a field means for sampling (``served``), nor the forms of answers (``answer_forms``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from runner.sampling.foreign import Foreign
from runner.server.errors import ApiError, unknown_field

MOST_CHOICES = 128
MOST_PROMPTS = 2048
MOST_MESSAGES = 16_384
MOST_TOOLS = 1024
MOST_BIASES = 4096
MOST_STOPS = 64
MOST_LOGPROBS = 20
_INT64 = 2**63

PASSED_OVER = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "include_reasoning",
        "separate_reasoning",  # routers write these two into every chat
        "stream_reasoning",
    }
)
"""Fields that ask for nothing, or for nothing that could be otherwise in an answer of text."""

NEUTRAL = {
    "best_of": Foreign("is not supported: there is no beam search; use n", (None, 1)),
    "use_beam_search": Foreign("is not supported: there is no beam search", (None, False)),
    "length_penalty": Foreign("is not supported: there is no beam search", (None, 1, 1.0)),
    "suffix": Foreign("is not supported: text is only added at the end of a prompt", (None, "")),
    "spaces_between_special_tokens": Foreign("is not supported", (None, True)),
    "truncate_prompt_tokens": Foreign("is not supported: shorten the prompt before you send it", (None,)),
    "prompt_embeds": Foreign("is not supported: send text or token ids", (None,)),
    "logits_processors": Foreign("is not supported", (None, [])),
    "return_tokens_as_token_ids": Foreign("is not supported: return_token_ids gives the ids", (None, False)),
    "kv_transfer_params": Foreign("is not supported", (None,)),
    "vllm_xargs": Foreign("is not supported", (None, {})),
    "mm_processor_kwargs": Foreign("is not supported: prompts are text", (None, {})),
    "guided_decoding_backend": Foreign("cannot be chosen", (None,)),
    "guided_whitespace_pattern": Foreign("is not supported", (None,)),
    "chat_template": Foreign("is refused: the template is the server's own", (None,)),
    "functions": Foreign("is not supported: use tools", (None, [])),
    "function_call": Foreign("is not supported: use tools and tool_choice", (None, "none", "auto")),
    "modalities": Foreign("is not supported: answers are text", (None, ["text"])),
    "audio": Foreign("is not supported: answers are text", (None,)),
    "prediction": Foreign("is not supported", (None,)),
    "web_search_options": Foreign("is not supported: nothing is searched", (None,)),
    "no_stop_trim": Foreign("is not supported: use include_stop_str_in_output", (None, False)),
    "return_hidden_states": Foreign("is not supported", (None, False)),
    "verbosity": Foreign("is not supported: say it in the prompt", (None, "medium")),
}
"""Fields that are refused, with the reason, unless they have a value that changes nothing."""


class Body(BaseModel):
    """Base of what clients send."""

    model_config = ConfigDict(strict=True, extra="forbid")
    neutral: ClassVar[dict[str, Foreign]] = NEUTRAL

    model: str | None = Field(None, max_length=1024, description="the served name; may be left out")

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ApiError(400, "the body must be a JSON object, sent as application/json")
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in cls.neutral:
                if not cls.neutral[name].allows(value):
                    raise ApiError(400, f"{name} {cls.neutral[name].said}", param=name)
            elif name not in PASSED_OVER:
                raise ApiError(400, unknown_field(name, list(cls.model_fields)), param=name[:80])
        return kept


def _one_message(message: str) -> WrapValidator:
    """Reports one error; a union would report an error for each of its forms."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("form", message) from None

    return WrapValidator(check)


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Prompt = Annotated[
    Text
    | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)],
    _one_message(
        "must be text, a list of texts, a list of token ids, or a list of such lists; none of them empty, and at most "
        f"{MOST_PROMPTS} prompts"
    ),
]
Stop = Annotated[
    str | Annotated[list[str], Field(max_length=MOST_STOPS)],
    _one_message(f"must be a string, or a list of at most {MOST_STOPS}"),
]


def _few(value: Any) -> Any:
    """Refuses too many biases before each of them is looked at."""
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        raise PydanticCustomError("many", f"must have at most {MOST_BIASES} entries")
    return value


Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)]


class StreamOptions(BaseModel):
    """What a stream has beside text. ``continuous_usage_stats``: usage in every chunk (vLLM's)."""

    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a schema."""

    model_config = ConfigDict(strict=True)

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form that an answer must have."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(BaseModel):
    """vLLM's ``structured_outputs``: one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingBody(Body):
    """Fields that completions and chats share. None is the default: of the model if it has one, else OpenAI's."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 0
    temperature: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=65536)] | None = None
    bad_words: Annotated[list[str], Field(max_length=1024)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    guided_grammar: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="prompts of different salts share no cached blocks"
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(0, description="smaller is served first")
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}\z")] | None = None
    return_token_ids: bool | None = False


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool | None = True


class Message(BaseModel):
    """One turn. Fields beside these reach the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]


class Function(BaseModel):
    """A tool's name and parameters."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A function that the template may tell the model of."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class Conversation(Body):
    """Messages and options for a chat template."""

    neutral: ClassVar[dict[str, Foreign]] = NEUTRAL | {
        "add_special_tokens": Foreign("is not supported: the template writes them", (None, False)),
    }

    messages: Messages
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    documents: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(SamplingBody, Conversation):
    """POST /v1/chat/completions."""

    neutral: ClassVar[dict[str, Foreign]] = Conversation.neutral | {
        "echo": Foreign("is not supported in chats", (None, False)),
    }

    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, description="for the template")


class TokenizeBody(Conversation):
    """POST /tokenize: a prompt, or messages for the chat template."""

    neutral: ClassVar[dict[str, Foreign]] = NEUTRAL

    prompt: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
