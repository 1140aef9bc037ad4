"""The Triton kernel of ``words``: one program a tile."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtier.attention.kernels.launch import launching_on

TILE_WORDS = 1024


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["target", "source"])
def copy_kernel(target, source, count, TILE: tl.constexpr):
    """Grid (tiles,). ``target`` and ``source``: ``count`` integers of one dtype, in device memory or pinned memory."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = at < count
    tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


def launch(target: Tensor, source: Tensor) -> None:
    """Copies ``source`` to ``target``, [n] each, on the current stream of the GPU that one of them is on."""
    count = len(source)
    with launching_on(target if target.is_cuda else source):
        copy_kernel[(triton.cdiv(count, TILE_WORDS),)](target, source, count, TILE=TILE_WORDS)
