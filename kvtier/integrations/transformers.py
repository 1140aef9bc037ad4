"""A CacheSpec from a transformers config: which layers attend how, and with which KV shape.

Owns       the reading of ``layer_types``, windows, chunks, head geometry and KV sharing.
Promises   generic by layer type, not by model name. A layer that a KV cache cannot serve is refused by name, never
           guessed. KV heads are the checkpoint's, even if modeling code repeats them before its own cache does (Falcon
           40B). The groups are deterministic: full, sliding, chunked, each in order of first appearance.
Does not   import transformers or torch: it only reads attributes, so any object with a config's fields will do. It does
           not see modeling code either: the runner proves at load time that the model calls attention as read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.geometry.dtypes import DTYPE_BYTES, dtype_name
from kvtier.geometry.kinds import (
    STATE_TOKENS,
    Attention,
    ChunkedLocal,
    FullAttention,
    Kind,
    RecurrentState,
    SlidingWindow,
    positive,
)
from kvtier.geometry.spec import MOST_LAYERS, CacheSpec, GroupSpec
from kvtier.integrations.compressed import COMPRESSED_TYPES, SPARSE, compressed_spec
from kvtier.integrations.refusals import (
    BOTH_TYPES,
    INDEXED_TYPES,
    SERVED_TYPES,
    STATE_TYPES,
    field,
    index_sizes,
    refuse_layers,
    refuse_model,
    refuse_positions,
)
from kvtier.integrations.states import parts_of
from kvtier.machine.errors import ConfigError, KVTierError, UnsupportedModel
from kvtier.machine.integers import shown

_KIND_NAMES = ("full", "sliding", "chunked")
"""Group base names, indexed by ``Kind``."""

_OLD_NAMES = {
    "attention": "full_attention",
    "global": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}

_DOUBLED_SLIDING_KV_HEADS = ("mimo_v2_flash",)
"""Families whose modeling code doubles the KV heads of sliding layers without saying so in the config."""


@dataclass(frozen=True)
class _Shape:
    """The properties that decide a layer's group."""

    attention: Attention
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None


def spec_from_config(hf_config: Any, dtype: Any = None, block_tokens: int = 16) -> CacheSpec:
    """The groups of a transformers causal LM.

    ``dtype``: of the cache, a name or a torch.dtype; None or "auto" is the config's own, bfloat16 if it has none.
    Layers that read another layer's KV map to that layer's place and take no room of their own. Raises
    ``UnsupportedModel`` naming the layer type or the reason, ``ConfigError`` for a contradictory config.
    """
    if isinstance(hf_config, (dict, str, type)):
        raise ConfigError("spec_from_config wants a transformers config object: AutoConfig.from_pretrained(path)")
    block_tokens = positive("block_tokens", block_tokens)
    try:
        return _read(hf_config, dtype, block_tokens)
    except KVTierError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"{getattr(hf_config, 'model_type', None)}: this config does not describe attention layers "
            f"({type(problem).__name__}: {' '.join(str(problem).split())})"
        ) from problem


def query_heads(hf_config: Any, spec: CacheSpec) -> tuple[int, ...]:
    """Query heads of each layer of ``spec``, which was read from this config; 0 for layers without K and V.

    Raises ``ConfigError`` if the config does not tell.
    """
    text = text_config(hf_config)
    try:
        listed = getattr(text, "num_attention_heads_per_layer", None)
        found = []
        for i, place in enumerate(spec.places("kv")):
            if place is None:
                found.append(0)
                continue
            config = _layer_config(text, i)
            own = None
            if spec.group(place[0]).attention.kind is Kind.WINDOW:
                own = getattr(config, "swa_num_attention_heads", None)
            found.append(int(listed[i] if listed else config.num_attention_heads if own is None else own))
    except (AttributeError, LookupError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"{getattr(text, 'model_type', None)}: this config does not say how many query heads each layer has "
            f"({type(problem).__name__}: {' '.join(str(problem).split())})"
        ) from problem
    return tuple(found)


