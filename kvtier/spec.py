"""What a model's KV cache consists of: attention kinds, groups, and which layer lives where.

Owns       the geometry: which tokens a position sees, how many bytes a block takes, how many blocks a run needs.
Promises   whether a request can ever run (refusal, admission, advertised capacity) is computed by
           ``GroupSpec.peak_blocks`` and nowhere else. Keeps I6, I23.
Does not   know pools, tiers or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from kvtier.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
ALIGN_BYTES = 16
"""Block bytes are a multiple of this, so that every K and V row can be read in 16-byte loads."""


class Kind(IntEnum):
    """Attention kinds as the compiled loops see them."""

    FULL = 0
    WINDOW = 1
    CHUNK = 2


@dataclass(frozen=True)
class FullAttention:
    """Token i sees every j <= i."""

    kind = Kind.FULL
    span_tokens = 0

    def first_visible(self, position: int) -> int:
        """The first token that ``position`` sees."""
        return 0


@dataclass(frozen=True)
class SlidingWindow:
    """Token i sees i - window_tokens < j <= i (transformers' ``sliding_window``)."""

    window_tokens: int
    kind = Kind.WINDOW

    def __post_init__(self) -> None:
        _positive("SlidingWindow.window_tokens", self.window_tokens)

    @property
    def span_tokens(self) -> int:
        return self.window_tokens

    def first_visible(self, position: int) -> int:
        """The first token that ``position`` sees."""
        return max(0, position - self.window_tokens + 1)


@dataclass(frozen=True)
class ChunkedLocal:
    """Token i sees j <= i of its own chunk, j // chunk_tokens == i // chunk_tokens (``attention_chunk_size``)."""

    chunk_tokens: int
    kind = Kind.CHUNK

    def __post_init__(self) -> None:
        _positive("ChunkedLocal.chunk_tokens", self.chunk_tokens)

    @property
    def span_tokens(self) -> int:
        return self.chunk_tokens

    def first_visible(self, position: int) -> int:
        """The first token that ``position`` sees."""
        return position - position % self.chunk_tokens


Attention = FullAttention | SlidingWindow | ChunkedLocal


@dataclass(frozen=True)
class GroupSpec:
    """Layers with one attention kind and one KV shape.

    A block holds K and V of ``block_tokens`` consecutive tokens in all ``num_layers`` layers, contiguous.
    ``head_dim_v`` is V's head size where it differs from K's ``head_dim``.
    """

    name: str
    attention: Attention
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block_tokens: int = 16
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("a group needs a non-empty name")
        if not isinstance(self.attention, (FullAttention, SlidingWindow, ChunkedLocal)):
            raise ConfigError(
                f"{where}: attention must be FullAttention, SlidingWindow or ChunkedLocal, got {self.attention!r}"
            )
        for what in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            _positive(f"{where}: {what}", getattr(self, what))
        if self.head_dim_v is not None:
            _positive(f"{where}: head_dim_v", self.head_dim_v)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype, where))
        if isinstance(self.attention, ChunkedLocal) and self.attention.chunk_tokens % self.block_tokens:
            raise ConfigError(
                f"{where}: chunk_tokens {self.attention.chunk_tokens} is not a multiple of block_tokens "
                f"{self.block_tokens}; a block must not straddle two chunks"
            )

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head size of K and of V."""
        return self.head_dim, self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers of the group."""
        return self.num_layers * self.num_kv_heads * sum(self.head_dims) * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in either tier, padded to a multiple of ``ALIGN_BYTES``."""
        return -(-self.token_bytes * self.block_tokens // ALIGN_BYTES) * ALIGN_BYTES

    def blocks_needed(self, start: int, end: int) -> int:
        """Blocks that a step holds to compute tokens [start, end): from the first visible token to the end."""
        return -(-end // self.block_tokens) - self.attention.first_visible(start) // self.block_tokens

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks that a run of ``num_tokens`` holds at once when it computes one token a step.

        For a window of W tokens this is the tight bound ceil((W + block_tokens - 1) / block_tokens), reached
        where the window straddles blocks (vLLM issue 48959 was this bound off by one).
        """
        whole = -(-num_tokens // self.block_tokens)
        span = self.attention.span_tokens
        if self.attention.kind is Kind.WINDOW:
            return min(whole, -(-(span + self.block_tokens - 1) // self.block_tokens))
        if self.attention.kind is Kind.CHUNK:
            return min(whole, span // self.block_tokens)
        return whole


@dataclass(frozen=True)
class CacheSpec:
    """All groups of a model. ``layers[i]`` is (group name, index within the group) of model layer i.

    Without ``layers`` the model's layers are numbered through the groups in order.
    """

    groups: tuple[GroupSpec, ...]
    layers: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)

    def __init__(self, groups: Iterable[GroupSpec], *, layers: Sequence[tuple[str, int]] | None = None) -> None:
        if not isinstance(groups, Iterable):
            raise ConfigError(f"a CacheSpec takes a list of GroupSpec, got {groups!r}")
        groups = tuple(groups)
        if not groups:
            raise ConfigError("a CacheSpec needs at least one group")
        for group in groups:
            if not isinstance(group, GroupSpec):
                raise ConfigError(f"CacheSpec groups must be GroupSpec, not {type(group).__name__}")
        names = [group.name for group in groups]
        if len(set(names)) != len(names):
            raise ConfigError(f"group names must be unique, got {names}")
        if layers is None:
            layers = [(group.name, i) for group in groups for i in range(group.num_layers)]
        sizes = {group.name: group.num_layers for group in groups}
        for i, place in enumerate(layers):
            if not isinstance(place, (tuple, list)) or len(place) != 2:
                raise ConfigError(f"model layer {i} must be (group name, index in it), got {place!r}")
            name, index = place
            if name not in sizes or not 0 <= index < sizes[name]:
                raise ConfigError(f"model layer {i} maps to layer {index} of group {name!r}, which is not there")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "layers", tuple((str(name), int(index)) for name, index in layers))

    @classmethod
    def from_config(cls, hf_config: Any, dtype: Any = None, block_tokens: int = 16) -> CacheSpec:
        """The groups of a transformers causal LM, read from its config by layer type.

        ``dtype`` defaults to the config's own. Raises ``UnsupportedModel`` naming the layer type or the reason.
        """
        from kvtier.integrations.transformers import spec_from_config

        return spec_from_config(hf_config, dtype=dtype, block_tokens=block_tokens)

    def layer(self, i: int) -> tuple[str, int]:
        """(group name, layer index within it) of model layer ``i``; sharing layers map to the layer they read."""
        if not isinstance(i, int) or not 0 <= i < len(self.layers):
            raise ConfigError(f"the model has layers 0..{len(self.layers) - 1}, not {i!r}")
        return self.layers[i]

    def group(self, name: str) -> GroupSpec:
        """The group called ``name``; raises ``ConfigError`` naming the groups there are."""
        return self.groups[self.index(name)]

    def index(self, name: str) -> int:
        """Position of the group called ``name``; raises ``ConfigError`` naming the groups there are."""
        try:
            return self.names.index(name)
        except ValueError:
            raise ConfigError(f"no group {name!r}; there are {', '.join(self.names)}") from None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Group names, in order."""
        return tuple(group.name for group in self.groups)

    @cached_property
    def hash_tokens(self) -> int:
        """Tokens per link of the key chain: gcd of the groups' block_tokens."""
        return math.gcd(*(group.block_tokens for group in self.groups))

    @cached_property
    def hit_tokens(self) -> int:
        """A prefix hit is a multiple of this: lcm of the groups' block_tokens."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all groups."""
        return sum(group.token_bytes for group in self.groups)


def _positive(what: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ConfigError(f"{what} must be a positive integer (below 2**31), got {value!r}")


def _dtype_name(dtype: object, where: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"{where}: unknown dtype {dtype!r}; kvtier stores {', '.join(DTYPE_BYTES)}")
    return name
