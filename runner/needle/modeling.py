"""The needle architecture: attention layers on a residual stream, and nothing else.

x += o_proj(attend(q_proj(x), k_proj(x), v_proj(x))), four times; no norm, no MLP, no bias. What makes it worth serving
is the mix of attention kinds. Attention goes through transformers' ``ALL_ATTENTION_FUNCTIONS``, as in stock models, so
an engine that registers its own function serves this model without knowing it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import (
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple

from runner.needle.config import NeedleConfig

MASK_FUNCTIONS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
    "chunked_attention": create_chunked_causal_mask,
}
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""transformers' name for the cache: ``past_key_values`` before 5.24, ``cache`` since. Models here take both."""


def rotary_embedding(config: NeedleConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each [B, 1, T, rotary_dim] in ``dtype``, of ``position_ids`` [B, T]; angles are taken in float32."""
    exponent = torch.arange(0, config.rotary_dim, 2, device=position_ids.device).float() / config.rotary_dim
    angle = position_ids[:, None, :, None].float() * config.rope_parameters["rope_theta"] ** -exponent
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [B, H, T, D] with its first rotary_dim dimensions turned by their position (rotate-half convention)."""
    turned, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, still), dim=-1)


def eager_attention_forward(
    module: NeedleAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Plain attention: query [B, H, T, D], key and value [B, 1, S, D] -> output [B, T, H, D], weights [B, H, T, S]."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class NeedleAttention(nn.Module):
    """One layer: x [B, T, hidden] -> what it adds to x, [B, T, hidden]."""

    def __init__(self, config: NeedleConfig, layer_idx: int) -> None:
        super().__init__()
        num_heads = config.num_attention_heads_per_layer[layer_idx]
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.head_dim = config.head_dim
        self.num_key_value_groups = num_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = 0.0
        self.is_causal = True
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None
        self.q_proj = nn.Linear(config.hidden_size, num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        query, key, value = (proj(x).view(heads).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.layer_type == "sliding_attention":
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(*x.shape[:-1], -1))


class NeedleLayer(nn.Module):
    """Attention and its residual connection."""

    def __init__(self, config: NeedleConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = NeedleAttention(config, layer_idx)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x + self.self_attn(x, **kwargs)


class NeedlePreTrainedModel(PreTrainedModel):
    """What transformers must know to load and run the architecture."""

    config: NeedleConfig
    config_class = NeedleConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class NeedleModel(NeedlePreTrainedModel):
    """Embeddings and layers: token ids [B, T] -> hidden states [B, T, hidden]."""

    def __init__(self, config: NeedleConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(NeedleLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(start, start + x.shape[1], device=x.device)[None]
        if isinstance(attention_mask, dict):
            masks = attention_mask
        else:
            masks = self._masks(x, attention_mask, position_ids, cache)

        position_embeddings = rotary_embedding(self.config, position_ids, x.dtype)
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            x = layer(
                x,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                cache=cache,
                position_ids=position_ids,
                **kwargs,
            )
        filled: dict[str, Any] = {CACHE_NAME: cache}
        return BaseModelOutputWithPast(last_hidden_state=x, **filled)

    def _masks(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor, cache: Cache | None
    ) -> dict[str, Tensor | None]:
        """One mask per layer type, [B, 1, T, S of that type's cache layers]; None if the backend needs none."""

        def mask(layer_type: str) -> Any:
            seen: Any = None if cache is None else LayerView(cache, self.config.layer_types.index(layer_type))
            make = MASK_FUNCTIONS[layer_type]
            return make(self.config, x, attention_mask, seen, position_ids)  # names differ between versions

        return {layer_type: mask(layer_type) for layer_type in dict.fromkeys(self.config.layer_types)}


class LayerView:
    """One layer's view of a cache, for transformers' mask functions.

    These functions size a chunked mask by the first layer that drops tokens. Here it is a sliding layer, which keeps
    255 tokens; a chunked layer keeps 1,535. So each mask is sized by a layer of its own kind.
    """

    def __init__(self, cache: Cache, layer_idx: int) -> None:
        self._cache = cache
        self._layer_idx = layer_idx
        self.is_sliding = [cache.is_sliding[layer_idx]] if layer_idx < len(cache.is_sliding) else [False]
        self.is_compileable = cache.is_compileable

    def get_query_offset(self, _layer_idx: int = 0) -> int:
        return self._cache.get_query_offset(self._layer_idx)

    def get_mask_sizes(self, query_length: int, _layer_idx: int = 0) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._layer_idx)


class NeedleForCausalLM(NeedlePreTrainedModel, GenerationMixin):
    """The model with its head: token ids [B, T] -> logits [B, positions kept, vocab]."""

    def __init__(self, config: NeedleConfig) -> None:
        super().__init__(config)
        self.model = NeedleModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """``logits_to_keep``: the last n positions (0: all), or a 1-D index tensor. Other keywords reach attention."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        return CausalLMOutputWithPast(logits=logits, **{CACHE_NAME: getattr(outputs, CACHE_NAME)})
