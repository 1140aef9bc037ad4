"""Linear layers of a CPU as products with packed weights.

The packed weight takes the place of the dense one. A dense weight that others use too (a head tied to the embedding)
stays beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from runner.model.fused import packed
from runner.model.fused.distance import relative

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The most that the RMS of a difference may be, relative: sums have other orders."""
_ROWS = 1, 3, 17
"""Rows of the trial's steps."""
_SMALL = 1 << 17
"""Numbers of a weight for which torch's product takes as long or less: a call of it costs less."""


def is_one(module: nn.Module, exact: bool = False) -> bool:
    """Whether it is a plain float32 linear layer on a CPU whose product is faster packed: not a small one.

    If ``exact``, it need not be faster, and bfloat16 is taken, too: a row's bits do not depend on the rows beside it.
    """
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or not module.weight.numel():
        return False
    if exact:
        return module.weight.dtype in packed.DTYPES
    is_large = module.weight.dtype is torch.float32 and module.weight.numel() > _SMALL
    return is_large and packed.fastest() is not None


def kind(module: nn.Linear) -> tuple[object, ...]:
    """What one trial speaks for."""
    return "linear", module.weight.shape, module.weight.dtype, module.bias is None


def fused(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A forward for ``module`` with a packed copy of its weight. The module keeps its own (see ``let_go``)."""
    return packed.packed(module.weight, module.bias)


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


def let_go(module: nn.Linear) -> None:
    """Gives the dense weight back, which nobody uses any more: what is left has its shape and takes no memory."""
    module.weight.data = torch.full((1,), float("nan")).expand(module.weight.shape)
