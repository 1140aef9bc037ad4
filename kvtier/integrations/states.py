"""What the recurrent layers of a model keep of a request, asked of transformers' own modeling code.

Promises   shapes and dtypes are those that a prefill and a decode leave behind, on torch's meta device: there is no
           formula for any family. A config that transformers makes no such model of is refused by name.
Does not   look at weights. Torch and transformers are imported when it is called.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kvtier.geometry.dtypes import dtype_name
from kvtier.geometry.kinds import Part
from kvtier.machine.errors import UnsupportedModel

KINDS = ("conv", "recurrent")
"""Kinds of tensors that transformers' layers keep as states; a Part's name is one of them, and a number."""
_TOKENS = 8
_ASKED_IN = "bfloat16"
"""The weights' dtype when it is asked, in which all experts have a form on "meta"; states that follow it have the
model's own."""
_CONFIGS: dict[str, Any] = {}


def parts_of(text: Any, dtype: Any) -> dict[int, tuple[Part, ...]]:
    """The parts of each layer that has a state, for weights of ``dtype``. Raises ``UnsupportedModel``."""
    if not callable(getattr(text, "to_json_string", None)):
        raise UnsupportedModel(
            f"{text.model_type}: what its recurrent layers keep is asked of transformers, which has no such model"
        )
    name = text.to_json_string(use_diff=False)
    _CONFIGS[name] = text
    try:
        found = _asked(name)
    finally:
        del _CONFIGS[name]
    weights = dtype_name(dtype, "dtype")
    return {
        i: tuple(replace(part, dtype=weights if part.dtype == _ASKED_IN else part.dtype) for part in parts)
        for i, parts in found.items()
    }


@lru_cache(maxsize=32)
def _asked(name: str) -> dict[int, tuple[Part, ...]]:
    text = _CONFIGS[name]
    try:
        return _run(text)
    except Exception as problem:  # modeling code of any family: it raises what it likes
        raise UnsupportedModel(
            f"{text.model_type}: its own code does not tell what its recurrent layers keep "
            f"({type(problem).__name__}: {' '.join(str(problem).split())[:200]})"
        ) from problem


def _run(text: Any) -> dict[int, tuple[Part, ...]]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    config = copy.deepcopy(text)
    with torch.device("meta"), torch.no_grad():
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        cache, ids = DynamicCache(config=config), torch.zeros(1, _TOKENS, dtype=torch.long)
        named = inspect.signature(model.forward).parameters
        argument = next(name for name in ("cache", "cache_params", "past_key_values") if name in named)
        for tokens in (ids, ids[:, :1]):  # a decode may keep more than a prefill has left
            model(input_ids=tokens, **{argument: cache}, use_cache=True)
    return {i: parts for i, layer in enumerate(cache.layers) if (parts := _parts(layer))}


def _parts(layer: Any) -> tuple[Part, ...]:
    kept = [(f"{kind}{k}", x) for kind in KINDS for k, x in (getattr(layer, f"{kind}_states", None) or {}).items()]
    return tuple(Part(name, tuple(x.shape[1:]), dtype_name(x.dtype, name)) for name, x in kept if x is not None)
