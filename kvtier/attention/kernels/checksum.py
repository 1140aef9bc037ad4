"""A 64-bit checksum per block, the same on host and device.

Owns       the NumPy twin; the definition and its reasons are in docs/adr/0014-a-checksum-that-adds-up.md.
Promises   exactly the values of ``kvtier.cpu_offload.engines._blocks.checksum_blocks``.
Does not   know which blocks should have which checksum.

The checksum of a block is the sum, mod 2**64, over its 8-byte words of mix(word ^ (i + 1) * GOLDEN), i from 0. A GPU
needs a sum that can be taken in any order and in parts. mix is a bijection. So any change of one word, be it one bit,
always changes the sum.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.attention.kernels.choice import need_triton
from kvtier.geometry.kinds import ALIGN_BYTES
from kvtier.machine.errors import TransferError

GOLDEN = 0x9E3779B97F4A7C15
MIX = 0xD6E8FEB86659FD93


def checksum_blocks(addresses: npt.NDArray[np.int64], block_bytes: int, device: torch.device | str) -> Tensor:
    """int64 [n] on ``device`` ("cpu" or "cuda:N"), the bits of the checksums of n blocks at ``addresses``, int64 [n].

    On CUDA it is enqueued on the current stream. Addresses and ``block_bytes`` must be multiples of 16, else
    ``TransferError``.
    """
    if block_bytes <= 0 or np.any((addresses | block_bytes) % ALIGN_BYTES):
        raise TransferError(f"addresses and {block_bytes} bytes must be multiples of {ALIGN_BYTES}")
    if torch.device(device).type == "cuda":
        need_triton("a checksum of blocks")
        from kvtier.attention.kernels.triton_checksum import launch

        pinned = torch.from_numpy(addresses).pin_memory()  # if it is not yet: else a copy would wait for the stream
        return launch(pinned.to(device, non_blocking=True), block_bytes)
    return torch.from_numpy(checksum_blocks_numpy(addresses, block_bytes).view(np.int64))


def checksum_blocks_numpy(addresses: npt.NDArray[np.int64], block_bytes: int) -> npt.NDArray[np.uint64]:
    """The kernel's twin, for memory that the CPU can address; uint64 [n]."""
    keys = np.arange(1, block_bytes // 8 + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    sums = np.empty(len(addresses), np.uint64)
    for i, address in enumerate(addresses.tolist()):
        block = (ctypes.c_uint8 * block_bytes).from_address(address)
        sums[i] = mixed(np.frombuffer(memoryview(block), np.uint64) ^ keys).sum()
    return sums


def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Two rounds of xor-shift and odd multiplication, and a last xor-shift: a bijection of 64-bit words."""
    for _ in range(2):
        x = (x ^ (x >> np.uint64(32))) * np.uint64(MIX)
    return x ^ (x >> np.uint64(32))
