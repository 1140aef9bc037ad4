"""What a module computes beside linear layers, in the exact way: products with weights, and elementwise functions.

Promises   inside ``exactly`` the bits of a row of a product with weights do not depend on other rows (``packed``). No
           element of an elementwise function is among the last of a thread's share of an array, which torch computes by
           other code.
Does not   judge: ``trial`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from runner.model.fused.packed import Product, onednn_product, packed

_STEP = 64
"""Elements; a multiple of what torch computes at once."""
_SHARE = 32_768
"""Elements that torch gives to a thread, at least; gelu's go to all threads."""
_ACTIVATIONS = "transformers.activations", "torch.nn.modules.activation"
_ELEMENTWISE = {
    *(torch.sigmoid, Tensor.sigmoid, F.sigmoid, torch.log1p, Tensor.log1p, torch.exp2, Tensor.exp2),
    *(F.silu, F.gelu, F.softplus, torch.tanh, Tensor.tanh, torch.exp, Tensor.exp, torch.erf, Tensor.erf, torch.pow),
}


def needs_it(module: nn.Module) -> bool:
    """Whether it is an activation, or has a matrix of weights whose products are not packed: a router, experts."""
    if type(module).__module__ in _ACTIVATIONS:
        return True
    if isinstance(module, nn.Embedding) or "forward" in vars(module):
        return False
    return any(weight.ndim > 1 for weight in module.parameters(recurse=False))


@contextmanager
def callers(model: nn.Module) -> Iterator[set[nn.Module]]:
    """The modules whose own code calls one of the elementwise functions meanwhile."""
    found, running = set[nn.Module](), [model]

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in _ELEMENTWISE:
                found.add(running[-1])
            return function(*args, **(kwargs or {}))

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        running.pop()

    hooks: list[Any] = [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in model.modules()]
    try:
        with Watching():
            yield found
    finally:
        for hook in hooks:
            hook.remove()


class Weights:
    """Packed copies of matrices among a model's weights, made at their first use."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own = {weight.untyped_storage().data_ptr() for weight in parameters}
        self._packed: dict[tuple[Any, ...], Product] = {}

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., K] times the transpose of ``weight`` [n, K]."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], weight.shape[0])
        weight = weight.detach()
        if weight.untyped_storage().data_ptr() not in self._own:  # it was computed, and is used once
            return onednn_product(x, weight.contiguous())
        key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        if key not in self._packed:
            self._packed[key] = packed(weight.contiguous())
        return self._packed[key](x)


def exactly(forward: Callable[..., Any], weights: Weights) -> Callable[..., Any]:
    """``forward`` with the products and elementwise functions above."""
    mode = _Exactly(weights)

    def ours(*args: Any, **named: Any) -> Any:
        with mode:
            return forward(*args, **named)

    return ours


class _Exactly(TorchFunctionMode):
    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _ELEMENTWISE and isinstance(args[0], Tensor) and not kwargs.get("inplace"):
            return _whole(function, args[0], *args[1:], **kwargs)
        ours = _PRODUCTS.get(function)
        out = None if ours is None or (kwargs.keys() - {"bias"}) else ours(self._weights, *args, **kwargs)
        return function(*args, **kwargs) if out is None else out


def _whole(function: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The function of ``x``, none of whose elements is at the end of the array."""
    size = _padded(x.numel(), torch.get_num_threads())
    if size == x.numel() and x.is_contiguous():
        whole: Tensor = function(x, *args, **kwargs)
        return whole
    out: Tensor = function(F.pad(x.reshape(-1), (0, size - x.numel())), *args, **kwargs)
    return out[: x.numel()].reshape(x.shape)


def _padded(size: int, threads: int) -> int:
    """The least size, from ``size`` on, of which each thread gets whole steps."""
    while size % (step := _STEP * math.lcm(threads, max(1, min(threads, -(-size // _SHARE))))):
        size += -size % step
    return size


def _linear(weights: Weights, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = weights.times(x, weight)
    return out if bias is None else out + bias


def _matmul(weights: Weights, x: Tensor, weight: Tensor) -> Tensor | None:
    return weights.times(x, weight.t()) if weight.ndim == 2 and x.ndim >= 2 else None


def _addmm(weights: Weights, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return bias + weights.times(x, weight.t())


def bmm(weights: Weights, x: Tensor, weight: Tensor) -> Tensor:
    """x [B, m, K] times ``weight`` [B, K, n]."""
    return torch.stack([weights.times(rows, each.t()) for rows, each in zip(x, weight, strict=True)])


_PRODUCTS: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.bmm: bmm,
    Tensor.bmm: bmm,
}
