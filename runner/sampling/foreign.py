"""Names of other engines: what is said of them, and the values that change nothing here.

Owns       ``Foreign``, a row of each door's table: sampling parameters (below), ``LLM``'s options
           (``engine.foreign``), fields of HTTP requests (``server.protocol``).
Promises   an unknown parameter is refused by name, with its substitute; only a value that changes nothing passes.
           Importing it takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, NamedTuple, TypeVar


class Foreign(NamedTuple):
    """A name of another engine: what is said of it, and the values that change nothing here."""

    said: str
    harmless: tuple[Any, ...] = ()

    def allows(self, value: object) -> bool:
        """Whether this value changes nothing; True is no 1."""
        return any(type(value) is type(one) and value == one for one in self.harmless)


_NOT_YET = "is not supported"
_NO_BEAMS = "is not supported: there is no beam search"

PARAMETERS = {
    # other names of known parameters
    "max_new_tokens": Foreign("is called max_tokens here"),
    "max_completion_tokens": Foreign("is called max_tokens here"),
    "max_output_tokens": Foreign("is called max_tokens here"),
    "max_length": Foreign("is not supported: use max_tokens, which counts new tokens only"),
    "do_sample": Foreign("is not needed: temperature=0 is greedy, any other temperature samples"),
    "stop_sequences": Foreign("is called stop here"),
    "stop_strings": Foreign("is called stop here"),
    "random_seed": Foreign("is called seed here"),
    "temp": Foreign("is called temperature here"),
    "typical_p": Foreign("is not supported: use top_p or top_k", (1, 1.0)),
    # several answers
    "num_return_sequences": Foreign("is called n here", (1,)),
    "best_of": Foreign("is not supported: n answers are all given back", (None, 1)),
    # ends of a text
    "eos_token_id": Foreign("is not supported: the model's own ends a text, unless ignore_eos=True", (None,)),
    "min_new_tokens": Foreign("is called min_tokens here", (None, 0)),
    # from tokens to text
    "spaces_between_special_tokens": Foreign("is not supported: the tokenizer decides", (True,)),
    # logits
    "length_penalty": Foreign(_NO_BEAMS, (1, 1.0)),
    "no_repeat_ngram_size": Foreign(_NOT_YET, (0,)),
    "logits_processors": Foreign(_NOT_YET, (None, [])),
    "guided_decoding": Foreign("is called structured_outputs here", (None,)),
    "guided_json": Foreign("is not supported: use structured_outputs=StructuredOutputs(json=...)", (None,)),
    "guided_regex": Foreign("is not supported: use structured_outputs=StructuredOutputs(regex=...)", (None,)),
    "guided_choice": Foreign("is not supported: use structured_outputs=StructuredOutputs(choice=[...])", (None,)),
    "guided_grammar": Foreign("is not supported: use structured_outputs=StructuredOutputs(grammar=...)", (None,)),
    "response_format": Foreign("is not supported: use structured_outputs=StructuredOutputs(json=...)", (None,)),
    # the rest
    "top_logprobs": Foreign("is called logprobs here", (None,)),
    "logprob_token_ids": Foreign(_NOT_YET, (None,)),
    "num_beams": Foreign(_NO_BEAMS, (1,)),
    "use_beam_search": Foreign(_NO_BEAMS, (False,)),
    "early_stopping": Foreign(_NO_BEAMS, (False,)),
    "stream": Foreign("is not supported: AsyncLLM streams; output_kind says what each output has", (False,)),
    "truncate_prompt_tokens": Foreign("is not supported: shorten the prompt before you give it", (None,)),
    "extra_args": Foreign(_NOT_YET, (None, {})),
}
"""Parameters of vLLM, OpenAI and transformers without an equal here: the answer, and the values that change nothing."""

_Params = TypeVar("_Params")


def refusing_by_name(cls: type[_Params]) -> type[_Params]:
    """A dataclass that refuses unknown parameters by name, and takes them nevertheless if they change nothing."""
    own = tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
    init: Callable[..., None] = cls.__init__

    @wraps(init)
    def checked(self: _Params, *args: Any, **options: Any) -> None:
        others = {name: options.pop(name) for name in options.keys() - set(own)}
        allowed = {name for name in PARAMETERS.keys() & others if PARAMETERS[name].allows(others[name])}
        refused = [_refusal(name, own) for name in sorted(others.keys() - allowed)]
        if refused:
            from kvtier.machine.errors import InvalidRequest  # late: the command line has this table too

            raise InvalidRequest(f"{'; '.join(refused)}. {cls.__name__} takes {', '.join(own)}")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


def _refusal(name: str, own: Sequence[str]) -> str:
    if name in PARAMETERS:
        return f"{name} {PARAMETERS[name].said}"
    from kvtier.machine.integers import shown

    near = get_close_matches(name.lower(), own, n=1)
    return f"there is no option {shown(name)}" + (f" (is it {near[0]}?)" if near else "")
