"""Addresses for Mooncake: of bytes in the registered arena as they are, of all others by way of registered memory.

Network devices of RDMA reach registered memory only. Trailers lie outside of the arena: they are copied through a
``Stage``. What does not fit there is registered for the time of one call.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtier.errors import ConfigError
from kvtier.remote.block_store import Buffers

STAGE_BYTES = 64 << 10


def place(buffer: memoryview) -> tuple[int, int]:
    """Address and bytes of a buffer."""
    return np.frombuffer(buffer, np.uint8).ctypes.data if buffer.nbytes else 0, buffer.nbytes


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

    def _address(self, k: int, buffer: memoryview) -> int:
        address, size = place(buffer)
        if address in self._arena and address + size <= self._arena.stop:
            return address
        if self._used + size > STAGE_BYTES:
            register(self._client, address, size)
            self._registered.append(address)
            return address
        part = self._stage.view[self._used : self._used + size]
        self.staged.setdefault(k, []).append((part, buffer.cast("B")))
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
