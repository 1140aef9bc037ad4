"""Where a kernel is launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Within it, kernels run where ``tensor`` is: Triton launches on torch's current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
