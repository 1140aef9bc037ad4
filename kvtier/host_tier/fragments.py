"""Blocks in fragments: device memory with a foreign layout, for instance one run of bytes per layer.

Owns       the places of a block's fragments on the device; in its host block they lie side by side.
Promises   copy engines see each fragment as a block of a group of its own, and need know nothing else. Their reports
           are translated back to blocks. A damaged fragment is a damaged block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.engines.around import EngineAround
from kvtier.cpu_offload.transfer import Transfer
from kvtier.geometry.layout import Layout
from kvtier.geometry.outside import Fragment
from kvtier.machine.errors import ConfigError, TransferError
from kvtier.pools.block_pool import Ids

if TYPE_CHECKING:
    import torch

WORD = 8
"""Bytes: the unit of checksums."""
GPU_WORD = 16
"""Bytes: the unit of a GPU's kernels."""

Int64s = npt.NDArray[np.int64]


class Fragments:
    """The fragments of all groups, one after the other; fragment f of them is copied as a block of "group" f."""

    def __init__(self, groups: Sequence[Sequence[Fragment]], num_blocks: Sequence[int], memory_bytes: int) -> None:
        """``groups[g]``: of a block of group g; ``num_blocks[g]``: its block ids, from 0 on, of ``memory_bytes`` bytes.

        Raises ``ConfigError`` for fragments that leave the memory, overlap, or are no multiples of 8 bytes. Groups may
        share fragments, as vLLM's do: then a block id is one group's at a time.
        """
        self.counts = np.array([len(of) for of in groups], np.int64)
        self.first = np.cumsum(self.counts) - self.counts
        self.group = np.repeat(np.arange(len(groups)), self.counts)
        flat = np.array([fragment for of in groups for fragment in of], np.int64).reshape(-1, 3)
        self.offsets, self.strides, self.sizes = flat.T
        self.num_blocks = np.array(num_blocks, np.int64)
        ids = self.num_blocks[self.group].tolist()  # plain ints: no product is too large
        last = [o + (n - 1) * s + size for n, (o, s, size) in zip(ids, flat.tolist(), strict=True)]
        if np.any(self.counts == 0) or np.any(self.sizes <= 0) or np.any(flat % WORD):
            raise ConfigError(f"a block needs fragments whose offsets, strides and sizes are multiples of {WORD} bytes")
        if np.any(self.offsets < 0) or np.any(self.strides < self.sizes) or max(last) > memory_bytes:
            raise ConfigError(f"fragments overlap, or leave the {memory_bytes:,} bytes of device memory")
        self.shares_with = self._shares()
        """The first group that has the same memory, or part of it, by group."""
        within = np.cumsum(self.sizes) - self.sizes
        self.within = within - within[self.first][self.group]
        """Bytes of the block before each fragment."""
        self.block_bytes: Int64s = np.bincount(self.group, self.sizes).astype(np.int64)
        """Bytes of all fragments of a block, by group."""

    def _shares(self) -> Int64s:
        shares = np.arange(len(self.counts))
        for a in range(len(self.group)):
            for b in range(a):
                of_a, of_b = self.group[a], self.group[b]
                if not self._overlap(a, b):
                    continue
                if of_a == of_b or not self._coincide(a, b):
                    raise ConfigError(
                        f"fragments of groups {of_b} and {of_a} overlap; groups may share a block's memory only if it "
                        "has one id in both"
                    )
                low, high = sorted((shares[of_a], shares[of_b]))
                shares[shares == high] = low
        return shares

    def _coincide(self, a: int, b: int) -> bool:
        """Whether fragments a and b of one block id lie at one place."""
        same_ids = self.num_blocks[self.group[a]] == self.num_blocks[self.group[b]]
        return bool(same_ids and self.strides[a] == self.strides[b] and self.offsets[a] == self.offsets[b])

    def _overlap(self, a: int, b: int) -> bool:
        """Whether some block's fragment a and some block's fragment b may have bytes in common."""
        ends = self.offsets + (self.num_blocks[self.group] - 1) * self.strides + self.sizes
        if ends[a] <= self.offsets[b] or ends[b] <= self.offsets[a]:
            return False
        stride = self.strides[a]
        behind = (self.offsets[b] - self.offsets[a]) % stride
        return bool(stride != self.strides[b] or behind < self.sizes[a] or behind + self.sizes[b] > stride)

    def check_aligned(self, memory: npt.NDArray[np.uint8] | torch.Tensor) -> None:
        """Raises ``ConfigError`` unless a GPU's kernels can read all fragments in ``memory``."""
        address = memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr()
        if address % GPU_WORD or any(np.any(flat % GPU_WORD) for flat in (self.offsets, self.strides, self.sizes)):
            raise ConfigError(
                f"on a GPU, the address of memory and the fragments' offsets, strides and sizes must be multiples of "
                f"{GPU_WORD} bytes"
            )

    def on_device(self, memory: npt.NDArray[np.uint8] | torch.Tensor) -> FragmentArena:
        """The device's side. Copies add one to a block's id: their block 0 is the null block."""
        rows = self.num_blocks[self.group] + 1
        return FragmentArena(memory, self.offsets - self.strides, self.strides, self.sizes, rows)

    def on_host(self, memory: npt.NDArray[np.uint8], layout: Layout) -> FragmentArena:
        """The host's side; its blocks of ``block_bytes`` lie as ``layout`` says."""
        origins, strides = layout.origins[self.group] + self.within, layout.strides[self.group]
        return FragmentArena(memory, origins, strides, self.sizes, layout.rows[self.group])

    def expand(self, t: Transfer) -> tuple[Transfer, Int64s]:
        """The transfer by fragments, and for each fragment the position in ``t`` of its block."""
        counts = self.counts[t.groups]
        of = np.repeat(np.arange(len(counts)), counts)
        before = np.cumsum(counts) - counts
        fragments = (self.first[t.groups] - before)[of] + np.arange(len(of))
        return replace(t, groups=fragments.astype(np.int32), device=t.device[of] + 1, host=t.host[of]), of

    def of_blocks(self, groups: Ids, blocks: Ids) -> tuple[Ids, Ids]:
        """The fragments of blocks: as groups and blocks of their own."""
        counts = self.counts[groups]
        of = np.repeat(np.arange(len(counts)), counts)
        before = np.cumsum(counts) - counts
        return ((self.first[groups] - before)[of] + np.arange(len(of))).astype(np.int32), blocks[of]