def picked(hf_config: Any) -> tuple[int | None, ...]:
    """By layer, the most tokens, or entries that tokens share, that a query picks by an index; None: it sees all.

    Raises ``ConfigError`` for numbers of tokens that are none.
    """
    text = text_config(hf_config)
    found: dict[str, int | None] = {}
    for name in {*_layer_types(text)} & {SPARSE, *INDEXED_TYPES}:
        if field(text, "index_topk") is not None:
            found[name] = _size(text, "index_topk")
        else:
            blocks = _size(text, "index_topk_blocks") + _size(text, "index_local_blocks")
            found[name] = blocks * _size(text, "index_block_size")
    return tuple(found.get(name) for name in _layer_types(text))


def _read(hf_config: Any, dtype: Any, block_tokens: int) -> CacheSpec:
    text = text_config(hf_config)
    refuse_model(hf_config, text)
    types = _layer_types(text)
    refuse_layers(text, types)
    refuse_positions(text)
    _check_sizes(text)
    indices = index_sizes(text, types)
    if any(name in COMPRESSED_TYPES for name in types):
        return compressed_spec(text, types, _dtype(hf_config, text, dtype), block_tokens)
    attends = [(BOTH_TYPES | INDEXED_TYPES).get(name, name) for name in types]
    sources = _kv_sources(text, attends)
    shapes = [
        _shape(_layer_config(text, i), name, i) if name in SERVED_TYPES else None for i, name in enumerate(attends)
    ]
    states: dict[int, RecurrentState] = {}
    weights = _dtype(hf_config, text, None if _is_narrow(dtype) else dtype)
    if any(name in STATE_TYPES or name in BOTH_TYPES for name in types):
        states = {i: RecurrentState(parts) for i, parts in parts_of(text, weights).items()}
        _check_states(text, types, states)
    spec = _group(shapes, sources, states, _dtype(hf_config, text, dtype), block_tokens)
    return _with_indices(spec, indices, weights, block_tokens)


def _is_narrow(dtype: Any) -> bool:
    """Whether this is an 8-bit type, which weights are not kept in."""
    return dtype is not None and dtype != "auto" and DTYPE_BYTES[dtype_name(dtype, "dtype")] == 1


def _check_states(text: Any, types: Sequence[str], states: Mapping[int, RecurrentState]) -> None:
    """The family's own code keeps a state in the layers whose type says so, and in no other."""
    named = {i for i, name in enumerate(types) if name in STATE_TYPES or name in BOTH_TYPES}
    if named != states.keys():
        raise UnsupportedModel(
            f"{text.model_type}: layers {sorted(named)} are named as recurrent, but in its own code layers "
            f"{sorted(states)} keep a state"
        )


def _check_sizes(text: Any) -> None:
    """Refuses sizes that no model has, even if no group is made of them: the config is damaged."""
    for name, least in (("num_attention_heads", 1), ("hidden_size", 1), ("vocab_size", 1), ("intermediate_size", 0)):
        size = field(text, name)
        if isinstance(size, int) and size < least:
            raise ConfigError(f"{text.model_type}: {name} is {shown(size)}, so this config is of no model")


def text_config(hf_config: Any) -> Any:
    """The part of a (possibly multimodal) config that describes the decoder."""
    if getattr(hf_config, "is_encoder_decoder", False):
        return hf_config
    if callable(getattr(hf_config, "get_text_config", None)):
        return hf_config.get_text_config(decoder=True)
    return getattr(hf_config, "text_config", None) or hf_config


def _size(config: Any, name: str) -> int:
    return positive(f"{getattr(config, 'model_type', None)}: {name}", field(config, name))


def _layer_config(text: Any, i: int) -> Any:
    """The config for layer ``i``: families with per-layer geometry refuse to be read as a whole."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    config = text.per_layer_config[i]
    if getattr(config, "skip", None):
        raise UnsupportedModel(f"{text.model_type}: layer {i} skips {config.skip}; kvtier caches every layer")
    return config


def _layer_types(text: Any) -> list[str]:
    """Attention type of each layer, from the config's list or from its window and chunk fields."""
    count = int(text.num_hidden_layers)
    if count < 1:
        raise ConfigError(f"{text.model_type}: num_hidden_layers is {count}, so there are no layers to cache")
    if count > MOST_LAYERS:
        raise ConfigError(f"{text.model_type}: num_hidden_layers is {count:,}; no model has more than {MOST_LAYERS:,}")
    listed: Sequence[Any] | None = None
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        listed = listed or getattr(text, name, None)
    if not listed:
        return [_implied_type(_layer_config(text, i), i) for i in range(count)]
    if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"{text.model_type}: layer_types must be a list of names, got {shown(listed)}")
    if len(listed) < count:
        raise ConfigError(f"layer_types names {len(listed)} layers, but num_hidden_layers is {count}")
    return [_OLD_NAMES.get(name) or name for name in listed[:count]]


