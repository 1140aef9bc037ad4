"""Products of rows with a large weight, float32, on a CPU.

A weight comes from memory, and its next part is fetched while this one is multiplied. A row's numbers are summed in the
same order whatever rows are beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import floats, inlined, jit
from kvtier.machine.loops.vectors import HALF, LANES, ROWS, WIDTH, add1, add2, add4, add_half, add_most, stream, turn

AT_ONCE = 9 * ROWS
"""Rows for which the weight is read once."""
_SUMS = AT_ONCE * WIDTH
"""Numbers of scratch space for a panel's sums; the rest is for rows that have become columns."""
_INNER = np.int64(1024)
"""Of the inner dimension at once: a tile's weights, 128 KiB at most, stay in a core's second cache for all rows."""
_BYTES, _WIDTH, _LANES = np.int64(4), np.int64(WIDTH), np.int64(LANES)
_ROWS, _HALF = np.int64(ROWS), np.int64(HALF)


def scratch_numbers(rows: int, inner: int) -> int:
    """Float32 numbers of scratch space for ``multiplied``: rows may fill a tile up, and ``turn`` writes behind them."""
    return _SUMS + min(AT_ONCE, -(-rows // ROWS) * ROWS) * inner + LANES


@inlined
def _size(left: Any) -> Any:
    """Rows of the next tile if so many are left."""
    if left > np.int64(2) * _HALF:
        return _ROWS
    if left > _HALF:
        return _HALF if left > _ROWS else _ROWS
    return np.int64(1) if left == 1 else np.int64(2) if left == 2 else np.int64(4) if left <= 4 else _HALF


@inlined
def _turned(columns: Any, source: Any, rows: Any, k: Any) -> Any:
    """``source`` [rows, k] to ``columns``: of each tile [k, its rows], the last one's filled up. How many tiles."""
    a, x = floats(columns), floats(source)
    whole = k - k % _LANES
    tiles = row = np.int64(0)
    while row < rows:
        size = _size(rows - row)
        real, at = min(size, rows - row), row * k
        for j in range(0, whole, _LANES):
            turn(columns + _BYTES * (at + j * size), source + _BYTES * (at + j), k, real, size)
        for j in range(whole, k):
            for i in range(size):
                a[np.uint64(at + j * size + i)] = x[np.uint64(at + min(i, real - 1) * k + j)]
        row += size
        tiles += 1
    return tiles


@jit
def multiplied(
    to: Any, source: Any, weight: Any, bias: Any, scratch: Any, sizes: Any, begin: Any, end: Any, past: Any
) -> bool:
    """The panels [begin, end) of source [m, k] times a weight [n, k], plus ``bias`` [n]; to [m, n]. True.

    ``weight`` [panels, k, WIDTH]: columns side by side, zeros after the last. ``bias`` may be 0. ``sizes``: m, k, n.
    ``scratch``: as many as ``scratch_numbers``. It and ``weight`` are aligned to 64 bytes.
    ``past``: the result goes past the caches; then n is a multiple of LANES, and ``to`` is aligned, too.
    """
    m, k, n = sizes
    out, plus, sums = floats(to), floats(bias), floats(scratch)
    columns = scratch + _BYTES * np.int64(_SUMS)
    for first in range(0, m, AT_ONCE):
        rows = min(m - first, np.int64(AT_ONCE))
        tiles = _turned(columns, source + _BYTES * first * k, rows, k)
        step = _BYTES * _WIDTH // tiles
        for panel in range(begin, end):
            column = panel * _WIDTH
            width = min(_WIDTH, n - column)
            for i in range(rows):
                for j in range(_WIDTH):
                    begun = plus[np.uint64(column + j)] if bias and j < width else np.float32(0.0)
                    sums[np.uint64(i * _WIDTH + j)] = begun
            for inner in range(0, k, _INNER):
                length = min(_INNER, k - inner)
                part = weight + _BYTES * _WIDTH * (panel * k + inner)
                ahead = part + _BYTES * _WIDTH * length
                row = np.int64(0)
                while row < rows:
                    size = _size(rows - row)
                    t, s = scratch + _BYTES * row * _WIDTH, columns + _BYTES * (row * k + inner * size)
                    if size == _ROWS:
                        add_most(t, s, part, length, ahead, step)
                    elif size == _HALF:
                        add_half(t, s, part, length, ahead, step)
                    elif size == 4:
                        add4(t, s, part, length, ahead, step)
                    elif size == 2:
                        add2(t, s, part, length, ahead, step)
                    else:
                        add1(t, s, part, length, ahead, step)
                    row += size
                    ahead += length * step
            if past:
                for i in range(rows):
                    for j in range(0, width, _LANES):
                        at = (first + i) * n + column + j
                        stream(to + _BYTES * at, scratch + _BYTES * (i * _WIDTH + j))
            else:
                for i in range(rows):
                    at = (first + i) * n + column
                    for j in range(width):
                        out[np.uint64(at + j)] = sums[np.uint64(i * _WIDTH + j)]
    return True