@dataclass(frozen=True)
class FragmentArena:
    """Memory as ``TierMemory`` reads it; arrays are int64 [fragments]."""

    memory: npt.NDArray[np.uint8] | torch.Tensor
    origins: Int64s
    strides: Int64s
    block_bytes: Int64s
    rows: Int64s

    @property
    def has_bytes(self) -> bool:
        return isinstance(self.memory, np.ndarray) or self.memory.device.type == "cpu"

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        array: npt.NDArray[np.uint8] = self.memory if isinstance(self.memory, np.ndarray) else self.memory.numpy()
        return array

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data if isinstance(self.memory, np.ndarray) else self.memory.data_ptr())

    @property
    def storage(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(self.memory) if isinstance(self.memory, np.ndarray) else self.memory

    @property
    def num_cells(self) -> int:
        return self._num_bytes // WORD

    @property
    def _num_bytes(self) -> int:
        return self.memory.size if isinstance(self.memory, np.ndarray) else self.memory.numel()

    def cells(self, groups: Ids, blocks: Ids) -> tuple[Int64s, Int64s]:
        sizes = self.block_bytes[groups] // WORD
        of = np.repeat(np.arange(len(blocks)), sizes)
        first = (self.origins[groups] + blocks * self.strides[groups]) // WORD - (np.cumsum(sizes) - sizes)
        return first[of] + np.arange(len(of)), of

    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        raise TransferError("blocks of an engine's own memory are not moved")


class FragmentEngine(EngineAround):
    """A copy engine for whole blocks, made of a copy engine for fragments."""

    def __init__(self, engine: CopyEngine, fragments: Fragments) -> None:
        super().__init__(engine, engine.memory)
        self._fragments = fragments
        self._under_way: dict[int, tuple[Transfer, Int64s]] = {}

    def submit(self, transfer: Transfer) -> None:
        parts, of = self._fragments.expand(transfer)
        super().submit(parts)
        self._under_way[transfer.ticket] = transfer, of

    def poll(self) -> Sequence[Outcome]:
        return [self._by_block(outcome, *self._under_way.pop(outcome.ticket)) for outcome in super().poll()]

    def wipe(self, groups: Ids, blocks: Ids) -> None:
        super().wipe(*self._fragments.of_blocks(groups, blocks + 1))

    @staticmethod
    def _by_block(outcome: Outcome, transfer: Transfer, of: Int64s) -> Outcome:
        if outcome.bad is None:
            return outcome
        bad = np.unique(of[outcome.bad])
        return Outcome.of_check(transfer, bad) if outcome.corrupt else replace(outcome, bad=bad)