def _implied_type(config: Any, i: int) -> str:
    """The type of layer ``i`` without a list: Mistral slides everywhere, Qwen2 from max_window_layers on."""
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return "sliding_attention" if i >= _first_sliding(config) else "full_attention"
    return "full_attention" if getattr(config, "attention_chunk_size", None) is None else "chunked_attention"


def _first_sliding(config: Any) -> int:
    """Qwen2's rule applies if use_sliding_window is a field: lower layers keep full attention."""
    if not hasattr(config, "use_sliding_window"):
        return 0
    return getattr(config, "max_window_layers", None) or 0


def _kv_sources(text: Any, types: Sequence[str]) -> list[int]:
    """The layer whose KV each layer reads: itself, or the last own-KV layer of its type (Gemma 3n, Gemma 4)."""
    count = len(types)
    num_shared = getattr(text, "num_kv_shared_layers", None) or 0
    if not isinstance(num_shared, int) or not 0 <= num_shared <= count:
        raise ConfigError(f"{text.model_type}: num_kv_shared_layers must be in 0..{count}, got {num_shared!r}")
    first_shared = count - num_shared
    if first_shared == count and getattr(text, "kv_source_layers", None):
        return [int(source) for source in text.kv_source_layers]
    own = {name: i for i, name in enumerate(types[:first_shared])}  # the last of each type wins
    for i in range(first_shared, count):
        if types[i] not in own:
            raise UnsupportedModel(
                f"layer {i} ({types[i]}) shares the KV of an earlier layer, but no earlier layer of its type has one"
            )
    return [i if i < first_shared else own[types[i]] for i in range(count)]


def is_latent(hf_config: Any) -> bool:
    """Whether layers of this model keep latents and rotated keys (MLA) instead of K and V per head."""
    text = text_config(hf_config)
    return any(field(_layer_config(text, i), "kv_lora_rank") for i in range(int(text.num_hidden_layers)))


def latent_groups(hf_config: Any, spec: CacheSpec) -> frozenset[str]:
    """Names of the groups of ``spec`` that keep latents (``is_latent``)."""
    text, places = text_config(hf_config), spec.places("kv")
    return frozenset(
        place[0]
        for i, place in enumerate(places)
        if place is not None and field(_layer_config(text, i), "kv_lora_rank")
    )


def _shape(config: Any, layer_type: str, i: int) -> _Shape:
    if field(config, "kv_lora_rank"):  # the latent stands for K, the rotated key for V
        sizes = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
        return _Shape(_attention(config, layer_type, i), 1, *sizes)
    head_dim = _field(config, layer_type, "head_dim") or config.hidden_size // config.num_attention_heads
    head_dim_v = _field(config, layer_type, "v_head_dim") or head_dim
    return _Shape(
        attention=_attention(config, layer_type, i),
        num_kv_heads=_kv_heads(config, layer_type),
        head_dim=head_dim,
        head_dim_v=None if head_dim_v == head_dim else head_dim_v,
    )


def _kv_heads(config: Any, layer_type: str) -> int:
    heads = _field(config, layer_type, "num_key_value_heads")
    if heads is None and getattr(config, "new_decoder_architecture", False):
        heads = config.num_kv_heads  # Falcon, which does not look at multi_query then
    if heads is None:
        return 1 if getattr(config, "multi_query", False) else int(config.num_attention_heads)
    heads = positive(f"{config.model_type}: num_key_value_heads", heads)
    doubled = config.model_type in _DOUBLED_SLIDING_KV_HEADS and not hasattr(config, "swa_num_key_value_heads")
    return heads * (2 if doubled and layer_type == "sliding_attention" else 1)


