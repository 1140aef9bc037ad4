"""RMS norms as torch's own kernel, where modeling code takes eight.

Families write them out: squares, mean, root, and a weight that is multiplied before or after rounding, or as 1 + w.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The most that the RMS of a difference may be on a GPU, relative. On a CPU no bit may differ."""
_ROWS = 1, 3, 70
"""Rows of the trial's steps."""


def is_one(module: nn.Module) -> bool:
    """Whether it looks like one: its name, one weight [n], an epsilon, and a forward of hidden states alone."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and not isinstance(module, nn.RMSNorm)
        and isinstance(weight, Tensor)
        and weight.ndim == 1
        and _epsilon(module) is not None
        and len(inspect.signature(type(module).forward).parameters) == 2
    )


def kind(module: Any) -> tuple[object, ...]:
    """What one trial speaks for."""
    return type(module), module.weight.shape, module.weight.dtype, _epsilon(module)


def plain(module: Any) -> Callable[..., Tensor]:
    """A forward for ``module`` if its weight is the factor."""
    epsilon, weight = _epsilon(module), module.weight.detach()
    return lambda hidden_states: F.rms_norm(hidden_states, weight.shape, weight, epsilon)


def plus_one(module: Any) -> Callable[..., Tensor]:
    """A forward for ``module`` if the factor is 1 + weight, which a half type would round."""
    epsilon, weight = _epsilon(module), 1.0 + module.weight.detach().float()
    if module.weight.dtype is torch.float32:
        return lambda hidden_states: F.rms_norm(hidden_states, weight.shape, weight, epsilon)
    return lambda hidden_states: F.rms_norm(hidden_states.float(), weight.shape, weight, epsilon).to(hidden_states)


WAYS = plain, plus_one


@torch.no_grad()
def differs(module: Any, forward: Callable[..., Tensor]) -> str:
    """How ``forward`` differs from the module's own on random hidden states; "" if it does not."""
    weight, generator = module.weight, torch.Generator().manual_seed(0)
    limit, exact = _TOLERANCE.get(weight.dtype, 1e-6), weight.device.type == "cpu"
    for rows in _ROWS:
        x = (4 * torch.randn(1, rows, len(weight), generator=generator)).to(weight)
        own, ours = type(module).forward(module, x), forward(x)
        found = float((ours - own).float().square().mean().sqrt() / own.float().square().mean().sqrt().clamp_min(1e-12))
        if ours.dtype is not own.dtype or not (torch.equal(ours, own) if exact else found <= limit):
            return f"differs by {found:.2g} on {rows} rows"
    return ""


def _epsilon(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(found) if isinstance(found, int | float) else None
