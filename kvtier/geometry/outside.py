"""Groups of blocks in an engine's own layout of its device memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.geometry.kinds import Attention, ChunkedLocal, FullAttention, Kind, RecurrentState, SlidingWindow
from kvtier.geometry.sizing import MOST_BYTES
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import integer, shown

MOST_IDS = 2**31
"""Block ids are int32."""


class Fragment(NamedTuple):
    """A part of every block of a group. Block b's part is the ``num_bytes`` bytes from ``offset + b * stride`` on."""

    offset: int
    stride: int
    num_bytes: int


@dataclass(frozen=True)
class OutsideGroup:
    """Layers with one attention kind, as the engine lays their blocks out.

    Block b of ``num_blocks``, from 0 on, holds whatever the engine keeps for ``block_tokens`` consecutive tokens in
    these layers. Of a ``RecurrentState`` it holds the state at their end: the tier sees bytes. It consists of its
    ``fragments``, one per layer for instance. Each fragment lies at its own ``offset + b * stride`` in the engine's
    memory.
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
        if not isinstance(groups, (list, tuple)) or not all(isinstance(group, OutsideGroup) for group in groups):
            raise ConfigError(f"a host tier takes a list of kvtier.OutsideGroups, got {shown(groups)}")
        names = [group.name for group in groups]
        if not all(isinstance(name, str) and name for name in names) or not 0 < len(set(names)) == len(names):
            raise ConfigError(f"a host tier needs groups with names of their own, got {shown(names)}")
        self.names = tuple(names)
        self.groups = tuple(map(_plain, groups))
        for group in self.groups:
            if not isinstance(group.attention, (FullAttention, SlidingWindow, ChunkedLocal, RecurrentState)):
                raise ConfigError(
                    f"group {group.name!r}: attention must be FullAttention, SlidingWindow, ChunkedLocal or "
                    "RecurrentState"
                )
            if group.attention.kind is Kind.CHUNK and group.attention.span_tokens % group.block_tokens:
                raise ConfigError(f"group {group.name!r}: a block must not straddle two chunks")
        self.hash_tokens = math.gcd(*(group.block_tokens for group in groups))
        """Tokens per key: the gcd of the groups' block_tokens."""
        self.hit_tokens = math.lcm(*(group.block_tokens for group in groups))
        """A hit is a multiple of it: the lcm of the groups' block_tokens."""
        for group in self.groups:
            if group.attention.kind is Kind.STATE and group.block_tokens != self.hit_tokens:
                raise ConfigError(
                    f"group {group.name!r}: states are kept where hits end, at multiples of {self.hit_tokens:,} "
                    f"tokens; its block_tokens is {group.block_tokens:,}"
                )


def _plain(group: OutsideGroup) -> OutsideGroup:
    """The same of plain ints, which names in a remote are made of. Raises ``ConfigError``."""
    tokens, blocks = integer(group.block_tokens), integer(group.num_blocks)
    if tokens is None or blocks is None or not (1 <= tokens < MOST_IDS and 1 <= blocks < MOST_IDS):
        raise ConfigError(f"group {group.name!r}: block_tokens and num_blocks must be positive integers below 2**31")
    given = group.fragments if isinstance(group.fragments, (list, tuple)) else (None,)
    fragments = tuple(found for fragment in given if (found := _fragment(fragment)) is not None)
    if len(fragments) < len(given):
        raise ConfigError(f"group {group.name!r}: fragments are a list of (offset, stride, num_bytes), integers")
    return OutsideGroup(group.name, group.attention, tokens, blocks, fragments)


def _fragment(given: object) -> Fragment | None:
    values = list(map(integer, given)) if isinstance(given, (list, tuple)) else []
    plain = [value for value in values if value is not None and abs(value) <= MOST_BYTES]
    return Fragment(*plain) if len(plain) == len(values) == len(Fragment._fields) else None
