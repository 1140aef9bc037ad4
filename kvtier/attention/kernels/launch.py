"""The device of a kernel's launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Within it, kernels run on the device of ``tensor``: Triton launches on torch's current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
