"""A caller's inputs, as token ids: text, lists of ids, chats.

Promises   every prompt is checked before anything is queued: ``InvalidRequest`` names the fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier import InvalidRequest
from kvtier.machine.integers import shown
from runner.engine.stems import Stems
from runner.model.hybrid import HybridModel

Prompt = str | Sequence[int] | npt.NDArray[Any] | Mapping[str, Any]

_BESIDE = {"cache_salt", "priority", "boundaries"}


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt as it came: its text if it was text, its ids int64 [n], and its further fields."""

    text: str | None
    token_ids: np.ndarray
    beside: Mapping[str, Any]


class Inputs:
    """Reads prompts for one model. From any thread."""

    def __init__(self, model: HybridModel) -> None:
        self.tokenizer = model.tokenizer
        self.vocab_size = model.vocab_size
        self.max_tokens = model.max_tokens
        self._stems = Stems(model.tokenizer)

    def read(self, prompt: Prompt) -> Given:
        """A prompt in any of its forms, short enough for the model."""
        extra = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        given = [extra.pop(name) for name in ("prompt", "prompt_token_ids") if name in extra]
        if len(given) != 1 or set(extra) - _BESIDE:
            raise InvalidRequest(
                "a prompt as a dict has either prompt or prompt_token_ids, and may have cache_salt, priority and "
                f"boundaries; this one has {sorted(map(str, prompt)) if isinstance(prompt, Mapping) else 'neither'}"
            )
        ids = self.encode(given[0])
        limit, length = self.max_tokens, len(ids)
        if limit is not None and length >= limit:
            raise InvalidRequest(f"the prompt has {length:,} tokens, but this model was made for {limit:,}; shorten it")
        return Given(given[0] if isinstance(given[0], str) else None, ids, extra)

    def encode(self, prompt: Any) -> np.ndarray:
        """Token ids of a prompt, int64 [n]; raises ``InvalidRequest`` for ids that the vocabulary does not have."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("this model's folder has no tokenizer; give token ids")
            _check_unicode(prompt)
            prompt = self.tokenizer(prompt)["input_ids"]
        if isinstance(prompt, np.ma.MaskedArray):
            raise InvalidRequest("a prompt is a masked array; give the ids that count, as compressed() does")
        if isinstance(prompt, (list, tuple)) and any(isinstance(x, (bool, np.bool_)) for x in prompt):
            raise InvalidRequest(f"a prompt has True or False among its token ids: {shown(prompt)}")
        try:
            ids = np.asarray(prompt)
        except Exception as problem:  # whatever an object's __array__ raises
            raise InvalidRequest(f"a prompt is text or a list of token ids: {problem}") from None
        if ids.ndim != 1 or len(ids) == 0 or ids.dtype.kind not in "iu":
            if ids.size == 0:
                raise InvalidRequest("a prompt is empty; give at least one token")
            raise InvalidRequest(
                f"a prompt is neither text nor a list of token ids in 0..{self.vocab_size - 1}: {shown(prompt)}"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise InvalidRequest(
                f"token id {bad} is out of the vocabulary; this model has ids 0..{self.vocab_size - 1}"
            )
        return ids

    @property
    def has_template(self) -> bool:
        """Whether the model knows conversations."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat(self, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
        """One conversation as a prompt with ids, through the model's chat template. Its boundary is the end of the
        system prompt and the tools.

        ``options``: for the template: tools, documents, add_generation_prompt, continue_final_message and its own
        options. Raises ``InvalidRequest`` for messages that it refuses, and for a template in ``options``.
        """
        if not self.has_template:
            raise InvalidRequest("this model has no chat template; use generate() with the prompt written out")
        if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
            raise InvalidRequest('messages must be a list of {"role": ..., "content": ...}, or a list of such lists')
        if "chat_template" in options:
            raise InvalidRequest("chat_template is not taken: the template is the model's own")
        _check_unicode(messages)
        _check_unicode(options)
        if not options.get("continue_final_message"):
            options.setdefault("add_generation_prompt", True)
        options |= {"tokenize": True, "return_dict": False}
        try:
            ids = self.tokenizer.apply_chat_template(list(messages), **options)
        except Exception as problem:  # a checkpoint's template raises what it likes
            text = " ".join(f"{type(problem).__name__}: {problem}".split())
            raise InvalidRequest(f"the chat template refuses these messages ({text})") from problem
        return {"prompt_token_ids": list(ids), "boundaries": self._stems.ends(ids, messages, options)}


def as_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    dimensions = getattr(prompts, "ndim", None)  # of NumPy's arrays and torch's tensors
    if dimensions == 1:
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (Set, bytes, bytearray)) or dimensions == 0:
        raise InvalidRequest(f"prompts must be text, token ids, or a list of those, got {shown(prompts)}")
    rows = list(prompts)
    if not rows:
        raise InvalidRequest("there is no prompt; give text, token ids, or a list of those")
    return [rows] if all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in rows) else rows


def _check_unicode(prompt: Any) -> None:
    """Raises ``InvalidRequest`` if text, or text anywhere in messages, cannot be encoded."""
    if isinstance(prompt, str):
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise InvalidRequest("a prompt is no Unicode text: it holds half of a surrogate pair; decode it anew")
    elif isinstance(prompt, Mapping):
        _check_unicode([*prompt.keys(), *prompt.values()])
    elif isinstance(prompt, (list, tuple)):
        for part in prompt:
            _check_unicode(part)