def _field(config: Any, layer_type: str, name: str) -> Any:
    """A geometry field; sliding layers may have their own under ``swa_<name>``."""
    own = getattr(config, f"swa_{name}", None) if layer_type == "sliding_attention" else None
    return getattr(config, name, None) if own is None else own


def _attention(config: Any, layer_type: str, i: int) -> Attention:
    if layer_type == "full_attention":
        return FullAttention()
    field = "sliding_window" if layer_type == "sliding_attention" else "attention_chunk_size"
    span = getattr(config, field, None)
    if span is None:
        raise ConfigError(f"layer {i} is {layer_type}, but the config's {field} is None")
    return SlidingWindow(span) if layer_type == "sliding_attention" else ChunkedLocal(span)


def _group(
    shapes: Sequence[_Shape | None],
    sources: Sequence[int],
    states: Mapping[int, RecurrentState],
    dtype: Any,
    block_tokens: int,
) -> CacheSpec:
    """One group per distinct shape; ``sources[i] == i`` for the layers that own KV. Then one per distinct state."""
    owners: dict[_Shape, list[int]] = {}
    for i, source in enumerate(sources):
        shape = shapes[i]
        if shape is None:
            continue
        if source == i:
            owners.setdefault(shape, []).append(i)
        elif shapes[i] != shapes[source]:
            raise UnsupportedModel(f"layer {i} reads the KV of layer {source}, but their attention or KV shape differ")
    ordered = sorted(owners, key=lambda shape: shape.attention.kind)
    names = _names(ordered)
    groups = [
        GroupSpec(
            names[shape],
            shape.attention,
            len(owners[shape]),
            shape.num_kv_heads,
            shape.head_dim,
            dtype,
            block_tokens,
            shape.head_dim_v,
        )
        for shape in ordered
    ]
    places = {i: (names[shape], index) for shape, layers in owners.items() for index, i in enumerate(layers)}
    roles = [{"kv": places[source]} if source in places else {} for source in sources]
    keepers: dict[RecurrentState, list[int]] = {}
    for i, state in states.items():
        keepers.setdefault(state, []).append(i)
    for n, (state, layers) in enumerate(keepers.items()):
        name = f"state_{n + 1}" if n else "state"
        groups.append(GroupSpec(name, state, len(layers), block_tokens=math.lcm(STATE_TOKENS, block_tokens)))
        for index, i in enumerate(layers):
            roles[i]["state"] = name, index
    return CacheSpec(groups, layers=roles)


def _with_indices(spec: CacheSpec, sizes: Mapping[int, int], dtype: Any, block_tokens: int) -> CacheSpec:
    """``spec`` with the keys that layers keep for an index, of these sizes by layer; in the weights' ``dtype``."""
    if not sizes:
        return spec
    if len(set(sizes.values())) > 1:
        raise UnsupportedModel(f"index keys of several sizes, {sorted(set(sizes.values()))}; kvtier knows those of one")
    size, roles = next(iter(sizes.values())), [dict(places) for places in spec.layers]
    for index, i in enumerate(sizes):
        roles[i]["index"] = "index", index
    keys = GroupSpec("index", FullAttention(), len(sizes), 1, size, dtype, block_tokens, 0)
    return CacheSpec([*spec.groups, keys], layers=roles)


def _names(shapes: Sequence[_Shape]) -> dict[_Shape, str]:
    """Kind names, with the span if spans of one kind differ ("sliding_1024"), numbered if geometry differs."""
    names: dict[_Shape, str] = {}
    for shape in shapes:
        name = _KIND_NAMES[shape.attention.kind]
        spans = {other.attention.span_tokens for other in shapes if other.attention.kind == shape.attention.kind}
        if len(spans) > 1:
            name = f"{name}_{shape.attention.span_tokens}"
        taken = sum(1 for other in names if other.attention == shape.attention)
        names[shape] = name if taken == 0 else f"{name}_{taken + 1}"
    return names


def _dtype(hf_config: Any, text: Any, dtype: Any) -> Any:
    """The requested dtype, else the config's (older files say torch_dtype), else bfloat16."""
    stated = (getattr(config, "__dict__", {}) for config in (text, hf_config))
    candidates = [dtype, *(fields.get(name) for fields in stated for name in ("dtype", "torch_dtype"))]
    return next((value for value in candidates if value is not None and value != "auto"), "bfloat16")
