"""Copies of small blocks by address: a pool's scattered blocks to and from a packed buffer or host memory.

Owns       where block ids become addresses, and what is checked before a byte moves.
Promises   a copy of blocks stays inside its pool and never touches the null block; any multiple of 16 bytes.
Does not   order copies: they run on the current stream of the device.

The kernel reads and writes through raw 64-bit addresses, so one launch can move bytes between device memory and host
memory that is registered with the driver. It is meant for blocks too small for the copy engines of a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.attention.kernels.choice import need_triton
from kvtier.errors import ConfigError, TransferError
from kvtier.spec import ALIGN_BYTES

Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockRange:
    """A group's blocks in one tier: block id lies at ``base + id * block_bytes``, id < ``blocks`` (null included).

    ``block_bytes`` and the address ``base`` must be multiples of 16, else ``ConfigError``.
    """

    base: int
    blocks: int
    block_bytes: int

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.block_bytes % ALIGN_BYTES or self.base % ALIGN_BYTES:
            raise ConfigError(
                f"blocks of {self.block_bytes} bytes at {self.base:#x}: both must be multiples of {ALIGN_BYTES}"
            )

    def addresses(self, ids: npt.NDArray[np.integer] | Sequence[int]) -> Addresses:
        """int64 [n]; raises ``TransferError`` for the null block and for ids outside the pool."""
        chosen: Addresses = np.asarray(ids, np.int64)
        if np.any((chosen < 1) | (chosen >= self.blocks)):
            raise TransferError("a copy names a block outside its pool")
        return chosen * self.block_bytes + self.base


def gather_blocks(
    pool: BlockRange, ids: npt.NDArray[np.integer] | Sequence[int], packed: int, device: torch.device | str
) -> None:
    """Copies blocks ``ids`` of ``pool`` to n consecutive blocks at the address ``packed``.

    ``device``: who copies, "cpu" or "cuda:N"; all memory must be within its reach.
    Raises ``TransferError`` for ids outside the pool and addresses off by other than 16 bytes, before a byte moves.
    """
    src = pool.addresses(ids)
    copy_blocks(_packed(packed, len(src), pool.block_bytes), src, pool.block_bytes, device)


def scatter_blocks(
    pool: BlockRange, ids: npt.NDArray[np.integer] | Sequence[int], packed: int, device: torch.device | str
) -> None:
    """Copies n consecutive blocks at the address ``packed`` to blocks ``ids``; else as ``gather_blocks``."""
    dst = pool.addresses(ids)
    if len(np.unique(dst)) < len(dst):
        raise TransferError("a copy writes to one block twice")
    copy_blocks(dst, _packed(packed, len(dst), pool.block_bytes), pool.block_bytes, device)


def copy_blocks(dst: Addresses, src: Addresses, block_bytes: int, device: torch.device | str) -> None:
    """Copies ``block_bytes`` bytes from address src[i] to dst[i], both int64 [n] in host memory.

    All must be multiples of 16 (``TransferError``). On CUDA one launch on the current stream, which the caller orders.
    """
    if dst.shape != src.shape or dst.ndim != 1:
        raise TransferError(f"{dst.shape} targets for {src.shape} sources")
    if block_bytes <= 0 or np.any((dst | src | block_bytes) % ALIGN_BYTES):
        raise TransferError(f"addresses and {block_bytes} bytes must be multiples of {ALIGN_BYTES}")
    if torch.device(device).type == "cuda":
        need_triton("copying blocks")
        from kvtier.attention.kernels.triton_gather import launch

        launch(_on(dst, device), _on(src, device), block_bytes)
        return
    copy_blocks_numpy(dst, src, block_bytes)


def copy_blocks_numpy(dst: Addresses, src: Addresses, block_bytes: int) -> None:
    """The kernel's twin, for memory that the CPU can address."""
    for target, source in zip(dst.tolist(), src.tolist(), strict=True):
        ctypes.memmove(target, source, block_bytes)


def _packed(base: int, count: int, block_bytes: int) -> Addresses:
    return base + np.arange(count, dtype=np.int64) * block_bytes


def _on(addresses: Addresses, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(addresses).to(device, non_blocking=True)
