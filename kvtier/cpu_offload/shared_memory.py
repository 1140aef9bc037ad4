"""Host memory that several processes of one machine have in common: a file that has no name, mapped by each of them.

Owns       the file's descriptor in this process.
Promises   the memory is gone with the last process that has it, however that ends: nothing lies in a folder. What is
           not that file, or not on this machine, raises ``MemoryUnavailable``.
Does not   order the processes' accesses: who copies when is decided by the books of one of them.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.machine.errors import MemoryUnavailable
from kvtier.machine.memory_limits import available_ram_bytes

PAGE = mmap.PAGESIZE


class SharedName(NamedTuple):
    """Plain data by which another process opens the memory."""

    process: int
    descriptor: int
    token: str
    num_bytes: int


class SharedMemory:
    """``num_bytes`` of zeros that ``ranks`` processes have: ``make`` in the first one, ``open`` in the others."""

    def __init__(self, descriptor: int, name: SharedName, rank: int, ranks: int) -> None:
        self.descriptor, self.name, self.rank, self.ranks = descriptor, name, rank, ranks
        weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def make(num_bytes: int, ranks: int) -> SharedMemory:
        """As rank 0. It must live until the others have opened it. Raises ``MemoryUnavailable``."""
        if not hasattr(os, "memfd_create"):
            raise MemoryUnavailable("host memory that ranks share needs Linux (memfd_create)")
        have = available_ram_bytes()
        if num_bytes > have:
            raise MemoryUnavailable(
                f"host_memory asks for {num_bytes:,} bytes that all ranks share, but this machine has {have:,} bytes "
                "of memory available; lower host_memory"
            )
        token = f"kvtier-{secrets.token_hex(16)}"
        descriptor = os.memfd_create(token)
        shared = SharedMemory(descriptor, SharedName(os.getpid(), descriptor, token, num_bytes), 0, ranks)
        os.ftruncate(descriptor, num_bytes)
        return shared

    @staticmethod
    def open(name: SharedName, rank: int, ranks: int) -> SharedMemory:
        """The memory that another process has made. Raises ``MemoryUnavailable``."""
        path = f"/proc/{name.process}/fd/{name.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as problem:
            raise MemoryUnavailable(
                f"rank {rank} cannot open the host memory that rank 0 has made ({path}: {problem.strerror}); all ranks "
                "need one machine, one user and one container"
            ) from problem
        shared = SharedMemory(descriptor, name, rank, ranks)
        if name.token not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise MemoryUnavailable(
                f"{path} is not the host memory that rank 0 has made: rank {rank} runs on another machine; all ranks "
                "need one"
            )
        return shared

    def map(self, first: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Its bytes from ``first`` on, a multiple of a page: uint8 [num_bytes]. They live as long as a view of them."""
        return np.frombuffer(mmap.mmap(self.descriptor, num_bytes, flags=mmap.MAP_SHARED, offset=first), np.uint8)

    @property
    def own(self) -> tuple[int, int]:
        """(first byte, bytes) of this rank's part, in whole pages: no other rank's part has a byte of it."""
        pages = self.name.num_bytes // PAGE // self.ranks
        return self.rank * pages * PAGE, pages * PAGE
