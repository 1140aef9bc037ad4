"""Integers and numbers among argument values: plain ones and NumPy's, never a bool."""

from __future__ import annotations

import operator

import numpy as np

MOST_SHOWN = 200
"""Characters shown of a value in a message."""


def integer(value: object) -> int | None:
    """``value`` as a plain int; None if it is no integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def number(value: object) -> int | float | None:
    """``value`` as a plain int or float; None if it is no number."""
    return float(value) if isinstance(value, (float, np.floating)) else integer(value)


def shown(value: object) -> str:
    """``repr`` for a message, cut if it is long. Raises nothing."""
    try:
        text = repr(value)
    except Exception:  # Python refuses to write down some values, such as very long integers
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"
