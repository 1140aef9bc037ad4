"""What counts as an integer or a number: plain ones and NumPy's, never a bool."""

from __future__ import annotations

from numbers import Integral

import numpy as np

MOST_SHOWN = 200
"""Characters of a value in a message."""


def integer(value: object) -> int | None:
    """``value`` as a plain int; None if it is no integer."""
    if type(value) is int:
        return value
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def number(value: object) -> int | float | None:
    """``value`` as a plain int or float; None if it is no number."""
    return float(value) if isinstance(value, (float, np.floating)) else integer(value)


def shown(value: object) -> str:
    """``repr`` for a message, cut where it is long; whatever the value is, it raises nothing.

    Python refuses to write down very long integers, and lists too deeply nested; an object's own ``repr`` may fail.
    """
    whole = integer(value)
    if whole is not None and abs(whole) >= 2**128:
        return f"an integer of {whole.bit_length():,} bits"
    kind = type(value).__name__
    try:
        text = repr(value if whole is None else whole)
    except RecursionError:
        return f"a {kind} nested too deeply"
    except Exception as problem:
        if type(problem) is ValueError and isinstance(value, (list, tuple, dict, set, frozenset)):
            return f"a {kind} with very long integers"
        return f"a {kind} whose repr raises {type(problem).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"
