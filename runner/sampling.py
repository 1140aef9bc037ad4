"""Sampling parameters, as vLLM users know them.

Promises   what is not taken is refused by name, with what to use instead; only a value that changes nothing passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeVar

from kvtier._integers import shown
from kvtier.errors import InvalidRequest

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by them would only overflow."""


class RequestOutputKind(Enum):
    """What each output of a stream has."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_NOT_YET = "is not supported"
_NO_BEAMS = "is not supported: there is no beam search"
_AGAIN = "is not supported: give the prompt as often as you want answers, each time with a seed of its own"

ELSEWHERE: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {
        # other names of what there is
        "max_new_tokens": ("is called max_tokens here", ()),
        "max_completion_tokens": ("is called max_tokens here", ()),
        "max_output_tokens": ("is called max_tokens here", ()),
        "max_length": ("is not supported: use max_tokens, which counts new tokens only", ()),
        "do_sample": ("is not needed: temperature=0 is greedy, any other temperature samples", ()),
        "stop_sequences": ("is called stop here", ()),
        "stop_strings": ("is called stop here", ()),
        "random_seed": ("is called seed here", ()),
        "temp": ("is called temperature here", ()),
        "typical_p": ("is not supported: use top_p or top_k", (1, 1.0)),
        "min_p": ("is not supported: use top_p or top_k", (0, 0.0)),
        # several answers
        "n": (_AGAIN, (1,)),
        "num_return_sequences": (_AGAIN, (1,)),
        "best_of": (_AGAIN, (None, 1)),
        # where a text ends
        "stop_token_ids": (
            "is not supported: stop takes strings, and the model's own end-of-sequence tokens end a text",
            (None, [], ()),
        ),
        "eos_token_id": ("is not supported: the model's own ends a text, unless ignore_eos=True", (None,)),
        "min_tokens": ("is not supported: ignore_eos=True goes on to max_tokens", (0,)),
        "min_new_tokens": ("is not supported: ignore_eos=True goes on to max_tokens", (None, 0)),
        # how text is made of tokens
        "detokenize": ("is not supported: an output always has text, if the model has a tokenizer", (True,)),
        "skip_special_tokens": ("is not supported: text has no special tokens; token_ids has them", (True,)),
        "spaces_between_special_tokens": ("is not supported: text has no special tokens; token_ids has them", (True,)),
        "include_stop_str_in_output": ("is not supported: text ends before the stop string", (False,)),
        # logits
        "presence_penalty": (_NOT_YET, (0, 0.0)),
        "frequency_penalty": (_NOT_YET, (0, 0.0)),
        "repetition_penalty": (_NOT_YET, (1, 1.0)),
        "length_penalty": (_NO_BEAMS, (1, 1.0)),
        "no_repeat_ngram_size": (_NOT_YET, (0,)),
        "logit_bias": (_NOT_YET, (None, {})),
        "bad_words": (_NOT_YET, (None, [], ())),
        "allowed_token_ids": (_NOT_YET, (None,)),
        "logits_processors": (_NOT_YET, (None, [])),
        "guided_decoding": (_NOT_YET, (None,)),
        "structured_outputs": (_NOT_YET, (None,)),
        "response_format": (_NOT_YET, (None,)),
        # the rest
        "logprobs": (_NOT_YET, (None, False)),
        "top_logprobs": (_NOT_YET, (None,)),
        "prompt_logprobs": (_NOT_YET, (None,)),
        "num_beams": (_NO_BEAMS, (1,)),
        "use_beam_search": (_NO_BEAMS, (False,)),
        "early_stopping": (_NO_BEAMS, (False,)),
        "stream": ("is not supported: generate returns whole texts", (False,)),
        "truncate_prompt_tokens": ("is not supported: shorten the prompt before you give it", (None,)),
        "extra_args": (_NOT_YET, (None, {})),
    }
)
"""What vLLM, OpenAI and transformers have beside our own: what to say of it, and the values that change nothing."""

_Params = TypeVar("_Params")


def _refusing_by_name(cls: type[_Params]) -> type[_Params]:
    """A dataclass that says what it does not take, and takes that nevertheless if it changes nothing."""
    own = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
    init: Callable[..., None] = cls.__init__

    @wraps(init)
    def checked(self: _Params, *args: Any, **options: Any) -> None:
        others = {name: options.pop(name) for name in options.keys() - set(own)}
        refused = [_refusal(name, own) for name in sorted(others) if not _changes_nothing(name, others[name])]
        if refused:
            raise InvalidRequest(f"{'; '.join(refused)}. {cls.__name__} takes {', '.join(own)}")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


@_refusing_by_name
@dataclass(frozen=True)
class SamplingParams:
    """How to generate.

    ``max_tokens``   at least 1.
    ``temperature``  0 is greedy.
    ``top_p``        keeps the likeliest tokens that together have this probability, in (0, 1]; what ``top_k`` keeps
                     counts as the whole.
    ``top_k``        keeps this many; 0 or -1 keeps all. Of tokens that are equally likely the lowest ids come first.
    ``seed``         same seed, same logits: same tokens, whoever shares the batch. None draws a fresh one.
    ``stop``         strings that end the text; they are not part of it.
    ``ignore_eos``   go on after the model's end-of-sequence token.

    Options of vLLM, OpenAI and transformers that are not listed pass if they have the value that changes nothing
    (``n=1``, ``min_p=0``, ``logprobs=None``; ``ELSEWHERE`` has all). Anything else raises ``InvalidRequest``, which
    says what to use instead.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    n: int = 1
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def child(self, index: int) -> SamplingParams:
        """Those of the i-th of n answers."""
        seed = None if self.seed is None else self.seed + index
        return replace(self, n=1, seed=seed)

    def __post_init__(self) -> None:
        def require(good: bool, what: str, value: object) -> None:
            if not good:
                raise InvalidRequest(f"{what}, got {shown(value)}")

        tokens, temperature, top_p, top_k = self.max_tokens, self.temperature, self.top_p, self.top_k
        require(_is_int(tokens) and tokens >= 1, "max_tokens must be at least 1", tokens)
        require(_is_number(temperature) and temperature >= 0, "temperature must be >= 0", temperature)
        require(_is_number(top_p) and 0 < top_p <= 1, "top_p must be in (0, 1]", top_p)
        require(_is_int(top_k) and top_k >= -1, "top_k must be -1, 0 or more", top_k)
        require(self.seed is None or _is_int(self.seed), "seed must be an integer or None", self.seed)
        require(self.stop is None or isinstance(self.stop, Iterable), "stop must be strings", self.stop)
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        require(all(isinstance(s, str) and s for s in stops), "stop must be non-empty strings", self.stop)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop or ())


def _refusal(name: str, own: Sequence[str]) -> str:
    if name in ELSEWHERE:
        return f"{name} {ELSEWHERE[name][0]}"
    near = get_close_matches(name.lower(), own, n=1)
    return f"there is no option {shown(name)}" + (f" (is it {near[0]}?)" if near else "")


def _changes_nothing(name: str, value: object) -> bool:
    neutral = ELSEWHERE[name][1] if name in ELSEWHERE else ()
    return any(type(value) is type(other) and value == other for other in neutral)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False
