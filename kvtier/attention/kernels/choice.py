"""Whether a kernel or its twin runs: a kernel needs Triton, a compiler for it, and tensors on CUDA."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import numpy as np
import torch

from kvtier.machine.errors import ConfigError


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def runs_kernel(device: torch.device) -> bool:
    """Whether work on ``device`` is done by the Triton kernel; else by the twin."""
    return device.type == "cuda" and has_triton() and compiles(device)


@cache
def compiles(device: torch.device) -> bool:
    """Whether Triton can compile for ``device``, a GPU, which is tried once; warns if it cannot."""
    try:
        try_kernel(device)
    except Exception as problem:  # it needs a C compiler, and fails without one in its own ways
        text = f"Triton cannot compile for {device} ({type(problem).__name__}: {problem}); torch does its work, slower"
        warnings.warn(text, stacklevel=2)
        return False
    return True


def try_kernel(device: torch.device) -> None:
    """Compiles a small kernel and waits until it has run."""
    from kvtier.attention.kernels.triton_checksum import launch

    words = torch.zeros(2, dtype=torch.int64, device=device)
    launch(torch.from_numpy(np.array([words.data_ptr()])).to(device), words.nbytes).cpu()


def need_triton(what: str) -> None:
    """Raises ``ConfigError`` if there is no Triton for ``what``, which has no twin on a GPU."""
    if not has_triton():
        raise ConfigError(f"{what} on a GPU needs Triton: pip install triton (torch's CUDA builds bring it along)")
