"""What counts as an integer or a number: plain ones and NumPy's, never a bool."""

from __future__ import annotations

from numbers import Integral

import numpy as np


def integer(value: object) -> int | None:
    """``value`` as a plain int; None if it is no integer."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def number(value: object) -> int | float | None:
    """``value`` as a plain int or float; None if it is no number."""
    return float(value) if isinstance(value, (float, np.floating)) else integer(value)


def shown(value: object) -> str:
    """``repr`` for a message; Python refuses to write down very long integers, or lists too deeply nested."""
    whole = integer(value)
    if whole is None:
        try:
            return repr(value)
        except ValueError:
            return f"a {type(value).__name__} with very long integers"
        except RecursionError:
            return f"a {type(value).__name__} nested too deeply"
    return repr(whole) if abs(whole) < 2**128 else f"an integer of {whole.bit_length():,} bits"
