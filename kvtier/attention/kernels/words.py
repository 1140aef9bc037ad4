"""Integer arrays of a step, between pinned memory and a GPU, past the link's copy engines.

A copy between host and device waits for a copy engine, and so behind the loads or stores on it. On an H200 that was 20
ms at a time, whatever the streams' priorities. The driver sends small arrays to the device along with its commands.
Larger arrays, and all arrays to the host, are moved by a kernel that addresses pinned memory (docs/GPU.md).
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvtier.attention.kernels.choice import runs_kernel

INLINE_BYTES = 16 << 10
"""Copies to the device of up to this size wait for no copy engine."""
PROBE_WORDS = 3000
"""More than one program of the kernel."""
_READ: deque[tuple[Any, Tensor]] = deque()
"""Pinned memory that kernels may still read, and the event behind each: torch does not know of these reads."""


def send(pinned: Tensor, target: Tensor) -> Tensor:
    """Enqueues a copy of ``pinned`` to ``target``, integers [n] each; returns ``target``."""
    if not (target.is_cuda and pinned.nbytes > INLINE_BYTES and addresses_pinned(target.device)):
        return target.copy_(pinned, non_blocking=True)
    from kvtier.attention.kernels.triton_words import launch

    launch(target, pinned)
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record(torch.cuda.current_stream(target.device))
    _READ.append((event, pinned))
    while _READ and _READ[0][0].query():
        _READ.popleft()
    return target


def sent(pinned: Tensor, device: torch.device) -> Tensor:
    """``pinned``, integers [n], on ``device``: enqueued."""
    if device.type != "cuda":
        return pinned.to(device)
    return send(pinned, torch.empty(len(pinned), dtype=pinned.dtype, device=device))


def fetched(source: Tensor) -> Tensor:
    """``source``, integers [n], on the host; waits for the current stream."""
    if not (source.is_cuda and len(source) and addresses_pinned(source.device)):
        return source.cpu()
    from kvtier.attention.kernels.triton_words import launch

    pinned = torch.empty(len(source), dtype=source.dtype, pin_memory=True)
    launch(pinned, source.contiguous())
    torch.cuda.current_stream(source.device).synchronize()
    return pinned


def staged(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for ``count`` integers on their way to ``device``: pinned if that is a GPU."""
    return torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")


@cache
def addresses_pinned(device: torch.device) -> bool:
    """Whether a kernel on ``device`` can move words there and back; tried once, for both dtypes."""
    if not runs_kernel(device):
        return False
    from kvtier.attention.kernels.triton_words import launch

    try:
        for dtype in (torch.int32, torch.int64):
            there = torch.arange(PROBE_WORDS, dtype=dtype).pin_memory()
            back = torch.zeros(PROBE_WORDS, dtype=dtype).pin_memory()
            on_device = torch.empty(PROBE_WORDS, dtype=dtype, device=device)
            launch(on_device, there)
            launch(back, on_device)
            torch.cuda.current_stream(device).synchronize()
            if not torch.equal(there, back):
                return False
    except Exception:  # then copies do it, only later
        return False
    return True
