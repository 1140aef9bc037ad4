"""RMS norms as one kernel, where modeling code takes eight: a compiled loop for float32 on a CPU, else torch's.

Families write them out: squares, mean, root, and a weight that is multiplied before or after rounding, or as 1 + w.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvtier.attention.workers import over_rows
from kvtier.machine.loops.rows import normed
from runner.model.fused.distance import relative
from runner.model.recorded import visible

_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The most that the RMS of a difference may be, relative; 1e-6 for others. Of half types on a CPU no bit may differ."""
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
    factor, epsilon = module.weight.detach(), _epsilon(module)
    if _has_loop(module):
        return _loop(module, factor)
    return visible(lambda hidden_states: F.rms_norm(hidden_states, factor.shape, factor, epsilon))


def plus_one(module: Any) -> Callable[..., Tensor]:
    """A forward for ``module`` if the factor is 1 + weight, which a half type would round."""
    factor, epsilon = 1.0 + module.weight.detach().float(), _epsilon(module)
    if _has_loop(module):
        return _loop(module, factor)
    return visible(
        lambda hidden_states: F.rms_norm(hidden_states.float(), factor.shape, factor, epsilon).to(hidden_states)
    )


def _has_loop(module: Any) -> bool:
    return module.weight.is_cpu and module.weight.dtype is torch.float32


def _loop(module: Any, factor: Tensor) -> Callable[..., Tensor]:
    """A forward by the compiled loop; what it cannot take gets the module's own."""
    factor, size, epsilon = factor.contiguous(), factor.shape[0], np.float32(_epsilon(module))

    @visible
    def forward(hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if x.dtype is torch.float32 and x.is_cpu and x.shape[-1] == size and not x.is_neg():
            return _by_loop(factor, epsilon, x)
        own: Tensor = type(module).forward(module, x)
        return own

    return forward


def _by_loop(factor: Tensor, epsilon: np.float32, x: Tensor) -> Tensor:
    """The norm of each row of ``x`` [..., n], float32. Of one sequence's heads, the result has tokens or heads
    outermost in memory, as ``x`` has; else it is contiguous."""
    size = factor.shape[0]
    inner = 1
    strides: tuple[int, ...] = (size, 0, size, 0)  # of x, then of out
    if x.is_contiguous():
        out = torch.empty_like(x)
    elif x.ndim == 4 and x.shape[0] == 1 and x.stride(3) == 1:
        _, a, b, _ = x.shape
        swapped = x.stride(1) < x.stride(2)
        out = x.new_empty(1, b, a, size).transpose(1, 2) if swapped else x.new_empty(x.shape)
        inner, strides = b, (*x.stride()[1:3], *out.stride()[1:3])
    else:
        x = x.contiguous()
        out = torch.empty_like(x)

    def compute(begin: int, end: int) -> bool:
        addresses = out.data_ptr(), x.data_ptr(), factor.data_ptr()
        return bool(normed(*addresses, size, epsilon, begin, end, inner, strides))

    over_rows(compute, x.numel() // size, x.numel())
    return out


WAYS = plain, plus_one


@torch.no_grad()
def differs(module: Any, forward: Callable[..., Tensor]) -> str:
    """How ``forward`` differs from the module's own on random hidden states; "" if it does not."""
    weight, generator = module.weight, torch.Generator().manual_seed(0)
    limit, exact = _TOLERANCE.get(weight.dtype, 1e-6), weight.is_cpu and not _has_loop(module)
    for rows in _ROWS:
        x = (4 * torch.randn(1, rows, len(weight), generator=generator)).to(weight)
        own, ours = type(module).forward(module, x), forward(x)
        found = relative(ours, own)
        if ours.dtype is not own.dtype or not (torch.equal(ours, own) if exact else found <= limit):
            return f"differs by {found:.2g} on {rows} rows"
    return ""


def _epsilon(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(found) if isinstance(found, int | float) else None
