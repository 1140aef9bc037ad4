"""Compiled loops over rows of float32: RMS norms, rotary positions, gates. A row's bits depend on that row alone.

Tensors come as the address of their first number; ``strides`` has two for each of them, in numbers.
Innermost loops go over consecutive memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.exponential import exp
from kvtier.machine.loops.jit import floats, jit_floats

_U = np.uint64
_F = np.float32


@jit_floats
def normed(
    to: Any, source: Any, by: Any, size: Any, epsilon: Any, begin: Any, end: Any, inner: Any, strides: Any
) -> bool:
    """The rows [begin, end) of ``source``, each over its root mean square, times the factor ``by`` [size]. True.

    Row r is at (r // ``inner``, r % ``inner``). ``strides`` (4): two of ``source``, then of ``to``.
    """
    out, x, factor = floats(to), floats(source), floats(by)
    for row in range(begin, end):
        i, j = row // inner, row % inner
        a, b = _U(i * strides[0] + j * strides[1]), _U(i * strides[2] + j * strides[3])
        squares = _F(0.0)
        for at in range(_U(size)):
            squares += x[a + at] * x[a + at]
        scale = _F(1.0) / np.sqrt(squares / _F(size) + epsilon)
        for at in range(_U(size)):
            out[b + at] = x[a + at] * scale * factor[at]
    return True


@jit_floats
def turned(to: Any, source: Any, angles: Any, begin: Any, end: Any, heads: Any, size: Any, strides: Any) -> bool:
    """The tokens [begin, end) of ``source``, all ``heads`` of ``size`` numbers turned by the token's angles. True.

    ``angles`` (2): cosines and sines. The number at i in the first half belongs to the one at i in the second.
    ``strides`` (6): per token and head of ``source``, and of ``to``; of angles per token, and from a first half's angle
    to the second's.
    """
    out, x, cos, sin = floats(to), floats(source), floats(angles[0]), floats(angles[1])
    half = _U(size // 2)
    for token in range(begin, end):
        c = _U(token * strides[4])
        d = c + _U(strides[5])
        for head in range(heads):
            a = _U(token * strides[0] + head * strides[1])
            b = _U(token * strides[2] + head * strides[3])
            for i in range(half):
                first, second = x[a + i], x[a + half + i]
                out[b + i] = first * cos[c + i] - second * sin[c + i]
                out[b + half + i] = second * cos[d + i] + first * sin[d + i]
    return True


@jit_floats
def gated(to: Any, source: Any, begin: Any, end: Any, size: Any, linear: Any, cubic: Any) -> bool:
    """The rows [begin, end) of ``source``, of which each is ``size`` gates g and then as many numbers. True.

    A number is multiplied by g / (1 + exp(-``linear`` g - ``cubic`` g^3)).
    """
    out, x = floats(to), floats(source)
    for row in range(begin, end):
        g, n, at = _U(2 * row * size), _U((2 * row + 1) * size), _U(row * size)
        for i in range(_U(size)):
            gate = x[g + i]
            z = gate * (linear + cubic * min(gate * gate, _F(1e30)))  # 0 times infinity is no number
            small = exp(-abs(z))
            out[at + i] = gate * x[n + i] * (_F(1.0) if z > 0 else small) / (_F(1.0) + small)
    return True
