"""The mask that a family's own code builds, read as a rule: whether token q sees token k, at any distance.

Owns       an attention implementation that attends to nothing and notes the rule of each layer's mask.
Promises   a rule is compared with the group's at the borders of all windows and chunks, however long they are.
Does not   know masks that a family makes without transformers' mask functions: such layers have no rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvtier.geometry.kinds import Attention
from kvtier.geometry.spec import CacheSpec

NAME = "kvtier-masks"
"""The attention implementation that notes the masks."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, from the indices of batch, head, query and key, as in transformers' mask functions."""
_FAR = 1 << 20
"""A token far from the first, which full attention still shows."""


def differences(spec: CacheSpec, rules: Mapping[int, Rule], device: torch.device) -> dict[int, str]:
    """Per layer whose rule differs from its group's mask: the first difference, as text. ``rules`` as noted."""
    spans = {group.attention.span_tokens for group in spec.groups}
    edges = sorted(
        {0, 1, _FAR} | {n for span in spans if span for n in (span - 1, span, span + 1, 2 * span, 2 * span + 1)}
    )
    pairs = [(q, k) for q in edges for k in edges]
    zeros, queries, keys = (
        torch.tensor(column, device=device) for column in zip(*((0, q, k) for q, k in pairs), strict=True)
    )
    found: dict[int, str] = {}
    known: dict[tuple[Rule, Attention], str | None] = {}
    for layer, rule in rules.items():
        if (place := spec.places("kv")[layer]) is None:
            continue  # refused when it attends
        attention = spec.group(place[0]).attention
        if (rule, attention) not in known:
            seen = rule(zeros, zeros, queries, keys).expand(len(pairs)).tolist()
            known[rule, attention] = next(
                (
                    f"token {q} {'sees' if sees else 'does not see'} token {k}, which {attention} does otherwise"
                    for (q, k), sees in zip(pairs, seen, strict=True)
                    if sees != (attention.first_visible(q) <= k <= q)
                ),
                None,
            )
        if (difference := known[rule, attention]) is not None:
            found[layer] = difference
    return found


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    kvtier: dict[int, Rule] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Notes the layer's rule in ``kvtier``; returns zeros [1, T, Hq, Dv]."""
    rule = getattr(attention_mask, "kvtier_rule", None)
    layer = getattr(module, "layer_idx", None)
    if kvtier is not None and rule is not None and layer is not None:
        kvtier[layer] = rule
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _mask(
    q_length: int,
    kv_length: int,
    mask_function: Rule,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """A mask that hides nothing and knows its rule, if the rule goes by distance alone.

    transformers allows no skip for tokens of an image, packed sequences or a function of the family's own.
    """
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=dtype, device=device)
    if attention_mask is None and allow_is_causal_skip:
        mask.kvtier_rule = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
