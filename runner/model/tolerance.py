"""The allowed difference of logits if bits cannot be demanded."""

from __future__ import annotations

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1, "float8_e4m3fn": 1e-1, "float8_e5m2": 2e-1}
"""Allowed difference of logits (and of K and V) by dtype, times the largest of them in the cold run if above 1.

The dtype is the type of K and V if they are in 8 bits, else the weights'. A value rounded up there may be rounded down
here, and one step of e4m3 is up to 1/8 of a value.
"""
