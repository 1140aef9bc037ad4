"""gpt-oss's experts as they are published: MXFP4, numbers of 4 bits with a scale for 32 of them.

Owns       how such a checkpoint is read: packed, where kernels take it so, or as numbers of the other weights' dtype.
Promises   packed or not, a weight has the same value.
Does not   pack weights, or read MXFP4 of other families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import Mxfp4Config, QuantizationConfigMixin

from kvtier.attention.kernels.choice import runs_kernel

_METHOD = "kvtier_mxfp4"
_NAMES = "gate_up", "down"
BLOCKS, SCALES = "_proj_blocks", "_proj_scales"
"""How a checkpoint's names of packed weights and of their scales end."""
_BIAS = "_proj_bias"
_SHARED = 32
"""Numbers that share a scale."""
_VALUES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
"""What the lower three bits of a number mean; the fourth is its sign."""


def is_stored(config: Any) -> bool:
    """Whether the weights of a checkpoint with this config are in MXFP4."""
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return method == "mxfp4"


def stays_packed(config: Any, device: str | torch.device, dtype: torch.dtype | str) -> bool:
    """Whether a checkpoint's experts are kept as they are stored: on a GPU that runs our kernels, beside bfloat16."""
    wanted = config.dtype if dtype == "auto" else dtype
    return is_stored(config) and wanted is torch.bfloat16 and runs_kernel(torch.device(device))


def loading_options(config: Any, packed: bool) -> dict[str, Any]:
    """Further arguments of ``from_pretrained``."""
    if not is_stored(config):
        return {}
    if packed:
        config.quantization_config = {"quant_method": _METHOD}
        return {}
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def unpacked_bits(name: str, dtype: torch.dtype | str, stored: int) -> int:
    """Bits in memory of a byte of the tensor ``name``, which has ``stored`` bits, once the weights are unpacked."""
    if name.endswith(SCALES):
        return 0
    return 16 * (dtype.itemsize if isinstance(dtype, torch.dtype) else 2) if name.endswith(BLOCKS) else stored


def damage(heads: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """What is wrong with a checkpoint's packed weights, by their names' (dtype as files name it, shape); "": nothing.

    Read as they are, numbers of another dtype would be cast, and mean something else.
    """
    for stem in sorted({name.removesuffix(BLOCKS).removesuffix(SCALES) for name in heads}):
        pair = [heads.get(stem + end) for end in (BLOCKS, SCALES)]
        if pair == [None, None]:
            continue
        for end, found in zip((BLOCKS, SCALES), pair, strict=True):
            if found is None:
                return f"{stem}{end} is missing"
            if found[0] != "U8":
                return f"{stem}{end} is {found[0]}, and MXFP4 is stored as U8"
        (_, blocks), (_, scales) = ((dtype, list(shape)) for dtype, shape in filter(None, pair))
        if blocks != [*scales, _SHARED // 2]:
            return f"{stem}{BLOCKS} is {blocks}, which does not go with {SCALES} {scales}"
    return ""


def unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., n, K] of uint8 blocks [..., n, K / 32, 16] and scales [..., n, K / 32].

    A byte has two of them, the first in its lower half. A scale is the exponent of a power of two, plus 127.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    return torch.ldexp(values[halves], scales[..., None].int() - 127).flatten(-2).to(dtype)


class PackedExperts(nn.Module):
    """gpt-oss's layer of experts with its weights in MXFP4, by the checkpoint's names.

    ``gate_up_proj_blocks`` uint8 [experts, columns, K / 32, 16], ``gate_up_proj_scales`` uint8 [experts, columns,
    K / 32], ``gate_up_proj_bias`` [experts, columns]; ``down_proj`` likewise. Gate and up take turns in the columns.
    """

    has_gate, has_bias, is_transposed = True, True, False
    is_slow = True
    gate_up_proj_blocks: Tensor
    down_proj_blocks: Tensor

    def __init__(self, dense: Any) -> None:
        """``dense``: transformers' layer, whose weights may be on torch's meta device."""
        super().__init__()
        self._gate = type(dense)._apply_gate
        self.alpha, self.limit = dense.alpha, dense.limit
        for name in _NAMES:
            experts, inner, columns = getattr(dense, f"{name}_proj").shape
            if inner % _SHARED:
                raise ValueError(f"{name}_proj has rows of {inner}, and MXFP4 stores multiples of {_SHARED}")
            for end, shape in ((BLOCKS, (inner // _SHARED, _SHARED // 2)), (SCALES, (inner // _SHARED,))):
                empty = torch.empty(experts, columns, *shape, dtype=torch.uint8, device="meta")
                self.register_parameter(name + end, nn.Parameter(empty, requires_grad=False))
            self.register_parameter(name + _BIAS, getattr(dense, name + _BIAS))

    @property
    def gate_up_proj(self) -> Tensor:
        """Packed, uint8 [experts, columns, K / 2]."""
        return self.gate_up_proj_blocks.flatten(2)

    @property
    def down_proj(self) -> Tensor:
        """Packed, uint8 [experts, columns, K / 2]."""
        return self.down_proj_blocks.flatten(2)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Expert after expert, each unpacked for the moment: right, and slow. It waits for the device."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            gated = self._apply_gate(self._one(expert, "gate_up", hidden_states[token]))
            share = top_k_weights[token, place, None]
            out.index_add_(0, token, (self._one(expert, "down", gated) * share).to(out.dtype))
        return out

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = self._gate(self, gate_up)
        return gated

    def _one(self, expert: int, name: str, x: Tensor) -> Tensor:
        blocks, scales, bias = (getattr(self, name + end)[expert] for end in (BLOCKS, SCALES, _BIAS))
        return F.linear(x, unpacked(blocks, scales, x.dtype), bias)


@register_quantization_config(_METHOD)
class _Packed(QuantizationConfigMixin):
    """What tells transformers to read the packed weights as they are."""

    def __init__(self, **_: Any) -> None:
        method: Any = _METHOD
        super().__init__(method)


@register_quantizer(_METHOD)
class _Reader(HfQuantizer):
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for name, module in [*model.named_modules()]:
            if type(module).__name__ == "GptOssExperts":
                model.set_submodule(name, PackedExperts(module))
