"""transformers' own eager forward with K and V as an e4m3 cache would give them back: the oracle of float8 pools.

Written from the format's definition, apart from kvtier's code: values are rounded by torch's cast, head by head.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "eager_with_rounded_kv"
_scales: dict[int, Mapping[str, Sequence[float]]] = {}


def rounded(x: Tensor, scales: Sequence[float]) -> Tensor:
    """[B, Hkv, T, D] as e4m3 times its head's scale gives it back."""
    heads = []
    for h, scale in enumerate(scales):
        head = x[:, h].double() / scale
        heads.append(head.clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale)
    return torch.stack(heads, 1).to(x.dtype)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> Any:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    scales = _scales[module.layer_idx]
    key, value = rounded(key, scales["k"]), rounded(value, scales["v"])
    return eager(module, query, key, value, attention_mask=attention_mask, **options)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def expected(folder: Path, sequences: Sequence[np.ndarray], scales: Mapping[int, Any]) -> list[Tensor]:
    """Per sequence, float32 [tokens, vocab]; ``scales`` by model layer, lists of one per KV head."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME, dtype=torch.float32)
    _scales.clear()
    _scales.update(scales)
    with torch.no_grad():
        return [model(torch.tensor(ids)[None], use_cache=False).logits[0] for ids in sequences]
