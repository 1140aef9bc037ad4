"""Whether a kernel or its twin runs: a kernel needs Triton and tensors on CUDA."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from kvtier.errors import ConfigError


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def runs_kernel(device: torch.device) -> bool:
    """Whether work on ``device`` is done by the Triton kernel; else by the twin."""
    return device.type == "cuda" and has_triton()


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Within it, kernels run where ``tensor`` is: Triton launches on torch's current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def need_triton(what: str) -> None:
    """Raises ``ConfigError`` where ``what``, which has no twin on a GPU, has no Triton either."""
    if not has_triton():
        raise ConfigError(f"{what} on a GPU needs Triton: pip install triton (torch's CUDA builds bring it along)")
