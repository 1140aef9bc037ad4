"""A layer of experts as four kernels, where transformers runs thirty.

transformers sorts and copies tokens, pads products and combines them in kernels of their own. On an H200 its layer of
gpt-oss-20b takes 692 us for 64 tokens, and this one 379 (benchmarks/results/gpu.json).
Whatever cannot be told from the module's own attributes, or does not stand the trial, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.model.fused.distance import relative

_TOKENS = 1, 7
"""Tokens of the trial's first steps. The last has so many that larger tiles are tried."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The most that the RMS of a difference may be, relative."""


def is_one(module: nn.Module) -> bool:
    """Whether it is a layer of gated experts as transformers makes them, with nothing else in it."""
    return (
        getattr(module, "has_gate", False) is True
        and not getattr(module, "has_post_expert_norm", False)
        and not getattr(module, "_is_expert_parallel", False)
        and all(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in ("gate_up_proj", "down_proj"))
    )


def kind(module: Any) -> tuple[object, ...]:
    """What one trial speaks for: modules of a kind differ in the values of their weights only."""
    up, down = module.gate_up_proj, module.down_proj
    act = type(getattr(module, "act_fn", None))
    return type(module), up.shape, up.stride(), down.shape, down.stride(), up.dtype, act, _clamp(module)


def fused(module: Any, cuts: str = "HOPPER") -> Callable[..., Tensor] | None:
    """A forward for ``module``; None if its activation or its dtype is none that is known here."""
    from runner.model.fused import triton_experts
    from runner.model.fused.triton_experts import Weights, launch

    transposed, biased = module.is_transposed, module.has_bias
    up, down = (w if transposed else w.transpose(1, 2) for w in (module.gate_up_proj, module.down_proj))
    up_bias, down_bias = (module.gate_up_proj_bias, module.down_proj_bias) if biased else (None, None)
    act = _activation(module)
    if act is None or _dtype(module) not in _TOLERANCE or down.dtype is not up.dtype:
        return None
    scales: tuple[Tensor, ...] = ()
    if _is_packed(module):
        if _dtype(module) is not torch.bfloat16 or not act[1]:
            return None
        scales = _by_parts(module.gate_up_proj_scales), _by_parts(module.down_proj_scales)
    weights, cut = Weights(up, down, up_bias, down_bias, *act, *scales), getattr(triton_experts, cuts)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not len(hidden_states):
            return torch.empty_like(hidden_states)
        return launch(weights, cut, hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.contiguous())

    return forward


WAYS = fused, partial(fused, cuts="SMALLER")


@torch.no_grad()
def differs(module: Any, forward: Callable[..., Tensor]) -> str:
    """How ``forward`` differs from the module's own on random tokens; "" if it does not beyond rounding."""
    from runner.model.fused.triton_experts import MANY_ROWS

    up, dtype = module.gate_up_proj, _dtype(module)
    experts, width = up.shape[0], up.shape[1 if module.is_transposed else 2] * (1 + _is_packed(module))
    generator = torch.Generator().manual_seed(0)
    top_k = min(experts, 4)
    for tokens in (*_TOKENS, MANY_ROWS * experts // top_k + 1):
        x = torch.randn(tokens, width, generator=generator).to(up.device, dtype)
        scores, ids = torch.randn(tokens, experts, generator=generator).to(up.device).topk(top_k)
        shares = scores.softmax(1).to(dtype)
        own, ours = type(module).forward(module, x, ids, shares).float(), forward(x, ids, shares).float()
        found = relative(ours, own)
        if not found <= _TOLERANCE[dtype]:
            return f"differs by {found:.2g} on {tokens} tokens"
    return ""


def _is_packed(module: Any) -> bool:
    """Whether its weights are in MXFP4 (mxfp4.py)."""
    return module.gate_up_proj.dtype is torch.uint8


def _dtype(module: Any) -> torch.dtype:
    """Of the tokens that it takes."""
    of: Tensor = module.gate_up_proj_bias if _is_packed(module) else module.gate_up_proj
    return of.dtype


def _by_parts(scales: nn.Parameter) -> Tensor:
    """Scales [experts, inner / 32, columns], side by side as kernels read them; the module's become a view of it."""
    turned = scales.transpose(1, 2).contiguous()
    scales.data = turned.transpose(1, 2)
    return turned


def _clamp(module: Any) -> tuple[float, float]:
    """The limit and the slope of gpt-oss's gate; zeros if there are none."""
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", None)
    if isinstance(limit, int | float) and isinstance(alpha, int | float):
        return float(limit), float(alpha)
    return 0.0, 0.0


def _activation(module: Any) -> tuple[Any, bool, float, float] | None:
    """Which activation it is, whether its columns are interleaved, limit and slope: found by trying its own gate."""
    from runner.model.fused.triton_experts import Act

    limit, alpha = _clamp(module)
    both = 8 * torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(module.gate_up_proj.device)
    own = module._apply_gate(both)
    for interleaved in (False, True):
        gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
        clamped = gate.clamp(max=limit)
        for act, value in (
            (Act.SILU, F.silu(gate) * up),
            (Act.GELU_TANH, F.gelu(gate, approximate="tanh") * up),
            (Act.CLAMPED, (up.clamp(-limit, limit) + 1) * clamped * torch.sigmoid(clamped * alpha)),
        ):
            if own.shape == value.shape and torch.allclose(own, value, rtol=1e-4, atol=1e-4):
                return act, interleaved, limit, alpha
    return None
