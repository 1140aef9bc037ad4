"""Rotary positions of queries and keys as one kernel, where modeling code takes fourteen.

Attention modules of transformers call a function of their file, ``apply_rotary_pos_emb``. A fused forward is the
module's own code, in which this name means ours. Others who use the file see nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"
_ARGUMENTS = ["q", "k", "cos", "sin"]
_TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The most that the RMS of a difference may be, relative."""
_TOKENS, _HEADS, _KV_HEADS, _SIZE = 5, 4, 2, 64
"""Sizes of the trial."""


def is_one(module: nn.Module) -> bool:
    """Whether its forward calls that function, on heads of one size."""
    forward = inspect.unwrap(type(module).forward)
    own = getattr(forward, "__globals__", {}).get(NAME)
    return (
        isinstance(forward, FunctionType)
        and not forward.__closure__
        and NAME in forward.__code__.co_names
        and inspect.isfunction(own)
        and list(inspect.signature(own).parameters)[:4] == _ARGUMENTS
    )


def kind(module: Any) -> tuple[object, ...]:
    """What one trial speaks for."""
    return type(module), next(module.parameters()).dtype


def fused(module: Any) -> Callable[..., Tensor]:
    """The module's forward with our kernel in it; calls that it cannot serve go to the family's function."""
    forward = inspect.unwrap(type(module).forward)
    functions = {**forward.__globals__, NAME: turning(forward.__globals__[NAME])}
    ours = FunctionType(forward.__code__, functions, forward.__name__, forward.__defaults__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(ours, module)


WAYS = (fused,)


def turning(own: Callable[..., Any]) -> Callable[..., Any]:
    """``own``, by our kernel if that can read the arguments."""
    from runner.model.fused.triton_rope import launch, takes

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        if more or named or not takes(q, k, cos, sin):
            return own(q, k, cos, sin, *more, **named)
        return launch(q, k, cos, sin)

    return turn


@torch.no_grad()
def differs(module: Any, forward: Any) -> str:
    """How our function differs from the family's on random heads and angles; "" if it does not beyond rounding.

    Families give an angle to each number of a head or to each pair; ``own`` refuses the form that is not its.
    """
    own, ours = (inspect.unwrap(f).__globals__[NAME] for f in (type(module).forward, forward.__func__))
    weight, generator, tried = next(module.parameters()), torch.Generator().manual_seed(0), 0
    for angles in (_SIZE, _SIZE // 2):
        q, k = (torch.randn(1, _TOKENS, n, _SIZE, generator=generator).transpose(1, 2) for n in (_HEADS, _KV_HEADS))
        cos, sin = (torch.randn(1, _TOKENS, angles, generator=generator) for _ in range(2))
        given = [x.to(weight) for x in (q, k, cos, sin)]
        try:
            expected = own(*given)
        except RuntimeError:
            continue
        tried += 1
        for ours_, own_ in zip(ours(*given), expected, strict=True):
            found = float((ours_ - own_).float().square().mean().sqrt() / own_.float().square().mean().sqrt())
            if ours_.shape != own_.shape or not found <= _TOLERANCE.get(weight.dtype, 0.0):
                return f"differs by {found:.2g} with {angles} angles a head"
    return "" if tried == 1 else f"takes {tried} forms of angles"
