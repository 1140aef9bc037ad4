"""Groups of blocks in an engine's own layout of its device memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier._integers import integer, shown
from kvtier.cpu_offload.fragments import Fragment
from kvtier.errors import ConfigError
from kvtier.spec import Attention, ChunkedLocal, FullAttention, Kind, SlidingWindow


@dataclass(frozen=True)
class OutsideGroup:
    """Layers with one attention kind, as the engine lays their blocks out.

    Block b of ``num_blocks``, from 0 on, holds K and V of ``block_tokens`` consecutive tokens of these layers. It
    consists of its ``fragments``, one per layer for instance. Each fragment lies at its own ``offset + b * stride`` in
    the engine's memory.
    """

    name: str
    attention: Attention
    block_tokens: int
    num_blocks: int
    fragments: tuple[Fragment, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of all fragments of a block."""
        return sum(fragment.num_bytes for fragment in self.fragments)


class OutsideSpec:
    """All groups of an engine."""

    def __init__(self, groups: Sequence[OutsideGroup]) -> None:
        """Raises ``ConfigError`` for groups without a name of their own or blocks without tokens."""
        if not all(isinstance(group, OutsideGroup) for group in groups):
            raise ConfigError("a host tier takes kvtier.OutsideGroups")
        self.groups = tuple(groups)
        self.names = tuple(group.name for group in groups)
        if not groups or len(set(self.names)) < len(groups):
            raise ConfigError(f"a host tier needs groups with names of their own, got {shown(self.names)}")
        for group in groups:
            if not isinstance(group.attention, (FullAttention, SlidingWindow, ChunkedLocal)):
                raise ConfigError(
                    f"group {group.name!r}: attention must be FullAttention, SlidingWindow or ChunkedLocal"
                )
            if any(integer(value) is None for fragment in group.fragments for value in fragment):
                raise ConfigError(f"group {group.name!r}: fragments are (offset, stride, num_bytes), integers")
            sizes = integer(group.block_tokens), integer(group.num_blocks)
            if any(size is None or size < 1 for size in sizes):
                raise ConfigError(f"group {group.name!r}: block_tokens and num_blocks must be positive integers")
            if group.attention.kind is Kind.CHUNK and group.attention.span_tokens % group.block_tokens:
                raise ConfigError(f"group {group.name!r}: a block must not straddle two chunks")
        self.hash_tokens = math.gcd(*(group.block_tokens for group in groups))
        """Tokens per key: the gcd of the groups' block_tokens."""
        self.hit_tokens = math.lcm(*(group.block_tokens for group in groups))
        """A hit is a multiple of it: the lcm of the groups' block_tokens."""
