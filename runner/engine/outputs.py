"""Outputs for a caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier import KVTierError


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token in one place: the model's own log-probability, its rank (1 is the best), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


TokenChoices = dict[int, Logprob]
"""The token that stands in a place, and the likeliest ones for it, by token id."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer, or its new part since the last time.

    ``finish_reason``: None while it goes on. Then it is "stop" (EOS, a stop token or a stop string), "length", "abort",
    "capacity" (it outgrew the pools), "load_error" or "error". For "error", ``error`` says why: its logits were not
    finite, or a forward failed. ``stop_reason``: the stop string, or the stop token of ``stop_token_ids``; None for
    EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenChoices] | None = None
    """One entry a token, if they were asked for."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: KVTierError | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers; whole with ``finished``, else the part so far.

    ``outputs``: one for each of ``n`` answers; in a stream, the answers with something new. ``text``, ``token_ids``,
    ``finish_reason`` and ``error`` are the first answer's. ``cached_tokens``: prompt tokens that the first admission
    found on the device and in the host tier, known at the end. Seconds count from the call of ``generate``. ``ttft_s``:
    to the first token, None before it. ``latency_s``: to the end, or until now while it goes on.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    cached_tokens: Mapping[str, int]
    preemptions: int
    ttft_s: float | None
    latency_s: float
    prompt_logprobs: list[TokenChoices | None] | None = None
    """One entry a prompt token, if they were asked for; None for the first token, which has no token before it."""

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's token ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """The first answer's finish reason."""
        return self.outputs[0].finish_reason

    @property
    def error(self) -> KVTierError | None:
        """The first answer's error."""
        return self.outputs[0].error
