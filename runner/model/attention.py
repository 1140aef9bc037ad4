"""The attention function that replaces transformers' own: write K and V to the pools, attend through block tables.

Owns       the name "kvtier" in transformers' AttentionInterface, and the context that a step's forward carries.
Promises   every new token's K and V is written once, by the layer that owns it, before any layer attends to it. A layer
           that attends otherwise than the spec says is refused by name, never served wrongly.
Does not   know how attention is computed (a backend of kvtier.attention does) or where the step comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvtier.attention.fp8 import layer_scales
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import UnsupportedModel
from runner.model.compressed import OneRequest
from runner.model.latents import Absorbed
from runner.model.recorded import visible
from runner.model.state_steps import StatesOfDecode, StatesOfStep

NAME = "kvtier"
"""The attention implementation to ask transformers for."""


@dataclass(frozen=True)
class Temperature:
    """Llama 4's query scale on layers without positions: log1p(floor((p + 1) / floor_scale)) * attn_scale + 1."""

    floor_scale: float
    attn_scale: float

    def scales(self, positions: Tensor) -> Tensor:
        """float32 [T] from positions [T]."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale)) * self.attn_scale + 1.0


def take_temperatures(model: torch.nn.Module) -> dict[int, Temperature]:
    """Per layer, the query scale that the family computes from its own token count, taken over by our attention.

    Llama 4 scales queries of its layers without positions by arange + cached length: wrong for packed requests.
    """
    found: dict[int, Temperature] = {}
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "layer_idx"):
            if not module.use_rope:
                found[int(module.layer_idx)] = Temperature(float(module.floor_scale), float(module.attn_scale))
            module.attn_temperature_tuning = False
    return found


@dataclass
class StepContext:
    """The attention function's inputs for one step; made by the model for each forward.

    ``batches``: the backend's PagedBatch per group name. ``positions``: int64 [T], on the device. ``latents``: by
    layer, how what an MLA layer keeps is expanded. ``places``: per model layer, its group and its place in it.
    ``owned``: whether it writes KV. ``served``: the layers that have attended so far, in call order. ``scales``: by
    place, the backend's ``k_scale`` and ``v_scale`` of float8 layers with scales. ``proven``: the layers whose own
    mask, as the family builds it, is known to be their group's. ``states``: by group of states, what the step does with
    them; ``mixed``: layers that have used theirs. ``starts``: the first token of each request in the step, and the
    step's end; ``before``: tokens of its text before the step.
    """

    spec: CacheSpec
    cache: Any
    backend: Any
    batches: Mapping[str, Any]
    positions: Tensor
    temperatures: Mapping[int, Temperature]
    latents: Mapping[int, Absorbed]
    places: Sequence[Any]
    owned: tuple[bool, ...]
    scales: Mapping[tuple[str, int], Mapping[str, Tensor]] = field(default_factory=dict)
    proven: frozenset[int] = frozenset()
    states: Mapping[str, StatesOfStep | StatesOfDecode] = field(default_factory=dict)
    served: list[int] = field(default_factory=list)
    mixed: list[int] = field(default_factory=list)
    starts: Sequence[int] = ()
    before: Sequence[int] = ()
    _scales: dict[Temperature, Tensor] = field(default_factory=dict)

    def tempered(self, query: Tensor, layer: int) -> Tensor:
        """``query`` [T, Hq, D], scaled by its real positions if the family does so."""
        temperature = self.temperatures.get(layer)
        if temperature is None:
            return query
        if temperature not in self._scales:
            self._scales[temperature] = temperature.scales(self.positions)[:, None, None]
        return (query * self._scales[temperature]).to(query.dtype)

    def check_complete(self) -> None:
        """Raises ``UnsupportedModel`` unless every layer with K and V has attended through us, once."""
        missing = sorted({i for i, place in enumerate(self.places) if place is not None} - set(self.served))
        if missing:
            raise UnsupportedModel(
                f"layers {missing} never called transformers' AttentionInterface, so their attention would run without "
                "the cache; this family cannot be served"
            )
        kept = {i for i, place in enumerate(self.spec.places("state")) if place is not None}
        missing = sorted(kept - set(self.mixed))
        if missing:
            raise UnsupportedModel(
                f"layers {missing} never asked for their states, so they would forget all tokens before a step; this "
                "family cannot be served"
            )


@lru_cache(maxsize=16)
def owners(spec: CacheSpec) -> tuple[bool, ...]:
    """Whether each model layer owns KV: the first layer of its place does, others read it or have none."""
    places = spec.places("kv")
    return tuple(place is not None and places.index(place) == i for i, place in enumerate(places))


@lru_cache(maxsize=16)
def scales_of(spec: CacheSpec, device: torch.device) -> dict[tuple[str, int], dict[str, Tensor]]:
    """The ``k_scale`` and ``v_scale`` by place, for a backend's write_kv and attend; of scaled groups only."""
    found = {}
    for group in spec.groups:
        for i in range(group.num_layers):
            pair = layer_scales(group, i, device)
            if pair is not None:
                found[group.name, i] = {"k_scale": pair[0], "v_scale": pair[1]}
    return found


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    kvtier: StepContext | OneRequest | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, Hq, T, D], key and value [1, Hkv, T, D]; returns [1, T, Hq, Dv].

    The mask is the group's own, so ``attention_mask`` must be None. transformers builds no mask for a function that
    registers none. A family that brings its own mask attends to something that the pools do not know.
    """
    if kvtier is None:
        _refuse(module, "it got no step: its family drops keyword arguments, or the model was called directly")
    if isinstance(kvtier, OneRequest):
        return kvtier.attend(module, query, key, value, attention_mask, scaling=scaling, s_aux=s_aux, **more)
    layer = getattr(module, "layer_idx", None)
    if layer is None or not 0 <= layer < len(kvtier.spec.layers):
        _refuse(module, f"its layer_idx is {layer!r}, but the config has {len(kvtier.spec.layers)} layers")
    place = kvtier.places[layer]
    if place is None:
        _refuse(module, "it attends, but the config was read as a layer without keys and values")
    _check_call(module, kvtier, query, key, value, *kvtier.cache.kv(*place))
    _check_mask(module, kvtier, place[0], attention_mask, sliding_window)
    if layer in kvtier.latents and (softcap is not None or s_aux is not None):
        _refuse(module, "its attention to latents has sinks or a soft cap")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kvtier.served.append(layer)
    return attend(kvtier, layer, query, key, value, scale, softcap, s_aux), None


@visible
def attend(
    step: StepContext,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Writes a layer's K and V, and attends; shapes as in ``attention``, which has checked the call."""
    place = step.places[layer]
    k_cache, v_cache = step.cache.kv(*place)
    batch, backend, scales = step.batches[place[0]], step.backend, step.scales.get(place, {})
    if step.owned[layer]:
        backend.write_kv(k_cache, v_cache, key[0].transpose(0, 1), value[0].transpose(0, 1), batch, **scales)
    queries = step.tempered(query[0].transpose(0, 1), layer)
    out: Tensor
    if absorbed := step.latents.get(layer):
        mixed = backend.attend_latent(absorbed.query(queries), k_cache, v_cache, batch, scale=scale, **scales)
        out = absorbed.output(mixed)
    else:
        out = backend.attend(queries, k_cache, v_cache, batch, scale=scale, softcap=softcap, sinks=sinks, **scales)
    return out.unsqueeze(0)


