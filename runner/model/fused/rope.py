"""Rotary positions of queries and keys as one kernel, where modeling code takes fourteen; on a CPU as a loop.

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

from kvtier.attention.workers import over_rows
from kvtier.machine.loops.rows import turned
from runner.model.fused.distance import relative
from runner.model.recorded import visible

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
        "forward" not in vars(module)
        and isinstance(forward, FunctionType)
        and not forward.__closure__
        and NAME in forward.__code__.co_names
        and inspect.isfunction(own)
        and list(inspect.signature(own).parameters)[:4] == _ARGUMENTS
    )


def kind(module: Any) -> tuple[object, ...]:
    """What one trial speaks for."""
    return type(module), next(module.parameters()).dtype


def has_loop(module: nn.Module) -> bool:
    """Whether our loops can turn its queries and keys."""
    weight = next(module.parameters(), None)
    return weight is not None and weight.is_cpu and weight.dtype is torch.float32


def fused(module: Any) -> Callable[..., Tensor]:
    """The module's forward with our kernel in it; calls that it cannot serve go to the family's function."""
    forward = inspect.unwrap(type(module).forward)
    functions = {**forward.__globals__, NAME: turning(forward.__globals__[NAME], by_loop=has_loop(module))}
    ours = FunctionType(forward.__code__, functions, forward.__name__, forward.__defaults__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(ours, module)


WAYS = (fused,)


def turning(own: Callable[..., Any], *, by_loop: bool = False) -> Callable[..., Any]:
    """``own``, by our loop or kernel if that can read the arguments."""

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> Any:
        mixed = by_loop and any(x.dtype is not torch.float32 or not x.is_cpu or x.is_neg() for x in (q, k, cos, sin))
        if more or named or mixed or not takes(q, k, cos, sin):
            return own(q, k, cos, sin, *more, **named)
        if by_loop:
            cos, sin = cos.contiguous(), sin.contiguous()
            return _turned(q, cos, sin), _turned(k, cos, sin)
        from runner.model.fused import triton_rope

        return triton_rope.launch(q, k, cos, sin)

    return visible(turn)


def takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether ours can read them as they lie: one sequence, numbers of a head side by side."""
    size = q.shape[-1]
    return (
        q.ndim == k.ndim == 4
        and cos.ndim == 3
        and cos.shape == sin.shape
        and len(q) == len(k) == len(cos) == 1
        and q.shape[2] == k.shape[2] == cos.shape[1] > 0
        and k.shape[-1] == size
        and size % 2 == 0
        and cos.shape[2] in (size, size // 2)
        and q.stride(-1) == k.stride(-1) == 1
        and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    )


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, heads, tokens, size], turned, with a token's heads side by side in memory."""
    _, heads, tokens, size = x.shape
    out = x.new_empty(1, tokens, heads, size)
    strides = x.stride(2), x.stride(1), heads * size, size, cos.shape[2], cos.shape[2] - size // 2

    def compute(begin: int, end: int) -> bool:
        angles = cos.data_ptr(), sin.data_ptr()
        return bool(turned(out.data_ptr(), x.data_ptr(), angles, begin, end, heads, size, strides))

    over_rows(compute, tokens, x.numel())
    return out.transpose(1, 2)


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
            found = relative(ours_, own_)
            if ours_.shape != own_.shape or not found <= _TOLERANCE.get(weight.dtype, 0.0):
                return f"differs by {found:.2g} with {angles} angles a head"
    return "" if tried == 1 else f"takes {tried} forms of angles"
