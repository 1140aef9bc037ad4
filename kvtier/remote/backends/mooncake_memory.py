"""Addresses for Mooncake: of bytes in the registered arena as they are, of all others by way of registered memory.

Network devices of RDMA reach registered memory only. Trailers lie outside of the arena: they are copied through a
``Stage``. What does not fit there is registered for the time of one call.

The library moves each piece by itself, and the smallest takes as long as one of 100 KiB. So an object of small pieces
is *packed*: copied into the stage as a whole, with its trailer, and moved as one piece.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.machine.errors import ConfigError
from kvtier.remote.backends.contract import Buffers

SMALL_PIECE, PACKED_BYTES = 256 << 10, 512 << 10
"""An object that is packed has smaller pieces on average, and at most so many bytes in all."""
PACKED_AS = 2
"""Pieces of a batch that a packed object counts as: that bounds the room of a batch in the stage."""
MOST_PIECES = 64
"""Most pieces of a batch."""
STAGE_BYTES = (64 << 10) + MOST_PIECES // PACKED_AS * PACKED_BYTES


def place(buffer: memoryview) -> tuple[int, int]:
    """Address and bytes of a buffer."""
    if buffer.readonly or not buffer.nbytes:
        return np.frombuffer(buffer, np.uint8).ctypes.data if buffer.nbytes else 0, buffer.nbytes
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes  # a tenth of the time


def pieces_of(buffers: Buffers) -> int:
    """The number of pieces of a batch that an object counts as."""
    return PACKED_AS if _is_packed(buffers) else len(buffers)


def _is_packed(buffers: Buffers) -> bool:
    size = sum(buffer.nbytes for buffer in buffers)
    return len(buffers) > 1 and size <= PACKED_BYTES and size < len(buffers) * SMALL_PIECE


def register(client: Any, address: int, size: int) -> None:
    """Raises ``ConfigError`` if the network devices cannot have this memory."""
    code = client.register_buffer(address, size)
    if code != 0:
        raise ConfigError(
            f"mooncake: {size:,} bytes of memory cannot be registered (code {code}). "
            "RDMA needs a limit of locked memory above that: ulimit -l"
        )


class Stage:
    """A little registered memory, for one call of the library at a time."""

    def __init__(self, client: Any) -> None:
        self.memory = mmap.mmap(-1, STAGE_BYTES)
        self.view = memoryview(self.memory)
        self.address, _ = place(self.view)
        register(client, self.address, STAGE_BYTES)


class Pieces:
    """The memory of one batch of objects, for the library: call ``end`` when its call has ended."""

    def __init__(self, client: Any, arena: range, stage: Stage) -> None:
        self._client = client
        self._arena = arena
        self._stage = stage
        self._used = 0
        self._registered: list[int] = []
        self.staged: dict[int, list[tuple[memoryview, memoryview]]] = {}
        """By object: a part of the stage, and the buffer that it stands for."""
        self.addresses: list[list[int]] = []
        self.sizes: list[list[int]] = []

    def add(self, k: int, buffers: Buffers) -> None:
        """Object ``k``. Raises ``ConfigError`` if its memory cannot be registered."""
        addresses, sizes = list[int](), list[int]()
        if _is_packed(buffers) and self._used + sum(buffer.nbytes for buffer in buffers) <= STAGE_BYTES:
            self._pack(k, buffers)
            return
        for buffer in buffers:
            if not buffer.nbytes:
                continue
            address = self._address(k, buffer)
            if addresses and address == addresses[-1] + sizes[-1] and address in self._arena:
                sizes[-1] += buffer.nbytes  # one transfer for blocks that are neighbours
            else:
                addresses.append(address)
                sizes.append(buffer.nbytes)
        self.addresses.append(addresses)
        self.sizes.append(sizes)

    def _pack(self, k: int, buffers: Buffers) -> None:
        start = self._used
        for buffer in buffers:
            self._stage_at(k, self._used, buffer)
            self._used += buffer.nbytes
        self.addresses.append([self._stage.address + start])
        self.sizes.append([self._used - start])
        self._used = -(-self._used // 64) * 64

    def _stage_at(self, k: int, at: int, buffer: memoryview) -> None:
        part = self._stage.view[at : at + buffer.nbytes]
        self.staged.setdefault(k, []).append((part, buffer.cast("B")))

    def _address(self, k: int, buffer: memoryview) -> int:
        address, size = place(buffer)
        if address in self._arena and address + size <= self._arena.stop:
            return address
        if self._used + size > STAGE_BYTES:
            register(self._client, address, size)
            self._registered.append(address)
            return address
        self._stage_at(k, self._used, buffer)
        address = self._stage.address + self._used
        self._used += -(-size // 64) * 64
        return address

    def fill(self) -> None:
        """Copies into the stage what is to be stored."""
        for pairs in self.staged.values():
            for part, buffer in pairs:
                part[:] = buffer

    def give_back(self, objects: Sequence[int]) -> None:
        """Copies out of the stage what was read of these objects."""
        for k in objects:
            for part, buffer in self.staged.get(k, ()):
                buffer[:] = part

    def end(self) -> None:
        """The library does not touch this memory any more."""
        for address in self._registered:
            self._client.unregister_buffer(address)
        self._registered.clear()