def _check_call(
    module: torch.nn.Module, context: StepContext, query: Tensor, key: Tensor, value: Tensor, k: Tensor, v: Tensor
) -> None:
    """Checks that the call's tensors fit the pools; ``k`` and ``v`` are pool views [blocks, tokens, H, D]."""
    if module.layer_idx in context.served:
        _refuse(module, "it attends twice in one forward, and a layer has one place in the cache")
    tokens, queries = context.positions.shape[0], query.shape[2]
    for what, new, pool in (("keys", key, k), ("values", value, v)):
        rows, heads, new_tokens, size = new.shape
        if (heads, size) != pool.shape[2:]:
            got, built = f"{heads} x {size}", f"{pool.shape[2]} x {pool.shape[3]}"
            _refuse(
                module,
                f"its {what} are {got} (heads x size), but the config was read as {built}: the family's code repeats "
                "or splits heads otherwise than its config says",
            )
        if rows != 1 or new_tokens != tokens or queries != tokens:
            _refuse(module, f"it attends over {list(new.shape)} and {list(query.shape)} in a step of {tokens} tokens")


def _check_mask(
    module: torch.nn.Module, context: StepContext, name: str, attention_mask: Tensor | None, sliding_window: int | None
) -> None:
    """Checks that the family masks as the group does."""
    if attention_mask is not None:
        _refuse(module, "it brings an attention mask of its own")
    if getattr(module, "is_causal", True) is False:
        _refuse(module, "it is not causal")
    seen = context.spec.group(name).attention
    if sliding_window is None and seen.kind is Kind.WINDOW and module.layer_idx not in context.proven:
        _refuse(module, f"the config was read as {seen}, but its code gives the attention no window")
    if sliding_window is not None and (seen.kind is not Kind.WINDOW or seen.span_tokens != sliding_window):
        _refuse(module, f"it slides over {sliding_window} tokens, but the config was read as {seen}")


def _refuse(module: torch.nn.Module, reason: str) -> NoReturn:
    raise UnsupportedModel(f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__}): {reason}")


AttentionInterface.register(NAME, attention)
