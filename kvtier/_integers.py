"""What counts as an integer: plain ones and NumPy's, never a bool."""

from __future__ import annotations

from numbers import Integral


def integer(value: object) -> int | None:
    """``value`` as a plain int; None if it is no integer."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def shown(value: object) -> str:
    """``repr`` for a message; Python refuses to write down very long integers."""
    number = integer(value)
    if number is None:
        return repr(value)
    return repr(number) if abs(number) < 2**128 else f"an integer of {number.bit_length():,} bits"
