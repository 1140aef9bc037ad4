"""Sampling parameters, as vLLM users know them.

Promises   a senseless value is refused at construction; an unknown parameter is refused by name (``foreign.py``).
           Parameters are hashable and never change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from numbers import Integral, Real
from typing import Any

import numpy as np

from kvtier.machine.errors import InvalidRequest
from kvtier.machine.integers import shown
from runner.sampling.foreign import refusing_by_name
from runner.sampling.grammars.structured_outputs import StructuredOutputs

__all__ = ["GREEDY_BELOW", "RequestOutputKind", "SamplingParams", "StructuredOutputs"]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them would only overflow."""

MAX_ANSWERS = 128
MAX_LOGPROBS = 20
MOST_BIAS = 100.0
MOST_STOP_LETTERS = 4096
"""Most letters of all stop strings of a request together."""

MOST_BAD_LETTERS = 16384
"""Most letters of all bad words of a request together: each answer looks for them at each of its tokens."""


class RequestOutputKind(Enum):
    """Content of a stream's outputs: all so far, the new part, or everything once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@refusing_by_name
@dataclass(frozen=True)
class SamplingParams:
    """How to generate.

    ``max_tokens``   at least 1.
    ``temperature``  0 is greedy.
    ``top_p``        keeps the likeliest tokens that together have this probability, in (0, 1]; what ``top_k`` and
                     ``min_p`` keep counts as the whole.
    ``top_k``        keeps this many; 0 or -1 keeps all. Of tokens that are equally likely the lowest ids come first.
    ``seed``         same seed, same logits: same tokens, whatever the rest of the batch. None draws a fresh seed.
    ``stop``         strings that end the text, of 4,096 letters in all; they are not part of it.
    ``ignore_eos``   go on after the model's end-of-sequence token.

    By name only:

    ``n``            answers to a prompt, 1 to 128.
    ``min_p``        leaves out tokens less likely than this share of the likeliest one's probability, in [0, 1].
    ``presence_penalty``, ``frequency_penalty``  taken off the logits of tokens that the answer has, once and for each
                     time, in [-2, 2].
    ``repetition_penalty``  divides the positive logits of tokens that prompt or answer have, multiplies the negative
                     ones; above 0, 1 changes nothing.
    ``logit_bias``   {token id: added to its logit, in [-100, 100]}.
    ``stop_token_ids``  tokens that end the text as the model's own end-of-sequence tokens do.
    ``min_tokens``   fewest tokens before any token that ends the text; at most ``max_tokens``.
    ``allowed_token_ids``  no other token comes.
    ``bad_words``    texts that do not come, as the tokens that the tokenizer makes of them.
    ``structured_outputs``  the form of the text; it ends when it is complete.
    ``logprobs``, ``prompt_logprobs``  how many of the likeliest tokens to name beside each token, 0 to 20. They are the
                     model's own numbers: before penalties, biases, masks and temperature. None names nothing.
    ``include_stop_str_in_output``, ``skip_special_tokens``, ``detokenize``  how text is made of tokens.
    ``output_kind``  the content of each output of a stream.

    Options of vLLM, OpenAI and transformers that are not listed pass if they have the value that changes nothing
    (``num_beams=1``, ``best_of=None``; ``foreign.PARAMETERS`` has all). Anything else raises ``InvalidRequest``, which
    says what to use instead.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    _: KW_ONLY
    n: int = 1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        tokens, temperature, top_p, top_k = self.max_tokens, self.temperature, self.top_p, self.top_k
        _require(_is_int(tokens) and tokens >= 1, "max_tokens must be at least 1", tokens)
        _require(_is_number(temperature) and temperature >= 0, "temperature must be >= 0", temperature)
        _require(_is_number(top_p) and 0 < top_p <= 1, "top_p must be in (0, 1]", top_p)
        _require(_is_int(top_k) and top_k >= -1, "top_k must be -1, 0 or more", top_k)
        _require(self.seed is None or _is_int(self.seed), "seed must be an integer or None", self.seed)
        n, least = self.n, self.min_tokens
        _require(_is_int(n) and 1 <= n <= MAX_ANSWERS, f"n must be 1 to {MAX_ANSWERS}", n)
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, f"{name} must be in [-2, 2]", value)
        again = self.repetition_penalty
        _require(_is_number(again) and again > 0, "repetition_penalty must be above 0", again)
        _require(
            _is_int(least) and 0 <= least <= tokens, f"min_tokens must be 0 to max_tokens, which is {tokens}", least
        )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            value = getattr(self, name)
            _require(isinstance(value, (bool, np.bool_)), f"{name} must be True or False", value)
        kind, form = self.output_kind, self.structured_outputs
        _require(isinstance(kind, RequestOutputKind), "output_kind must be a RequestOutputKind", kind)
        _require(
            form is None or isinstance(form, StructuredOutputs), "structured_outputs must be StructuredOutputs", form
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = {True: 1, False: None}[value] if isinstance(value := getattr(self, name), bool) else value
            good = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
            _require(good, f"{name} must be 0 to {MAX_LOGPROBS}, or None", value)
            self._set(name, value)
        self._set("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        letters = sum(map(len, self.stop_strings))
        _require(letters <= MOST_STOP_LETTERS, f"stop must have at most {MOST_STOP_LETTERS:,} letters in all", letters)
        self._set("bad_words", _strings("bad_words", self.bad_words))
        letters, most = sum(map(len, self.bad_words or ())), MOST_BAD_LETTERS
        _require(letters <= most, f"bad_words must have at most {most:,} letters in all", letters)
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            _require(bool(self.allowed_token_ids), "allowed_token_ids must name a token", self.allowed_token_ids)
        self._set("logit_bias", _biases(self.logit_bias))
        _require(self.detokenize or not self.stop, "stop needs detokenize=True, with stop strings", self.stop)
        _require(form is None or not self.ignore_eos, "structured_outputs ends a text: ignore_eos must be False", True)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())

    def child(self, index: int) -> SamplingParams:
        """The parameters of answer ``index`` of ``n``: ``n=1``; the first keeps ``seed``, each other gets its own."""
        seed = self.seed
        if seed is not None and index:
            seed = int(np.random.SeedSequence(int(seed) % 2**64, spawn_key=(index,)).generate_state(1, np.uint64)[0])
        return replace(self, n=1, seed=seed)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ``InvalidRequest`` for token ids that a vocabulary of this size does not have."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            beyond = [token for token in getattr(self, name) or () if token >= vocab_size]
            _require(not beyond, f"{name} must have ids below {vocab_size}, the size of the vocabulary", beyond)


def _require(good: bool, what: str, value: object) -> None:
    if not good:
        raise InvalidRequest(f"{what}, got {shown(value)}")


def _strings(name: str, values: Any) -> tuple[str, ...]:
    good = values is None or (isinstance(values, Iterable) and not isinstance(values, str))
    _require(good, f"{name} must be strings", values)
    strings = tuple(values or ())
    _require(all(isinstance(s, str) and s for s in strings), f"{name} must be non-empty strings", values)
    return strings


def _ids(name: str, values: Any) -> tuple[int, ...]:
    _require(values is None or isinstance(values, Iterable), f"{name} must be token ids", values)
    ids = tuple(() if values is None else values)
    _require(all(_is_int(token) and token >= 0 for token in ids), f"{name} must be token ids, 0 or more", values)
    return tuple(dict.fromkeys(int(token) for token in ids))


def _biases(values: Any) -> dict[int, float] | None:
    """Biases by token id; ids may be text, as they are in JSON."""
    if values is None:
        return None
    what = "logit_bias must be {token id: a number in [-100, 100]}"
    _require(isinstance(values, Mapping), what, values)
    found: dict[int, float] = {}
    for key, bias in values.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        _require(_is_int(token) and token >= 0, what, {key: bias})
        _require(_is_number(bias) and abs(bias) <= MOST_BIAS, what, {key: bias})
        found[int(token)] = float(bias)
    return found or None


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False
