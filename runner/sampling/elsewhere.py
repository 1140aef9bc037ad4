"""Sampling parameters of other engines that are missing here, and the answer to them.

Promises   an unknown parameter is refused by name, with its substitute; only a value that changes nothing passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from kvtier.machine.errors import InvalidRequest
from kvtier.machine.integers import shown

_NOT_YET = "is not supported"
_NO_BEAMS = "is not supported: there is no beam search"

ELSEWHERE: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {
        # other names of known parameters
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
        # several answers
        "num_return_sequences": ("is called n here", (1,)),
        "best_of": ("is not supported: n answers are all given back", (None, 1)),
        # ends of a text
        "eos_token_id": ("is not supported: the model's own ends a text, unless ignore_eos=True", (None,)),
        "min_new_tokens": ("is called min_tokens here", (None, 0)),
        # from tokens to text
        "spaces_between_special_tokens": ("is not supported: the tokenizer decides", (True,)),
        # logits
        "length_penalty": (_NO_BEAMS, (1, 1.0)),
        "no_repeat_ngram_size": (_NOT_YET, (0,)),
        "logits_processors": (_NOT_YET, (None, [])),
        "guided_decoding": ("is called structured_outputs here", (None,)),
        "guided_json": ("is not supported: use structured_outputs=StructuredOutputs(json=...)", (None,)),
        "guided_regex": ("is not supported: use structured_outputs=StructuredOutputs(regex=...)", (None,)),
        "guided_choice": ("is not supported: use structured_outputs=StructuredOutputs(choice=[...])", (None,)),
        "guided_grammar": ("is not supported: use structured_outputs=StructuredOutputs(grammar=...)", (None,)),
        "response_format": ("is not supported: use structured_outputs=StructuredOutputs(json=...)", (None,)),
        # the rest
        "top_logprobs": ("is called logprobs here", (None,)),
        "logprob_token_ids": (_NOT_YET, (None,)),
        "num_beams": (_NO_BEAMS, (1,)),
        "use_beam_search": (_NO_BEAMS, (False,)),
        "early_stopping": (_NO_BEAMS, (False,)),
        "stream": ("is not supported: AsyncLLM streams; output_kind says what each output has", (False,)),
        "truncate_prompt_tokens": ("is not supported: shorten the prompt before you give it", (None,)),
        "extra_args": (_NOT_YET, (None, {})),
    }
)
"""Parameters of vLLM, OpenAI and transformers without an equal here: the answer, and the values that change nothing."""

_Params = TypeVar("_Params")


def refusing_by_name(cls: type[_Params]) -> type[_Params]:
    """A dataclass that refuses unknown parameters by name, and takes them nevertheless if they change nothing."""
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


def _refusal(name: str, own: Sequence[str]) -> str:
    if name in ELSEWHERE:
        return f"{name} {ELSEWHERE[name][0]}"
    near = get_close_matches(name.lower(), own, n=1)
    return f"there is no option {shown(name)}" + (f" (is it {near[0]}?)" if near else "")


def _changes_nothing(name: str, value: object) -> bool:
    neutral = ELSEWHERE[name][1] if name in ELSEWHERE else ()
    return any(type(value) is type(other) and value == other for other in neutral)
