"""Models that a KV cache by attention kind cannot serve, and why: one place for the reasons.

Owns       the list of layer types, position codes and model shapes that are refused.
Promises   every refusal is ``UnsupportedModel`` and names the layer type or the field that caused it.
Does not   decide geometry (transformers.py next door does).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from kvtier.geometry.dtypes import DTYPE_BYTES
from kvtier.geometry.kinds import positive
from kvtier.geometry.spec import CacheSpec
from kvtier.integrations.compressed import COMPRESSED_TYPES
from kvtier.machine.errors import ConfigError, UnsupportedModel
from kvtier.machine.integers import shown

SERVED_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
STATE_TYPES = ("linear_attention", "conv")
"""Layers with a state instead of keys and values."""
BOTH_TYPES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Layers with a state beside keys and values, and how they attend."""
BARE_TYPES = ("moe", "mlp")
"""Layers with neither."""
INDEXED_TYPES = {"indexed_attention": "full_attention", "minimax_m3_sparse": "full_attention"}
"""Layers that keep a key for an index beside keys and values, and what they would see without it."""
CACHED_TYPES = (*SERVED_TYPES, *INDEXED_TYPES, *COMPRESSED_TYPES)
"""Layers that attend in a way that kvtier can keep."""

_RECURRENT = "keeps a recurrent state instead of keys and values"
_FORGETS = "its layers begin a prompt's later pieces from no state in transformers' own code"
_OWN_STATES = "its states are not those of transformers' linear attention layers"
_OF_MODELS = {
    "mamba": _FORGETS,
    "falcon_mamba": _FORGETS,
    "jamba": _FORGETS,
    "zamba": _FORGETS,
    "zamba2": "its layers share one attention, which has no place of its own",
    "zaya": "its attention itself keeps a state",
    "minimax": _OWN_STATES,
    "recurrent_gemma": "it has them in its modules, not in a cache",
    "inkling": _OWN_STATES,
    "inkling2": _OWN_STATES,
    "inkling2_loop": _OWN_STATES,
}
"""Recurrent models that transformers has and kvtier cannot serve: their configs do not tell."""
_OF_NO_LAYER_TYPE = {
    "rwkv": "its code hands them from call to call in lists of its own, not in a cache",
    "xlstm": "its code has a cache class of its own for them",
}
"""Such models whose configs do not even name types of layers."""
_REASONS = {
    "recurrent": _RECURRENT,
    "window_attention": "attends in blocks, not causally",
    "reference_sliding_attention": "mixes full attention to the prompt with a window over generated tokens",
    "local": "attends within a window that is not given as sliding_window",
}

_PASSES = {"n_recurrent_loops": 1, "loop_num_passes": 1, "H_cycles": 0}
"""Fields of models that run layers more than once (dory, inkling2_loop, hrm_text), and their largest harmless value."""

_GENERATING = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
"""Names in transformers' auto classes for models that generate text from left to right."""


