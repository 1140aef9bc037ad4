"""Feed-forward layers with a gate, down(act(gate(x)) * up(x)), of a CPU: gate and up as one product, then one loop.

One product of both weights takes less time than two at few rows, and reads the input once.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvtier.attention.workers import over_rows
from kvtier.machine.loops.rows import gated
from runner.model.fused import linears
from runner.model.fused.distance import relative
from runner.model.fused.packed import packed
from runner.model.recorded import visible

_PARTS = "gate_proj", "up_proj", "down_proj"
_TOLERANCE = 1e-5
"""The most that the RMS of a difference may be, relative: sums have other orders."""
_TRIED = (1, 2.0), (3, 2.0), (17, 2.0), (17, 40.0), (17, 4000.0)
"""Rows of the trial's steps, and the RMS of their gates: activations differ at 2, a family's clamps show beyond."""
_WEIGHTS = {"gate_proj.weight", "up_proj.weight", "down_proj.weight", "down_proj.bias"}


def is_one(module: nn.Module, exact: bool = False) -> bool:
    """Whether it looks like one: three plain linear layers that can be packed, float32, and a forward of one input."""
    parts: list[Any] = [getattr(module, name, None) for name in _PARTS]
    if "forward" in vars(module) or not all(type(part) is nn.Linear for part in parts):
        return False
    gate, up, down = parts
    return (
        all(linears.is_one(part, exact) and part.weight.dtype is torch.float32 for part in parts)
        and gate.bias is None
        and up.bias is None
        and {name for name, _ in module.named_parameters()} <= _WEIGHTS
        and not any(True for _ in module.buffers())
        and gate.weight.shape == up.weight.shape
        and gate.out_features == down.in_features
        and len(inspect.signature(type(module).forward).parameters) == 2
    )


def kind(module: Any) -> tuple[object, ...]:
    """What one trial speaks for. Numbers of a module's own, such as a layer's sparsity, are a part of it."""
    own = sorted((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str))
    return type(module), module.gate_proj.weight.dtype, repr(module), *own


class Gated:
    """A forward for ``module``, a feed-forward layer, with the packed weights of gate and up in one.

    Its gate g becomes g / (1 + exp(-``linear`` g - ``cubic`` g^3)).
    """

    def __init__(self, module: Any, linear: float, cubic: float) -> None:
        weight = torch.cat([module.gate_proj.weight.detach(), module.up_proj.weight.detach()])
        self._both, self._size, self._module = packed(weight), module.gate_proj.out_features, module
        self._factors = np.float32(linear), np.float32(cubic)

    @visible
    def __call__(self, x: Tensor) -> Tensor:
        both = self._both(x)
        out = both.new_empty(*both.shape[:-1], self._size)

        def compute(begin: int, end: int) -> bool:
            return bool(gated(out.data_ptr(), both.data_ptr(), begin, end, self._size, *self._factors))

        over_rows(compute, out.numel() // self._size, out.numel())
        result: Tensor = self._module.down_proj(out)
        return result

    def __deepcopy__(self, memo: Any) -> Gated:
        """A copied model shares what is packed, as its linear layers do."""
        return self

    def gate(self, x: Tensor) -> Tensor:
        """What the layer of the gate alone gives: a part of both products."""
        return self._both(x)[..., : self._size]

    def up(self, x: Tensor) -> Tensor:
        """What the other layer gives: a part of both, too."""
        return self._both(x)[..., self._size :]


def silu(module: Any) -> Gated:
    """A forward for ``module`` if its activation is g / (1 + exp(-g))."""
    return Gated(module, 1.0, 0.0)


def gelu_tanh(module: Any) -> Gated:
    """A forward for ``module`` if its activation is GELU by its approximation with tanh."""
    scale = (8.0 / np.pi) ** 0.5
    return Gated(module, scale, 0.044715 * scale)


WAYS = silu, gelu_tanh


def take_over(module: Any) -> tuple[nn.Linear, nn.Linear]:
    """The layers of gate and up of a fused ``module``, which from now on use its packed weights, too."""
    layers = module.gate_proj, module.up_proj
    layers[0].forward, layers[1].forward = module.forward.gate, module.forward.up
    return layers


@torch.no_grad()
def differs(module: Any, forward: Gated) -> str:
    """How ``forward`` differs from the module's own on random rows; "" if it does not beyond rounding."""
    generator = torch.Generator().manual_seed(0)
    for rows, spread in _TRIED:
        x = torch.randn(1, rows, module.gate_proj.in_features, generator=generator)
        x *= spread / module.gate_proj(x).square().mean().sqrt().clamp_min(1e-12)
        own, ours = type(module).forward(module, x), forward(x)
        found = relative(ours, own)
        if ours.shape != own.shape or not found <= _TOLERANCE:
            return f"differs by {found:.2g} on {rows} rows of gates of {spread:g}"
    return ""
