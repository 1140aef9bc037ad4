"""Pools as kvtier's arena lays them out, in memory with guard bytes around, for kernels to be wrong in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels run: compiled on a GPU, interpreted on a CPU."""
GUARD = 64


@dataclass
class Layer:
    """K and V of the last of ``layers`` layers of a block-major pool; blocks are ``pad`` bytes longer than need be.

    Equal head sizes: [layers, 2, tokens, heads, dim] a block; else K and V share the last dimension.
    """

    dtype: torch.dtype
    blocks: int
    block_tokens: int
    heads: int
    dims: tuple[int, int]
    layers: int = 2
    pad: int = 16
    seed: int = 0
    memory: Tensor = field(init=False)
    """Every byte, uint8, random: guards, other layers, padding."""
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        item, (dk, dv) = self.dtype.itemsize, self.dims
        layer = self.block_tokens * self.heads * (dk + dv)
        step = -(-(self.layers * layer * item + self.pad) // 16) * 16
        generator = torch.Generator().manual_seed(self.seed)
        size = 2 * GUARD + self.blocks * step
        self.memory = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).to(DEVICE)
        width, v_offset = (dk, self.block_tokens * self.heads * dk) if dk == dv else (dk + dv, dk)
        flat = self.memory.view(self.dtype)
        first = GUARD // item + (self.layers - 1) * layer
        strides = (step // item, self.heads * width, width, 1)
        shape = (self.blocks, self.block_tokens, self.heads)
        self.k = flat.as_strided((*shape, dk), strides, first)
        self.v = flat.as_strided((*shape, dv), strides, first + v_offset)

    def bytes(self) -> Tensor:
        """A copy of all memory, on the CPU."""
        return self.memory.cpu().clone()
