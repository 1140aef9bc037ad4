"""Checksums of blocks in a GPU's memory, taken on a copy stream (``verify="full"``).

Promises   the values of ``engines._blocks.checksum``, whichever way they are taken. The Triton kernel takes them if
           Triton is installed and its kernel runs. Otherwise torch operations do, which read the blocks several times
           over.
Does not   keep sums: ``TierMemory`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.tier_memory import Ids, TierMemory
from kvtier.cpu_offload.transfer import Direction

if TYPE_CHECKING:
    import torch

GOLDEN, MIX, LOW = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xFFFFFFFF
MOST_BYTES = 8 << 20
"""Bytes of blocks that torch works on at a time, without a kernel."""
TEMPORARIES = 6
"""Tensors of that size that torch holds meanwhile."""

WORD_BYTES = 8
"""Size of an address, and of a checksum."""

Kernel = Callable[[npt.NDArray[np.int64], int, Any], "torch.Tensor"]
"""(addresses int64 [n], bytes of a block, device) -> int64 [n] on the device, enqueued on the current stream."""


class TorchSums:
    """Checksums by ``kernel``, or by torch operations without one."""

    def __init__(self, kernel: Kernel | None = None) -> None:
        self._kernel = kernel

    def try_out(self, stream: int, memory: TierMemory) -> str:
        """See ``DeviceSums``. Triton compiles at a kernel's first launch, and needs a C compiler for it."""
        if self._kernel is None:
            return ""
        arena = memory.arenas[0]
        try:
            with _on(stream, arena.storage.device) if arena.storage.is_cuda else nullcontext():
                first = np.array([arena.address + arena.origins[0] + arena.strides[0]], np.int64)  # of block 1
                self._kernel(first, int(arena.block_bytes[0]), arena.storage.device).cpu()
        except Exception as problem:
            self._kernel = None
            return f"checksums by torch operations, as their kernel does not run: {type(problem).__name__}: {problem}"
        return ""

    def begin(
        self, stream: int, memory: TierMemory, groups: Ids, addresses: npt.NDArray[np.uint64]
    ) -> Callable[[], npt.NDArray[np.uint64]]:
        """See ``DeviceSums``."""
        import torch

        storage, first = memory.arenas[0].storage, memory.arenas[0].address
        sizes = memory.arenas[0].block_bytes[groups]
        on_gpu = storage.is_cuda
        parts, order, listed = list[Any](), list[npt.NDArray[np.int64]](), list[torch.Tensor]()
        with _on(stream, storage.device) if on_gpu else nullcontext():
            for size in np.unique(sizes).tolist():
                order.append(np.flatnonzero(sizes == size))
                at = torch.from_numpy(addresses[order[-1]].astype(np.int64))
                listed.append(at.pin_memory() if on_gpu else at)
                if self._kernel is not None:
                    parts.append(self._kernel(listed[-1].numpy(), size, storage.device))
                else:
                    parts.append(sums_of(storage, listed[-1].numpy(), size, first))
            sums = torch.cat(parts)
            result = torch.empty(len(sums), dtype=torch.int64, pin_memory=on_gpu)
            result.copy_(sums, non_blocking=True)

        def read() -> npt.NDArray[np.uint64]:
            # Until now: torch may give device memory without a holder to another stream. It takes free pinned memory
            # in the order of its release, up to the first piece that is still read.
            parts.clear()
            listed.clear()
            found = np.empty(len(result), np.uint64)
            found[np.concatenate(order)] = result.numpy().view(np.uint64)
            return found

        return read

    def close(self) -> None:
        """See ``DeviceSums``. torch keeps the memory of a stream for that stream, and may wait for it later."""
        import torch

        cuda: Any = torch.cuda
        if cuda.is_initialized():
            cuda.empty_cache()


def most_bytes(num_blocks: int, largest_block: int) -> tuple[int, int]:
    """Bytes on the device and in pinned memory that checksums of ``num_blocks`` blocks take at most, all at once."""
    temporaries = TEMPORARIES * max(MOST_BYTES, largest_block) + 2 * largest_block
    streams = len(Direction)  # torch keeps the memory of each stream apart
    return streams * temporaries + 3 * WORD_BYTES * num_blocks, 2 * WORD_BYTES * num_blocks


def sums_of(storage: torch.Tensor, addresses: npt.NDArray[np.int64], size: int, first: int = 0) -> torch.Tensor:
    """Checksums of the blocks of ``size`` bytes at ``addresses`` of ``storage``, which begins at ``first``.

    int64 [n], on the device of ``storage``. torch has no unsigned 64-bit arithmetic, but signed products and sums have
    the same bits.
    """
    import torch

    words = storage.view(torch.int64)
    keys = torch.arange(1, size // 8 + 1, dtype=torch.int64, device=storage.device) * _signed(GOLDEN)
    at = torch.from_numpy(addresses)
    if storage.is_cuda:  # pinned, so that no thread waits for the stream, which waits for the forward
        at = at.pin_memory().to(storage.device, non_blocking=True)
    at = (at - first) // 8
    step = max(1, MOST_BYTES // size)
    span = torch.arange(size // 8, dtype=torch.int64, device=storage.device)
    parts = []
    for k in range(0, len(at), step):
        x = words[at[k : k + step, None] + span] ^ keys
        for _ in range(2):
            x = (x ^ (x >> 32 & LOW)) * _signed(MIX)
        parts.append((x ^ (x >> 32 & LOW)).sum(dim=1))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=storage.device)


def _on(stream: int, device: torch.device) -> AbstractContextManager[None]:
    """Makes torch work on this stream."""
    import torch

    external: Any = torch.cuda.ExternalStream
    return cast(AbstractContextManager[None], torch.cuda.stream(external(stream, device)))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def triton_kernel() -> Kernel | None:
    """The Triton kernel, if Triton is installed."""
    from kvtier.attention.kernels import checksum_blocks
    from kvtier.attention.kernels.choice import has_triton

    return checksum_blocks if has_triton() else None
