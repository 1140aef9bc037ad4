"""Arrays aligned to cache lines, so that a record of 32 or 64 bytes never lies in two lines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

LINE_BYTES = 64


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Like ``numpy.zeros``, whose large arrays begin 16 bytes into a cache line."""
    kind = np.dtype(dtype)
    room = np.zeros(math.prod(shape) * kind.itemsize + LINE_BYTES, np.uint8)
    start = -room.ctypes.data % LINE_BYTES
    return room[start : start + math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
