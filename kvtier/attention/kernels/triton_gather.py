"""The Triton kernel of ``copy_blocks``: one program per block and tile, 16 bytes per load and thread."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtier.attention.kernels.launch import launching_on

TILE_WORDS = 2048
"""Words of 8 bytes that a program moves: 8 loads of 16 bytes in flight per thread."""


@triton.jit
def copy_blocks_kernel(dst, src, block_bytes, TILE: tl.constexpr):
    """Grid (blocks, tiles). ``dst``, ``src``: int64 [blocks], addresses."""
    block = tl.program_id(0)
    # An address loses what is known of its alignment on its way through memory: said again, loads are 16 bytes wide.
    source = tl.multiple_of(tl.load(src + block).to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(tl.load(dst + block).to(tl.pointer_type(tl.int64)), 16)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < block_bytes // 8
    tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


def launch(dst: Tensor, src: Tensor, block_bytes: int) -> None:
    """int64 [n] addresses on the device that copies; all multiples of 16, as ``block_bytes`` is."""
    if len(dst):
        tiles = triton.cdiv(block_bytes // 8, TILE_WORDS)
        with launching_on(dst):
            copy_blocks_kernel[(len(dst), tiles)](dst, src, block_bytes, TILE=TILE_WORDS)
