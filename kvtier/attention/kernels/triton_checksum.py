"""The Triton kernel of ``checksum_blocks``: programs add their part of a block's sum to one word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier.attention.kernels.launch import launching_on

TILE_WORDS = 1024
TILES = 8
"""Tiles of one program, 64 KiB of a block: enough loads in flight, and few additions to the same word."""

# GOLDEN and MIX of checksum.py as the compiler wants them; the interpreter's tests compare with the host's checksum.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX = tl.constexpr(0xD6E8FEB86659FD93)


@triton.jit
def checksum_kernel(addresses, block_bytes, sums, TILE: tl.constexpr, TILES: tl.constexpr):
    """Grid (blocks, parts). ``addresses``: int64 [blocks]; ``sums``: int64 [blocks], zeros."""
    block = tl.program_id(0)
    words = tl.multiple_of(tl.load(addresses + block).to(tl.pointer_type(tl.int64)), 16)
    total = tl.zeros((TILE,), tl.uint64)
    for tile in tl.static_range(TILES):
        at = (tl.program_id(1) * TILES + tile) * TILE + tl.arange(0, TILE)
        mask = at < block_bytes // 8
        x = tl.load(words + at, mask=mask, other=0).to(tl.uint64, bitcast=True)
        x ^= (at + 1).to(tl.uint64) * _GOLDEN
        x = (x ^ (x >> 32)) * _MIX
        x = (x ^ (x >> 32)) * _MIX
        x ^= x >> 32
        total += tl.where(mask, x, 0)
    tl.atomic_add(sums + block, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


def launch(addresses: Tensor, block_bytes: int) -> Tensor:
    """Checksums, int64 [n], of blocks at int64 ``addresses`` [n] on a device; multiples of 16."""
    sums = torch.zeros(len(addresses), dtype=torch.int64, device=addresses.device)
    if len(addresses):
        parts = triton.cdiv(block_bytes // 8, TILE_WORDS * TILES)
        with launching_on(sums):
            checksum_kernel[(len(addresses), parts)](addresses, block_bytes, sums, TILE=TILE_WORDS, TILES=TILES)
    return sums
