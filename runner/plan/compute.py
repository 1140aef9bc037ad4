"""FLOPs of a forward pass over a prompt, from a config.

Owns       the count: two per weight that a token is multiplied with, and the FLOPs of attention.
Promises   weights are the family's own modeling code's, built without memory (torch's meta device). Of experts only the
           part that a token is sent to counts. Embeddings do not count. The output head counts once, for the prompt's
           last token. Attention is counted by the pairs of tokens that each layer's mask shows.
Does not   know how fast a machine is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from transformers import AutoModelForCausalLM

from kvtier.geometry.kinds import Attention, Kind, SlidingWindow
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.integrations.refusals import field
from kvtier.integrations.transformers import is_latent, picked, query_heads, text_config
from kvtier.machine.errors import UnsupportedModel
from runner.model.checkpoint import auto_class

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True)
class Weights:
    """A model's weights, as numbers of them. ``per_token``: multiplied with each token; ``head``: once a prompt."""

    total: int
    per_token: int
    head: int


def check_decoder(hf_config: Any) -> None:
    """Raises ``UnsupportedModel`` for a config of something that does not generate text."""
    try:
        auto_class(hf_config)
    except UnsupportedModel:
        auto_class(text_config(hf_config))


def weights(hf_config: Any) -> Weights:
    """Counts the weights of the decoder. Raises ``UnsupportedModel`` if they cannot be told from the config."""
    text = text_config(hf_config)
    try:
        with torch.device("meta"):
            own = copy.deepcopy(text)  # transformers writes the dtype into it
            model: Any = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, trust_remote_code=False)
    except Exception as problem:  # modeling code of any family: it raises what it likes
        raise UnsupportedModel(
            f"{text.model_type}: its weights cannot be counted without a checkpoint "
            f"({type(problem).__name__}: {' '.join(str(problem).split())[:200]})"
        ) from problem
    head = model.get_output_embeddings()
    head_weight = None if head is None else head.weight
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    total, per_token = 0, 0.0
    for name, weight in model.named_parameters():
        total += weight.numel()
        if weight.dim() < 2 or id(weight) in looked_up or weight is head_weight or name.endswith("bias"):
            continue
        per_token += weight.numel() * (_expert_share(text, name) if "experts" in name.split(".") else 1.0)
    return Weights(total, round(per_token), 0 if head_weight is None else head_weight.numel())


def _expert_share(text: Any, name: str) -> float:
    """The part of the experts' weights that one token is multiplied with."""
    every = next((n for key in _NUM_EXPERTS if isinstance(n := field(text, key), int) and n > 0), None)
    chosen = next((n for key in _EXPERTS_PER_TOKEN if isinstance(n := field(text, key), int) and n > 0), None)
    if every is None or chosen is None:
        raise UnsupportedModel(f"{text.model_type}: its config does not say how many experts a token uses ({name})")
    return min(1.0, chosen / every)


def weight_flops(counted: Weights, num_tokens: int) -> int:
    """FLOPs of the weights for a prompt of ``num_tokens`` tokens."""
    return 2 * (counted.per_token * num_tokens + counted.head)


def attention_flops(hf_config: Any, spec: CacheSpec, num_tokens: int) -> int:
    """FLOPs of queries with keys and of their weights with values, in all layers, including layers that share KV.

    Those of an index with all its keys count too, and of the tokens or entries that it picks so many.
    """
    total, most, expanded = 0, picked(hf_config), _expanded_width(hf_config)
    for i, (heads, places) in enumerate(zip(query_heads(hf_config, spec), spec.layers, strict=True)):
        for role, (name, _) in places.items():
            group = spec.group(name)
            if role in ("kv", "entries"):
                k, v = group.head_dims
                limit = most[i] if role == "entries" or "entries" not in places else None
                total += 2 * heads * (expanded or k + (v or k)) * seen(group, num_tokens, limit)  # K alone is V, too
            elif role == "index":
                scorers = int(field(text_config(hf_config), "index_n_heads"))
                total += 2 * scorers * group.head_dim * seen(group, num_tokens)
    return total


def _expanded_width(hf_config: Any) -> int:
    """Multiplications of a query head with the key and the value that prompts expand a latent to; 0: no latents."""
    if not is_latent(hf_config):
        return 0
    sizes = [field(text_config(hf_config), name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    return sum(int(size) for size in sizes)


def seen(group: GroupSpec, num_tokens: int, most: int | None = None) -> int:
    """Pairs (i, e) of a token and an entry of K that it sees, its newest ``most`` or fewer of them."""
    m = group.entry_tokens
    if m == 1:
        return pairs(group.attention if most is None else SlidingWindow(most), num_tokens)
    whole = num_tokens // m if most is None else min(most, num_tokens // m)
    return m * _triangle(whole - 1) + (num_tokens - whole * m + 1) * whole if whole else 0


def pairs(attention: Attention, num_tokens: int) -> int:
    """Pairs (i, j) of tokens below ``num_tokens`` of which i sees j."""
    span = attention.span_tokens
    if attention.kind is Kind.FULL:
        return _triangle(num_tokens)
    if attention.kind is Kind.CHUNK:
        whole, rest = divmod(num_tokens, span)
        return whole * _triangle(span) + _triangle(rest)
    if attention.kind is Kind.WINDOW:
        grown = min(span, num_tokens)
        return _triangle(grown) + (num_tokens - grown) * span
    if attention.kind is Kind.STATE:
        return 0
    assert_never(attention.kind)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
