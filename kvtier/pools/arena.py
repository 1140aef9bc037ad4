"""One allocation per tier, and each group's blocks in it.

Owns       the memory of a tier.
Promises   a block is contiguous (all layers of its group, K and V with equal strides), so one copy moves it. The
           allocation has exactly the given size, not rounded up. Keeps I22.
Does not   know which blocks are in use.

A block of a group with equal head sizes is [layers, 2, block_tokens, heads, head_dim]. If V's head size differs, K and
V share the last dimension, [layers, block_tokens, heads, head_dim + head_dim_v], so their strides stay equal. A group
that keeps K alone has no V, head_dim_v 0. If tokens share entries, a block has so many fewer of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.geometry.dtypes import DTYPE_BYTES
from kvtier.geometry.kinds import RecurrentState
from kvtier.geometry.layout import Layout
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.errors import ConfigError, MemoryUnavailable
from kvtier.machine.memory_limits import available_ram_bytes

if TYPE_CHECKING:
    import torch


MAX_ROWS = 2**31 - 3

CellsOf = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Arena:
    """The blocks of every group as ``layout`` places them, in one allocation on ``device``."""

    def __init__(self, spec: CacheSpec | None, layout: Layout, device: str) -> None:
        """``spec``: the groups' K and V, for ``views``; None for memory without views."""
        self.spec = spec
        self.layout = layout
        self.origins, self.strides, self.block_bytes = layout.origins, layout.strides, layout.block_bytes
        self.rows = layout.rows
        self.device = device
        self._storage: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the allocation."""
        return self.layout.num_bytes

    def check(self, setting: str, reserved_bytes: int = 0) -> None:
        """Raises ``MemoryUnavailable`` or ``ConfigError``, naming ``setting``, if ``allocate`` cannot succeed.

        ``reserved_bytes`` of the machine's memory are promised to other owners, and not touched yet.
        """
        have = available_ram_bytes() - reserved_bytes
        if self.device == "cpu" and self.num_bytes > have:
            raise MemoryUnavailable(
                f"{setting} asks for {self.num_bytes:,} bytes, but this machine has {have:,} bytes of memory "
                f"available; lower {setting}"
            )
        most = int(self.rows.max())
        if most > MAX_ROWS:
            raise ConfigError(f"{setting}: a pool of {most:,} blocks; block ids end at {MAX_ROWS:,}")

    def allocate(self, setting: str) -> None:
        """Takes the memory. Raises ``MemoryUnavailable``, naming ``setting``, if the device refuses."""
        if self.device == "meta":
            return
        import torch

        if self.device == "cpu":
            # numpy asks the system for exactly this much and touches none of it.
            self._storage = torch.from_numpy(np.zeros(self.num_bytes, np.uint8))
            return
        try:
            self._storage = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)
        except (RuntimeError, AssertionError) as problem:
            raise MemoryUnavailable(
                f"{setting} asks for {self.num_bytes:,} bytes on {self.device}, which refused: {problem}"
            ) from problem

    @property
    def has_bytes(self) -> bool:
        """Whether the CPU can address the memory."""
        return self._storage is not None and self._storage.device.type == "cpu"

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory, uint8 [num_bytes]; only if the CPU can address it."""
        if self._storage is None or not self.has_bytes:
            raise ConfigError(f"an arena on {self.device!r} has no bytes that the CPU can address")
        array: npt.NDArray[np.uint8] = self._storage.numpy()
        return array

    @property
    def address(self) -> int:
        """Address of the first byte, in this process or on the device; 0 on "meta"."""
        return 0 if self._storage is None else int(self._storage.data_ptr())

    @property
    def storage(self) -> torch.Tensor:
        """The memory as one tensor, uint8 [num_bytes]."""
        if self._storage is None:
            raise ConfigError(f"an arena on {self.device!r} has no memory")
        return self._storage

    def use(self, memory: npt.NDArray[np.uint8]) -> None:
        """Takes memory that was allocated elsewhere, in place of ``allocate``; uint8 [num_bytes]."""
        import torch

        self._storage = torch.from_numpy(memory)

    def views(self, g: int) -> list[tuple[torch.Tensor, ...]]:
        """(k, v) of every layer of group g; each [usable + 1, block_entries, num_kv_heads, head_dim].

        v of a group that keeps K alone has a head_dim of 0.
        Of states: their parts, each [usable + 1, *part.shape], and one more block if the layout has a spare one.
        """
        import torch

        assert self.spec is not None
        group = self.spec.groups[g]
        if isinstance(group.attention, RecurrentState):
            return self._states(g, group.num_layers, group.attention)
        dtype, item = getattr(torch, group.dtype), DTYPE_BYTES[group.dtype]
        rows, bt, heads = int(self.rows[g]), group.block_entries, group.num_kv_heads
        dk, dv = group.head_dims
        origin, step = int(self.origins[g]) // item, int(self.strides[g]) // item
        flat = self._bytes().view(dtype)
        layer = bt * heads * (dk + dv)
        width, v_offset = (dk, bt * heads * dk) if dk == dv else (dk + dv, dk)
        strides = (step, heads * width, width, 1)
        return [
            (
                flat.as_strided((rows, bt, heads, dk), strides, origin + i * layer),
                flat.as_strided((rows, bt, heads, dv), strides, origin + i * layer + v_offset),
            )
            for i in range(group.num_layers)
        ]

    def _states(self, g: int, layers: int, state: RecurrentState) -> list[tuple[torch.Tensor, ...]]:
        """Layer by layer, each part's tensors lie at one distance from block to block: the block's."""
        import torch

        rows = int(self.rows[g] + self.layout.spare[g])
        step, at = int(self.strides[g]), int(self.origins[g])
        storage, found = self._bytes(), []
        for _ in range(layers):
            parts = []
            for part in state.parts:
                dtype, item = getattr(torch, part.dtype), DTYPE_BYTES[part.dtype]
                inner = torch.empty(part.shape, device="meta").stride()
                parts.append(storage.view(dtype).as_strided((rows, *part.shape), (step // item, *inner), at // item))
                at += part.num_bytes
            found.append(tuple(parts))
        return found

    def _bytes(self) -> torch.Tensor:
        """The memory; on "meta" as much of none."""
        import torch

        if self._storage is not None:
            return self._storage
        return torch.empty(self.num_bytes, dtype=torch.uint8, device="meta")

    def cells(self, groups: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> CellsOf:
        """``Layout.cells``: the memory cells of blocks, for checks of which copy touches which cell."""
        return self.layout.cells(groups, blocks)

    @property
    def num_cells(self) -> int:
        """Cells of the whole arena."""
        return self.num_bytes // self.layout.cell_bytes

    def move(self, g: int, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Copies group g's blocks ``sources`` to ``targets``, int32 [n] each, on the current stream of a GPU.

        No block is both. Nothing happens on the meta device. There is one copy for each run of neighbours that stay
        neighbours. To gather them first would take as much memory again, beside the given size.
        """
        if self._storage is None or len(sources) == 0:
            return
        size, stride, origin = (int(x[g]) for x in (self.block_bytes, self.strides, self.origins))
        blocks = self._storage.as_strided((int(self.rows[g]), size), (stride, 1), origin)
        ends = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
        for first, end in pairwise([0, *ends.tolist(), len(sources)]):
            source, target, n = int(sources[first]), int(targets[first]), end - first
            blocks[target : target + n].copy_(blocks[source : source + n])

    def free(self) -> None:
        """Gives the memory back; views that are still held keep it alive."""
        self._storage = None