def refuse_model(hf_config: Any, text: Any) -> None:
    """Raises ``UnsupportedModel`` unless the model is one stack of causal decoder layers."""
    if getattr(hf_config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{_name(text)}: it is an encoder-decoder; kvtier serves decoder-only models")
    if _bidirectional(text):
        raise UnsupportedModel(
            f"{_name(text)}: its attention is not causal, so the keys and values of a prefix depend on what follows"
        )
    if not _generates(text):
        raise UnsupportedModel(
            f"{_name(text)}: transformers generates no text with this model ({', '.join(_GENERATING)} do not have it), "
            "so its attention is taken to be not causal; if it is, describe its groups by hand, in a CacheSpec"
        )
    if field(text, "mem_len") is not None:
        raise UnsupportedModel(f"{_name(text)}: it keeps hidden states (mem_len) instead of keys and values")
    if layers := field(text, "cross_attention_layers"):
        raise UnsupportedModel(f"{_name(text)}: its layers {shown(layers)} attend to an image, not to the text before")
    for name, once in _PASSES.items():
        passes = field(text, name)
        if isinstance(passes, int) and passes > once:
            raise UnsupportedModel(
                f"{_name(text)}: its layers run in loops ({name}={passes}) and have keys and values of each pass; "
                "kvtier keeps those of one pass per layer"
            )
    if not isinstance(field(text, "num_hidden_layers"), int):
        raise UnsupportedModel(f"{_name(text)}: its config has no num_hidden_layers to read")


def refuse_layers(text: Any, types: Sequence[str]) -> None:
    """Raises ``UnsupportedModel`` for the first layer that neither attends in a way that is known nor keeps a state."""
    if reason := _OF_NO_LAYER_TYPE.get(_name(text)):
        raise UnsupportedModel(f"{_name(text)}: each layer {_RECURRENT}: {reason}")
    for i, layer_type in enumerate(types):
        recurrent = layer_type in STATE_TYPES or layer_type in BOTH_TYPES
        if recurrent and (reason := _OF_MODELS.get(_name(text).removesuffix("_text"))):
            raise UnsupportedModel(f"{_name(text)}: layer {i} is {layer_type!r}, which {_RECURRENT}: {reason}")
        if not recurrent and layer_type not in (*CACHED_TYPES, *BARE_TYPES):
            reason = _REASONS.get(layer_type, "is not a type that kvtier knows")
            raise UnsupportedModel(
                f"{_name(text)}: layer {i} is {layer_type!r}, which {reason}; kvtier caches {', '.join(CACHED_TYPES)}"
            )
    attends = any(layer_type in CACHED_TYPES or layer_type in BOTH_TYPES for layer_type in types)
    if attends and not isinstance(field(text, "num_attention_heads"), int):
        raise UnsupportedModel(
            f"{_name(text)}: its config has no num_attention_heads, so there is no attention to cache"
        )


def index_sizes(text: Any, types: Sequence[str]) -> dict[int, int]:
    """By layer, the size of the key that it keeps for its index. Layers that use another one's index keep none.

    Raises ``UnsupportedModel`` for indices that keep more of a token than one key, ``ConfigError`` for damaged fields.
    """
    at = [i for i, name in enumerate(types) if name in INDEXED_TYPES]
    if not at:
        return {}
    for name in ("index_kpool", "indexer_compress_ratio"):
        if hasattr(text, name):
            raise UnsupportedModel(
                f"{_name(text)}: layer {at[0]} is {types[at[0]]!r}, whose index pools the keys of tokens ({name}) and "
                "keeps more than one key of each; kvtier knows indices of one key a token"
            )
    given, owners = field(text, "index_head_dim"), field(text, "indexer_types")
    if given is None:
        raise UnsupportedModel(f"{_name(text)}: layer {at[0]} is {types[at[0]]!r}, but there is no index_head_dim")
    size = positive(f"{_name(text)}: index_head_dim", given)
    if owners is None:
        return dict.fromkeys(at, size)
    if not isinstance(owners, (list, tuple)) or not all(isinstance(owner, str) for owner in owners):
        raise ConfigError(f"{_name(text)}: indexer_types must be a list of names, got {shown(owners)}")
    if len(owners) < len(types) or (odd := {owners[i] for i in at} - {"full", "shared"}):
        what = f"names {shown(odd)}" if len(owners) >= len(types) else f"names {len(owners)} layers"
        raise UnsupportedModel(f"{_name(text)}: indexer_types {what}; kvtier knows 'full' and 'shared', for each layer")
    return {i: size for i in at if owners[i] == "full"}


def refuse_to_attend(text: Any, spec: CacheSpec) -> None:
    """Raises ``UnsupportedModel`` for a model whose cache can be kept, but which the reference engine cannot run."""
    if any(spec.places("index")) and any(DTYPE_BYTES[group.dtype] == 1 for group in spec.groups):
        raise UnsupportedModel(
            f"{_name(text)}: in 8 bits the reference engine reads no keys that an index picks; leave kv_cache_dtype out"
        )
    for i, layer_type in enumerate(getattr(text, "layer_types", None) or ()):
        if layer_type == "minimax_m3_sparse":
            raise UnsupportedModel(
                f"{_name(text)}: layer {i} picks blocks of the tokens it sees by an index. kvtier can keep that "
                "(kvtier plan, KVCache, HostTier), but the reference engine has no such attention"
            )


def refuse_positions(text: Any) -> None:
    """Raises ``UnsupportedModel`` if the rotation of a key depends on more than its own position."""
    for rope_type in _rope_types(text):
        if rope_type in ("longrope", "su") or "dynamic" in rope_type:
            raise UnsupportedModel(
                f"{_name(text)}: rope type {rope_type!r} rotates keys by the longest position in the batch, so cached "
                "keys of one request would depend on the others; default, linear, yarn and llama3 are served"
            )


def field(config: Any, name: str) -> Any:
    """A config field or None. If families give it per layer (and refuse to name one value), the first layer's."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        config = config.per_layer_config[0]
    return getattr(config, name, None)


def _bidirectional(text: Any) -> bool:
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return True
    if getattr(text, "causal", True) is False:  # XLM
        return True
    if _fills_gaps(text):
        return True
    # Encoder families (BERT and kin) have token types and are causal only when told so.
    return getattr(text, "is_decoder", True) is False and hasattr(text, "type_vocab_size")


def _fills_gaps(text: Any) -> bool:
    """Whether the checkpoint says that its model fills in masked tokens (ModernBERT, DistilBERT)."""
    names = getattr(text, "architectures", None)
    return isinstance(names, (list, tuple)) and any(str(name).endswith("ForMaskedLM") for name in names)


def _generates(text: Any) -> bool:
    """False if the config's class is transformers' own and no text-generating model there has it.

    Configs of other classes, of remote code or made by hand, are taken at their word.
    """
    found = re.fullmatch(r"transformers\.models\.(.+)\.\w+", type(text).__module__)
    return found is None or (found[1] in _generating_packages() and hasattr(text, "vocab_size"))


@cache
def _generating_packages() -> frozenset[str]:
    """Packages of transformers.models with a model that generates text.

    A model's parts have no entry of their own, such as the decoder of a model that sees images. A caller with a config
    of these classes has imported transformers.
    """
    from transformers.models.auto import configuration_auto, modeling_auto

    names = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in _GENERATING]
    return frozenset(configuration_auto.model_type_to_module_name(name) for each in names for name in each)


def _rope_types(text: Any) -> Iterator[str]:
    """Rope types of a flat ``rope_parameters`` (older: ``rope_scaling``) or of a mapping nested by layer type."""
    rope = field(text, "rope_parameters") or field(text, "rope_scaling")
    if not isinstance(rope, Mapping):
        return
    for part in (rope, *rope.values()):
        if isinstance(part, Mapping):
            yield str(part.get("rope_type", part.get("type", "default"))).lower()


def _name(text: Any) -> str:
    return getattr(text, "model_type", "") or type(text).__name__
