"""The exponential function of compiled loops, float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined

_F = np.float32


@inlined
def exp(x: Any) -> Any:
    """e to the power of x <= 0, to 1e-7 of it, 0 below -87: the reduction and the polynomial of Cephes' expf."""
    y = _F(-87.0) if x < _F(-87.0) else x  # NaN stays
    n = np.floor(y * _F(1.44269504) + _F(0.5))
    r = y - n * _F(0.693359375)
    r = r + n * _F(2.12194440e-4)
    p = _F(1.9875691500e-4)
    p = p * r + _F(1.3981999507e-3)
    p = p * r + _F(8.3334519073e-3)
    p = p * r + _F(4.1665795894e-2)
    p = p * r + _F(1.6666665459e-1)
    p = p * r + _F(5.0000001201e-1)
    exponent = np.int32(n if n > _F(-127.0) else _F(0.0))  # no integer is made of NaN
    power = np.int32((exponent + np.int32(127)) << np.int32(23)).view(_F)
    y = (p * r * r + r + _F(1.0)) * power
    return _F(0.0) if x < _F(-87.0) else y
