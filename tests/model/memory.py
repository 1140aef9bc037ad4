"""What this process holds, as the three who hand memory out tell it."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
from array import array
from pathlib import Path
from typing import NamedTuple

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: sums over all its arenas, in bytes."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo


class Memory(NamedTuple):
    """``resident`` rises with the largest world so far: what is free between what is in use stays with the process.
    The other two do not, so that a leak of a few bytes a step shows in them.
    """

    resident: float
    """MiB of pages, after what is free at malloc's own ends has been given back."""
    malloc: float
    """MiB that malloc has given out: arrays, tensors, Python's objects of more than 512 bytes."""
    objects: float
    """Thousands of Python's smaller objects."""


def held() -> Memory:
    """Measured after a full collection. Needs glibc 2.33."""
    gc.collect()
    _libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    info = _libc.mallinfo2()
    return Memory(
        resident=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        malloc=(info.uordblks + info.hblkhd) / 2**20,
        objects=sys.getallocatedblocks() / 1e3,
    )


class MemoryLog:
    """What was held after so many steps. Itself it holds no object per entry."""

    def __init__(self) -> None:
        self._flat = array("d")

    def note(self, steps: int) -> None:
        self._flat.extend((steps, *held()))

    def second_half(self) -> list[tuple[int, Memory]]:
        """By then every loop is compiled, and what has a bound has reached it."""
        width = 1 + len(Memory._fields)
        rows = [self._flat[at : at + width] for at in range(0, len(self._flat), width)]
        return [(int(steps), Memory(*rest)) for steps, *rest in rows[len(rows) // 2 :]]


def slopes(seen: list[tuple[int, Memory]]) -> Memory:
    """Growth per million steps, from at least two entries."""
    steps = [at for at, _ in seen]
    columns = zip(*(memory for _, memory in seen), strict=True)
    return Memory(*(statistics.linear_regression(steps, column).slope * 1e6 for column in columns))
