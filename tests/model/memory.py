"""What this process holds, as the three who hand memory out tell it."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Self

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: sums over all its arenas, in bytes."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


@dataclass(frozen=True)
class Memory:
    """``resident`` rises with the largest world so far: what is free between what is in use stays with the process.
    The other two do not, so that a leak of a few bytes a step shows in them.
    """

    resident: float
    """MiB of pages, after what is free at malloc's own ends has been given back."""
    malloc: float
    """MiB that malloc has given out: arrays, tensors, Python's objects of more than 512 bytes."""
    objects: float
    """Thousands of Python's smaller objects."""

    @classmethod
    def now(cls) -> Self:
        """Measures after a full collection. Needs glibc 2.33."""
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo
        gc.collect()
        libc.malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        info = libc.mallinfo2()
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            (info.uordblks + info.hblkhd) / 2**20,
            sys.getallocatedblocks() / 1e3,
        )


def slopes(seen: list[tuple[int, Memory]]) -> dict[str, float]:
    """By field of ``Memory``: its growth per million steps. ``seen``: (steps, memory), three at least."""
    steps = [at for at, _ in seen]
    rows = zip(*(astuple(memory) for _, memory in seen), strict=True)
    return {
        field.name: statistics.linear_regression(steps, row).slope * 1e6
        for field, row in zip(fields(Memory), rows, strict=True)
    }
