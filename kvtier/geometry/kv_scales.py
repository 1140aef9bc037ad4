"""Static scales of K and V in 8-bit floats: one per layer and KV head.

Owns       the valid range of a scale, and a name for a set of them (their digest, which is part of every key).
Promises   scales are positive, finite and exact in float32. So every tier and kernel divides and multiplies by the same
           number.
Does not   know tensors, or which model layer is which (``CacheSpec.with_kv_scales`` does).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown

_SMALLEST = 2.0**-126
"""The smallest normal float32: some devices take smaller numbers for zero."""

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, eq=False)
class KVScales:
    """A group's scales: ``k[layer][head]`` and ``v[layer][head]``; a stored value times its scale is the true one.

    Raises ``ConfigError`` for scales that are not positive, not numbers, or too large or small for float32.
    """

    k: Rows
    v: Rows

    def __post_init__(self) -> None:
        for which in ("k", "v"):
            rows = getattr(self, which)
            if not isinstance(rows, Sequence) or isinstance(rows, str):
                raise ConfigError(f"{which}_scale must be one row of scales per layer, got {shown(rows)}")
            object.__setattr__(
                self, which, tuple(_row(row, f"{which}_scale of layer {i}") for i, row in enumerate(rows))
            )

    def layer(self, i: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Scales of K and of V of layer ``i`` of the group, one per KV head."""
        return self.k[i], self.v[i]

    def check_shape(self, num_layers: int, num_kv_heads: int, where: str) -> None:
        """Raises ``ConfigError`` unless there is one scale per layer and KV head."""
        for which, rows in (("k", self.k), ("v", self.v)):
            if len(rows) != num_layers or any(len(row) != num_kv_heads for row in rows):
                have = f"{len(rows)} x {sorted({len(row) for row in rows})}"
                raise ConfigError(f"{where}: {which}_scale is {have}, but there are {num_layers} x {num_kv_heads}")

    @property
    def is_one(self) -> bool:
        """Whether all scales are 1."""
        return all(scale == 1.0 for rows in (self.k, self.v) for row in rows for scale in row)

    @cached_property
    def digest(self) -> str:
        """A name for exactly these scales."""
        shape = [[len(row) for row in rows] for rows in (self.k, self.v)]
        scales = [scale for rows in (self.k, self.v) for row in rows for scale in row]
        content = repr(shape).encode() + struct.pack(f"<{len(scales)}f", *scales)
        return hashlib.blake2b(content, digest_size=16, person=b"kvtier-scales").hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVScales) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"KVScales({len(self.k)} layers, {self.digest})"


def layer_row(value: object, heads: int, where: str) -> tuple[float, ...]:
    """One layer's scales from one number for all heads, or one per head. Raises ``ConfigError``."""
    several = isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0
    row = _row(value if several else [value], where)
    if len(row) not in (1, heads):
        raise ConfigError(f"{where} has {len(row)} scales, but the layer has {heads} KV heads")
    return row if len(row) == heads else row * heads


def _row(values: object, where: str) -> tuple[float, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ConfigError(f"{where} must be a list of numbers, got {shown(values)}")
    return tuple(_scale(value, where) for value in values)


def _scale(value: object, where: str) -> float:
    """``value`` as float32 holds it."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ConfigError(f"{where} must be numbers, got {shown(value)}")
    try:
        scale = float(value)
        rounded: float = struct.unpack("<f", struct.pack("<f", scale))[0]
    except (OverflowError, ValueError, TypeError):
        raise ConfigError(f"{where} must be numbers that float32 can hold, got {shown(value)}") from None
    if not math.isfinite(rounded) or rounded < _SMALLEST:
        raise ConfigError(f"{where} must be positive, finite numbers that float32 can hold, got {scale!r}")
    return rounded
