"""Linear layers of a CPU as oneDNN's products of packed weights.

torch gives float32 products to MKL, which leaves AVX-512 unused on AMD. oneDNN, in the same torch, uses it. Which of
them is faster here is tried once.

The packed weight takes the place of the dense one. A dense weight that others use too (a head tied to the embedding)
stays beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.model.fused.distance import relative

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The most that the RMS of a difference may be, relative: sums have other orders."""
_ROWS = 1, 3, 17
"""Rows of the trial's steps."""
_PACKED_FOR = 64
"""Rows that oneDNN chooses the layout for."""
_FASTER = 0.9
"""A packed copy is worth its while if it takes at most this share of MKL's time."""
_TRIED = 32, 640, 2048
"""Rows, columns and inner size of the trial of speed."""
_SMALL = 1 << 17
"""Numbers of a weight for which torch's product takes as long or less: a call of oneDNN's costs 12 us more."""
_REPEATS = 15
_LEAST_ROWS = 2
_LEAST_ROWS_FROM_MEMORY, _CACHED = 4, 1 << 20
"""A product of 4 rows takes three quarters of the time of one of 2 if the weight, of more bytes than these, comes from
memory, and up to 1.3 times as long if it is in a core's cache."""


def is_one(module: nn.Module, exact: bool = False) -> bool:
    """Whether it is a plain float32 linear layer on a CPU for which oneDNN is faster: not a small one.

    If ``exact``, it need not be faster, and bfloat16 is taken, too: a row's bits do not depend on the rows beside it.
    """
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or not module.weight.numel():
        return False
    if exact:
        return module.weight.dtype in _TOLERANCE
    return module.weight.dtype is torch.float32 and module.weight.numel() > _SMALL and is_faster()


def kind(module: nn.Linear) -> tuple[object, ...]:
    """What one trial speaks for."""
    return "linear", module.weight.shape, module.weight.dtype, module.bias is None


def fused(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A forward for ``module`` with a packed copy of its weight. The module keeps its own (see ``let_go``)."""
    packed, bias, least = pack(module.weight), module.bias, least_rows(module.weight)
    return lambda input: rows_of_several(input, packed, bias, least)


WAYS = (fused,)


@torch.no_grad()
def differs(module: nn.Linear, forward: Callable[[Tensor], Tensor]) -> str:
    """How ``forward`` differs from torch's product on random rows; "" if it does not beyond rounding."""
    generator = torch.Generator().manual_seed(0)
    for rows in _ROWS:
        x = torch.randn(1, rows, module.in_features, generator=generator).to(module.weight)
        own, ours = nn.Linear.forward(module, x).float(), forward(x).float()
        found = relative(ours, own)
        if ours.shape != own.shape or not found <= _TOLERANCE[module.weight.dtype]:
            return f"differs by {found:.2g} on {rows} rows"
    return ""


@cache
def is_faster() -> bool:
    """Whether oneDNN's product takes less time here than torch's own, for which both are tried once."""
    rows, inner, columns = _TRIED
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    try:
        packed = pack(weight)
        ours, own = _least_s(lambda: product(x, packed, None), lambda: F.linear(x, weight))
        return ours < _FASTER * own
    except (AttributeError, RuntimeError):  # a torch without oneDNN, or without these private operations
        return False


def let_go(module: nn.Linear) -> None:
    """Gives the dense weight back, which nobody uses any more: what is left has its shape and takes no memory."""
    module.weight.data = torch.full((1,), float("nan")).expand(module.weight.shape)


def pack(weight: Tensor) -> Tensor:
    """``weight`` [n, K] in oneDNN's own layout."""
    operations: Any = torch.ops.mkldnn
    return operations._reorder_linear_weight(weight.detach(), _PACKED_FOR)


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], contiguous, times the transpose of a weight [n, K], packed or not."""
    operations: Any = torch.ops.mkldnn
    return operations._linear_pointwise(x, packed, bias, "none", [], "")


def rows_of_several(x: Tensor, packed: Tensor, bias: Tensor | None, least: int) -> Tensor:
    """``product`` of x [..., K], any strides. Fewer rows than ``least`` are computed as the first of so many.

    One row alone is summed in another order if the inner size is large; as one of several it has the bits of a batch.
    """
    rows = x.numel() // x.shape[-1]
    if rows >= least:
        return product(x.contiguous(), packed, bias)
    out = product(F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, least - rows)), packed, bias)[:rows]
    return out.reshape(*x.shape[:-1], out.shape[-1])


def least_rows(weight: Tensor) -> int:
    """How many rows a product with this weight has at least."""
    return _LEAST_ROWS if weight.nbytes <= _CACHED else _LEAST_ROWS_FROM_MEMORY


def _least_s(*works: Callable[[], object]) -> list[float]:
    """CPU seconds of the shortest run of each. They take turns, so what else the machine does hinders both."""
    least = [float("inf")] * len(works)
    for _ in range(_REPEATS):
        for i, work in enumerate(works):
            begun = time.thread_time()
            work()
            least[i] = min(least[i], time.thread_time() - begun)
    return least
