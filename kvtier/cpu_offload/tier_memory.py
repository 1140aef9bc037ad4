"""The bytes of both tiers for a copy engine: the place of a block, and its checksum in the host tier.

Owns       byte addressing of blocks in the two arenas, and one 64-bit checksum per host block (``verify="full"``).
Promises   every copy lies inside its own group's rows (vLLM issue 42348 copied ids past a smaller pool). A checksum is
           taken from the device source before the copy, and checked on the device destination after the load. Keeps
           I22, I29.
Does not   know keys or references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines._blocks import checksum_blocks, copy_blocks
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.machine.errors import TransferError

if TYPE_CHECKING:
    import torch

_NONE = np.empty(0, np.int64)

Ids = npt.NDArray[np.int32]


class ByteArena(Protocol):
    """The part of an arena that this module needs; ``kvtier.pools.arena.Arena`` has it."""

    @property
    def origins(self) -> npt.NDArray[np.int64]:
        """Byte offset of block 0, by group."""

    @property
    def strides(self) -> npt.NDArray[np.int64]:
        """Bytes from one block to the next, by group."""

    @property
    def block_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes copied per block, by group."""

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Usable blocks + 1, by group."""

    @property
    def has_bytes(self) -> bool:
        """False for an arena without memory (``device="meta"``)."""

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The arena's memory, uint8 [num_bytes]."""

    @property
    def num_cells(self) -> int:
        """Cells of the whole arena."""

    def cells(self, groups: Ids, blocks: Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The cells of memory under blocks, and for each cell the position of its block."""

    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        """Copies blocks of group g to other blocks."""

    @property
    def address(self) -> int:
        """Address of its first byte, in this process or on the device."""

    @property
    def storage(self) -> torch.Tensor:
        """The arena's memory as a tensor, uint8 [num_bytes]."""


class HostSide(Protocol):
    """What a remote needs of a host tier's memory. ``TierMemory`` has it, too."""

    @property
    def arenas(self) -> tuple[ByteArena, ByteArena]:
        """Device and host."""

    def changed_in_host(self, groups: Ids, hosts: Ids) -> int:
        """How many of these blocks have changed since they were stored."""

    def note_host(self, groups: Ids, hosts: Ids) -> None:
        """Somebody else has checked these blocks as they are now."""


class TierMemory:
    """Copies blocks between two arenas of equal geometry that the CPU can address."""

    def __init__(
        self, device: ByteArena, host: ByteArena, verify: bool, sums: npt.NDArray[np.uint64] | None = None
    ) -> None:
        """``sums``: uint64 [host blocks of all groups], memory for checksums; by default memory of its own."""
        self._device = device
        self._host = host
        own = sums is None and verify
        self._sums = np.zeros(int(host.rows.sum()), np.uint64) if own else sums if verify else None
        self._first_sum = np.concatenate([[0], np.cumsum(host.rows)])[:-1]

    @property
    def num_cells(self) -> tuple[int, int]:
        """Cells of (device, host); see ``cells``."""
        return self._device.num_cells, self._host.num_cells

    def cells(self, tier: str, groups: Ids, blocks: Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The cells of a tier's memory under blocks, and for each cell the position of its block.

        Blocks of two groups that share memory share cells.
        """
        return (self._device if tier == "device" else self._host).cells(groups, blocks)

    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        """Copies blocks of group g on the device to other blocks."""
        self._device.move(g, sources, targets)

    def wipe(self, groups: Ids, blocks: Ids) -> None:
        """Writes zeros to blocks on the device; on a GPU, on the current stream."""
        at, sizes = self._spans(self._device, groups, blocks)
        if not len(at) or not self._device.address:
            return
        memory: Any = self._device.bytes if self._device.has_bytes else self._device.storage
        order = np.argsort(at)
        begins, ends = at[order], (at + sizes)[order]
        first = np.flatnonzero(np.append(True, begins[1:] != ends[:-1]))  # of each run
        for begin, end in zip(begins[first].tolist(), ends[np.append(first[1:], len(at)) - 1].tolist(), strict=True):
            memory[begin:end] = 0

    def copy(self, transfer: Transfer) -> npt.NDArray[np.int64]:
        """Moves all blocks of ``transfer``. Returns the positions of blocks whose checksum is wrong."""
        if transfer.direction is Direction.STORE:
            return self._store(transfer)
        return self._load(transfer)

    def _store(self, t: Transfer) -> npt.NDArray[np.int64]:
        src, sizes = self._spans(self._device, t.groups, t.device)
        dst, _ = self._spans(self._host, t.groups, t.host)
        if not self._device.has_bytes:
            return _NONE
        if self._sums is not None:
            sums = np.empty(len(sizes), np.uint64)
            checksum_blocks(self._device.bytes.view(np.uint64), src, sizes, sums)
            self.note_sums(t, sums)
        copy_blocks(self._host.bytes, dst, self._device.bytes, src, sizes)
        return _NONE

    def _load(self, t: Transfer) -> npt.NDArray[np.int64]:
        src, sizes = self._spans(self._host, t.groups, t.host)
        dst, _ = self._spans(self._device, t.groups, t.device)
        if not self._device.has_bytes:
            return _NONE
        copy_blocks(self._device.bytes, dst, self._host.bytes, src, sizes)
        return self.check(t)

    def check(self, t: Transfer) -> npt.NDArray[np.int64]:
        """The positions of a load's blocks whose bytes on the device do not have the checksum taken at their store."""
        if self._sums is None or not self._device.has_bytes:
            return _NONE
        dst, sizes = self._spans(self._device, t.groups, t.device)
        found = np.empty(len(sizes), np.uint64)
        checksum_blocks(self._device.bytes.view(np.uint64), dst, sizes, found)
        return self.compare_sums(t, found)

    # --- for engines whose device the CPU cannot address ------------------------------------------

    @property
    def verifies(self) -> bool:
        """Whether stores note checksums and loads compare them (``verify="full"``)."""
        return self._sums is not None

    def addresses(self, t: Transfer) -> tuple[npt.NDArray[np.uint64], ...]:
        """(device address, host address, bytes) of each block of ``t``, checked against the pools; uint64 [n]."""
        device, sizes = self._spans(self._device, t.groups, t.device)
        host, _ = self._spans(self._host, t.groups, t.host)
        first = np.uint64(self._device.address), np.uint64(self._host.address)
        return device.astype(np.uint64) + first[0], host.astype(np.uint64) + first[1], sizes.astype(np.uint64)

    def note_sums(self, t: Transfer, sums: npt.NDArray[np.uint64]) -> None:
        """Keeps the checksums that a store's blocks had on the device; uint64 [n]."""
        assert self._sums is not None
        self._sums[self._first_sum[t.groups] + t.host] = sums

    def note_host(self, groups: Ids, hosts: Ids) -> None:
        """Keeps the checksums that host blocks have now: somebody else has checked them."""
        if self._sums is not None:
            at, sizes = self._spans(self._host, groups, hosts)
            sums = np.empty(len(sizes), np.uint64)
            checksum_blocks(self._host.bytes.view(np.uint64), at, sizes, sums)
            self._sums[self._first_sum[groups] + hosts] = sums

    def changed_in_host(self, groups: Ids, hosts: Ids) -> int:
        """How many of these host blocks do not have the checksum taken at their store; 0 unless blocks are verified."""
        if self._sums is None:
            return 0
        at, sizes = self._spans(self._host, groups, hosts)
        sums = np.empty(len(sizes), np.uint64)
        checksum_blocks(self._host.bytes.view(np.uint64), at, sizes, sums)
        return int((sums != self._sums[self._first_sum[groups] + hosts]).sum())

    def compare_sums(self, t: Transfer, sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The positions of a load's blocks whose checksum on the device is not the noted checksum."""
        assert self._sums is not None
        return np.flatnonzero(sums != self._sums[self._first_sum[t.groups] + t.host])

    @property
    def arenas(self) -> tuple[ByteArena, ByteArena]:
        """Device and host."""
        return self._device, self._host

    def copy_some(self, t: Transfer, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Moves some blocks of a transfer, and half of the next block's bytes, as a torn copy does.

        ``chosen``: bool [n]. A torn block of one layer has its K and not its V. Returns what ``copy`` returns, for the
        chosen blocks, as positions in the transfer.
        """
        bad = self.copy(replace(t, groups=t.groups[chosen], device=t.device[chosen], host=t.host[chosen]))
        bad = np.flatnonzero(chosen)[bad]
        torn = np.flatnonzero(~chosen)[:1]
        device, sizes = self._spans(self._device, t.groups[torn], t.device[torn])
        host, _ = self._spans(self._host, t.groups[torn], t.host[torn])
        if self._device.has_bytes and t.direction is Direction.STORE:
            copy_blocks(self._host.bytes, host, self._device.bytes, device, sizes // 2)
        elif self._device.has_bytes:
            copy_blocks(self._device.bytes, device, self._host.bytes, host, sizes // 2)
        return bad

    def flip_device_bit(self, t: Transfer, k: int) -> None:
        """Flips a bit of block k's device bytes, for engines that simulate a bad link.

        It is not the bit of ``flip_host_bit``: the two flips would cancel out.
        """
        at, sizes = self._spans(self._device, t.groups, t.device)
        if self._device.has_bytes:
            self._device.bytes[at[k] + sizes[k] // 2] ^= 2

    def flip_host_bit(self, group: int, block: int) -> None:
        """Flips a bit in the middle of a block of the host tier, as rotting memory does. A second flip restores it.

        ``group``: its index. Only ``verify="full"`` sees it, at the next load of the block.
        """
        at, sizes = self._spans(self._host, np.array([group], np.int32), np.array([block], np.int32))
        if self._host.has_bytes:
            self._host.bytes[at[0] + sizes[0] // 2] ^= 1

    def blow_up_host(self, t: Transfer, which: npt.NDArray[np.int64]) -> None:
        """Sets the exponents of all numbers in these blocks of the host tier: each is NaN or infinite, whatever its
        dtype."""
        at, sizes = self._spans(self._host, t.groups[which], t.host[which])
        for begin, size in zip(at.tolist(), sizes.tolist(), strict=True) if self._host.has_bytes else ():
            self._host.bytes[begin : begin + size].view(np.uint16)[:] |= 0x7F80

    def damage_host(self, t: Transfer, which: npt.NDArray[np.int64], bits: int) -> None:
        """Flips ``bits`` of a byte in the middle of these blocks of the host tier, for engines that simulate a bad
        link."""
        at, sizes = self._spans(self._host, t.groups, t.host)
        if self._host.has_bytes:
            self._host.bytes[at[which] + sizes[which] // 2] ^= bits

    @staticmethod
    def _spans(
        arena: ByteArena, groups: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]
    ) -> Sequence[npt.NDArray[np.int64]]:
        """Byte offsets and sizes of blocks, checked against the arena."""
        if np.any((blocks < 1) | (blocks >= arena.rows[groups])):
            raise TransferError("a copy names a block outside its pool")
        return arena.origins[groups] + blocks * arena.strides[groups], arena.block_bytes[groups]
