"""What layers keep of a text: keys and values of the tokens that a position sees, or a state.

Owns       the attention kinds, and the parts of a state.
Promises   ``first_visible`` and ``span_tokens`` say all that pools and hits need of a kind.
Does not   know groups, blocks or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvtier.geometry.dtypes import DTYPE_BYTES, dtype_name
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import integer, shown

BOUND = 2**31
"""Sizes are below this, and so is the unit of prefix hits."""
ALIGN_BYTES = 16
"""Block bytes are a multiple of this, so that every K and V row can be read in 16-byte loads."""
MOST_SIZES = 16
"""A tensor of more dimensions is taken for damaged."""
_TEXT = str, bytes, bytearray, memoryview  # sequences, but none of sizes
STATE_TOKENS = 64
"""Tokens from one state that can be kept to the next. The kernels of recurrent layers work in chunks of so many: cuts
there leave the bits of what is computed as they are."""


class Kind(IntEnum):
    """Attention kinds for the compiled loops."""

    FULL = 0
    WINDOW = 1
    CHUNK = 2
    STATE = 3


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
        object.__setattr__(self, "window_tokens", positive("SlidingWindow.window_tokens", self.window_tokens))

    @property
    def span_tokens(self) -> int:
        """Tokens that a position sees at most."""
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
        object.__setattr__(self, "chunk_tokens", positive("ChunkedLocal.chunk_tokens", self.chunk_tokens))

    @property
    def span_tokens(self) -> int:
        """Tokens that a position sees at most."""
        return self.chunk_tokens

    def first_visible(self, position: int) -> int:
        """The first token that ``position`` sees."""
        return position - position % self.chunk_tokens


@dataclass(frozen=True)
class Part:
    """One tensor of a layer's state: its name, its shape for one request, and its dtype by torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("a Part needs a non-empty name")
        where = f"part {shown(self.name)}"
        if not isinstance(self.shape, Sequence) or isinstance(self.shape, _TEXT) or not self.shape:
            raise ConfigError(f"{where}: shape must be a tuple of sizes, got {shown(self.shape)}")
        if len(self.shape) > MOST_SIZES:
            raise ConfigError(f"{where}: shape has {len(self.shape):,} sizes, and tensors {MOST_SIZES} at most")
        object.__setattr__(self, "shape", tuple(positive(f"{where}: a size", size) for size in self.shape))
        object.__setattr__(self, "dtype", dtype_name(self.dtype, where))
        if self.num_bytes >= BOUND:
            raise ConfigError(f"{where}: {shown(self.shape)} takes {self.num_bytes:,} bytes; 2 GiB are too many")

    @property
    def num_bytes(self) -> int:
        """Bytes in a block, padded to a multiple of ``ALIGN_BYTES``, so that the next part begins on a border."""
        return -(-math.prod(self.shape) * DTYPE_BYTES[self.dtype] // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class RecurrentState:
    """Layers that keep one state in place of their tokens' keys and values: tensors ``parts``, each for one layer.

    Block j has the state after token (j + 1) * block_tokens, in all layers. A hit at n needs the block that ends there.
    """

    parts: tuple[Part, ...]
    kind = Kind.STATE
    span_tokens = 2

    def __post_init__(self) -> None:
        if not isinstance(self.parts, Sequence) or isinstance(self.parts, _TEXT) or not self.parts:
            raise ConfigError(f"a RecurrentState takes a tuple of Part, got {shown(self.parts)}")
        for part in self.parts:
            if not isinstance(part, Part):
                raise ConfigError(f"a RecurrentState takes Parts, got {type(part).__name__}")
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise ConfigError(f"the parts of a state need names of their own, got {names}")
        object.__setattr__(self, "parts", tuple(self.parts))

    def first_visible(self, position: int) -> int:
        """The last token of the state that ``position`` goes on from."""
        return max(0, position - 1)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's state."""
        return sum(part.num_bytes for part in self.parts)


Attention = FullAttention | SlidingWindow | ChunkedLocal | RecurrentState


def positive(what: str, value: object) -> int:
    """``value`` as a size, an integer from 1 to ``BOUND`` - 1; ``ConfigError`` that names ``what``."""
    number = integer(value)
    if number is None or not 1 <= number < BOUND:
        raise ConfigError(f"{what} must be a positive integer (below 2**31), got {shown(value)}")
    return number
