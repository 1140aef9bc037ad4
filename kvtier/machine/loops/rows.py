"""Compiled loops over rows of float32: RMS norms, rotary positions, gates. A row's bits depend on that row alone.

Tensors come as flat arrays that begin at their first element; ``strides`` int64 has two for each array, in elements.
Innermost loops go over consecutive memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.exponential import exp
from kvtier.machine.loops.jit import jit_floats

_U = np.uint64
_F = np.float32


@jit_floats
def normed(out: Any, x: Any, factor: Any, epsilon: Any, begin: Any, end: Any, inner: Any, strides: Any) -> bool:
    """``out`` of the rows [begin, end) of ``x``: each over its root mean square, times ``factor`` [n].

    Row r is at (r // ``inner``, r % ``inner``). ``strides`` [4]: two of ``x``, then of ``out``. True.
    """
    n = len(factor)
    for row in range(begin, end):
        i, j = row // inner, row % inner
        source, to = _U(i * strides[0] + j * strides[1]), _U(i * strides[2] + j * strides[3])
        squares = _F(0.0)
        for at in range(_U(n)):
            squares += x[source + at] * x[source + at]
        scale = _F(1.0) / np.sqrt(squares / _F(n) + epsilon)
        for at in range(_U(n)):
            out[to + at] = x[source + at] * scale * factor[at]
    return True


@jit_floats
def turned(out: Any, x: Any, cos: Any, sin: Any, begin: Any, end: Any, heads: Any, size: Any, strides: Any) -> bool:
    """``out`` of the tokens [begin, end) of ``x``, all ``heads`` of ``size`` numbers turned by the token's angles.

    The number at i in the first half belongs to the one at i in the second. ``strides`` [8]: per token and head of
    ``x``, and of ``out``; of ``cos`` per token, and from a first half's angle to the second's; the same of ``sin``.
    True.
    """
    half = _U(size // 2)
    for token in range(begin, end):
        c, s = _U(token * strides[4]), _U(token * strides[6])
        d, t = c + _U(strides[5]), s + _U(strides[7])
        for head in range(heads):
            source = _U(token * strides[0] + head * strides[1])
            to = _U(token * strides[2] + head * strides[3])
            for i in range(half):
                a, b = x[source + i], x[source + half + i]
                out[to + i] = a * cos[c + i] - b * sin[s + i]
                out[to + half + i] = b * cos[d + i] + a * sin[t + i]
    return True


@jit_floats
def gated(out: Any, x: Any, begin: Any, end: Any, size: Any, linear: Any, cubic: Any) -> bool:
    """``out`` of the rows [begin, end) of ``x``, of which each is ``size`` gates g and then as many numbers. True.

    A number is multiplied by g / (1 + exp(-``linear`` g - ``cubic`` g^3)).
    """
    for row in range(begin, end):
        g, n, to = _U(2 * row * size), _U((2 * row + 1) * size), _U(row * size)
        for i in range(_U(size)):
            gate = x[g + i]
            z = gate * (linear + cubic * gate * gate)
            small = exp(-abs(z))
            out[to + i] = gate * x[n + i] * (_F(1.0) if z > 0 else small) / (_F(1.0) + small)
    return True
