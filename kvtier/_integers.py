"""What counts as an integer: plain ones and NumPy's, never a bool."""

from __future__ import annotations

from numbers import Integral


def integer(value: object) -> int | None:
    """``value`` as a plain int; None if it is no integer."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def shown(value: object) -> str:
    """``repr`` for a message; Python refuses to write down very long integers, also in lists."""
    number = integer(value)
    if number is None:
        try:
            return repr(value)
        except ValueError:
            return f"a {type(value).__name__} with very long integers"
    return repr(number) if abs(number) < 2**128 else f"an integer of {number.bit_length():,} bits"
