"""From bytes to blocks: how much memory each group's pool gets.

Promises   the pools of a tier, null blocks included, take at most the given bytes. Every group gets at least one usable
           block, or the caller gets ``MemoryUnavailable``. Keeps I6, I22.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvtier.geometry.kinds import Kind
from kvtier.geometry.layout import Layout
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.machine.errors import ConfigError, MemoryUnavailable
from kvtier.machine.integers import integer, shown

_UNITS = {"": 1, "b": 1}
for _i, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_i, f"{_letter}b": 1000**_i, f"{_letter}ib": 1024**_i}

MOST_BYTES = 2**60

CHUNK_TOKENS = 2048
"""Room of a local group in a static split, beside its window, for the running chunk of prompt."""
TYPICAL_TOKENS = 16384
"""Context length for which a static split balances full and local groups."""


def parse_bytes(value: str | int, setting: str) -> int:
    """Bytes from an int or from text such as "8GiB", "512 MB" or "1.5g" (k, m, g, t are powers of 1024)."""
    number = integer(value)
    if number is not None:
        if not 0 <= number <= MOST_BYTES:
            raise ConfigError(f"{setting} must be in 0..2**60 bytes, got {shown(number)}")
        return number
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if not found or found[2].lower() not in _UNITS:
        raise ConfigError(f"{setting} must be bytes or text such as '8GiB', got {shown(value)}")
    return parse_bytes(int(min(float(found[1]) * _UNITS[found[2].lower()], 2.0 * MOST_BYTES)), setting)


def spare_blocks(spec: CacheSpec) -> list[bool]:
    """By group, whether rows that pad a step need a block to write to: those of states have no slot to leave out."""
    return [group.attention.kind is Kind.STATE for group in spec.groups]


def layout_of(spec: CacheSpec, num_bytes: int, setting: str, spare: Sequence[bool] = ()) -> Layout:
    """An arena of ``num_bytes`` that the groups' pools share; separate pools if it is too small to share.

    ``spare``: groups with a block more, in the same bytes.

    Raises ``MemoryUnavailable``, naming ``setting``, if not even one block of every group fits.
    """
    sizes = [group.block_bytes for group in spec.groups]
    layout = Layout.of_slabs(sizes, num_bytes, spare) if len(sizes) > 1 else None
    if layout is None:
        beside = sum(size for size, more in zip(sizes, spare, strict=False) if more)
        layout = Layout.fixed(sizes, split_bytes(spec, num_bytes, setting, beside), spare)
    return layout


def split_bytes(spec: CacheSpec, num_bytes: int, setting: str, beside: int = 0) -> list[int]:
    """Usable blocks per group for a tier of ``num_bytes`` bytes, one null block per group and ``beside`` bytes set
    aside.

    A full-attention group gets x tokens. A local group gets the need of several requests of ``TYPICAL_TOKENS`` tokens,
    x tokens together, but at least the need of one running request. x is as large as fits.
    """
    least = beside + sum(2 * group.block_bytes for group in spec.groups)
    if num_bytes < least:
        raise MemoryUnavailable(
            f"{setting} is {num_bytes:,} bytes, but one block and the null block of every group take {least:,}; "
            f"raise {setting}"
        )
    num_bytes -= beside
    least = min(group.token_bytes or -(-group.block_bytes // group.block_tokens) for group in spec.groups)
    low, high = 1, 1 + num_bytes // least * max(1, spec.hit_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if _tier_bytes(spec, middle) <= num_bytes:
            low = middle
        else:
            high = middle - 1
    fits = _tier_bytes(spec, low) <= num_bytes  # else there is no room for all states of a request
    blocks = [_blocks_for(group, low) if fits else 1 for group in spec.groups]
    left = num_bytes - sum((n + 1) * group.block_bytes for n, group in zip(blocks, spec.groups, strict=True))
    for g, group in sorted(enumerate(spec.groups), key=lambda item: item[1].attention.kind is Kind.FULL):
        more = left // group.block_bytes
        tokens = (blocks[g] + more) * group.block_tokens  # the rest goes to a full group only if the others keep up
        if group.attention.kind is not Kind.FULL or all(
            n >= other.peak_blocks(tokens) for n, other in zip(blocks, spec.groups, strict=True) if other is not group
        ):
            blocks[g] += more
            left -= more * group.block_bytes
    return blocks


def fixed_blocks(spec: CacheSpec, blocks: Mapping[str, int], setting: str) -> list[int]:
    """Usable blocks per group as given by name; every group must be there."""
    if not isinstance(blocks, Mapping) or set(blocks) != set(spec.names):
        raise ConfigError(
            f"{setting} must map every group ({', '.join(spec.names)}) to a number of blocks, got {shown(blocks)}"
        )
    usable = []
    for name in spec.names:
        n = integer(blocks[name])
        if n is None:
            raise ConfigError(f"{setting}[{name!r}] must be a number of blocks, got {shown(blocks[name])}")
        if n > MOST_BYTES:
            raise ConfigError(f"{setting}[{name!r}] is {shown(n)} blocks, more than any memory has")
        if n < 1:
            raise MemoryUnavailable(f"{setting}[{name!r}] must be at least one block, got {shown(n)}")
        usable.append(n)
    total = sum((n + 1) * group.block_bytes for n, group in zip(usable, spec.groups, strict=True))
    if total > MOST_BYTES:
        raise MemoryUnavailable(f"{setting} asks for {total:,} bytes, more than any memory has; lower {setting}")
    return usable


STATES_A_REQUEST = 4
"""Blocks of states in a static split for each request of ``TYPICAL_TOKENS`` tokens: its own, and ends that stay."""


def _blocks_for(group: GroupSpec, tokens: int) -> int:
    if group.attention.kind is Kind.STATE:
        return STATES_A_REQUEST * -(-tokens // TYPICAL_TOKENS)
    if group.attention.kind is not Kind.FULL:
        one = group.attention.span_tokens + CHUNK_TOKENS
        tokens = min(tokens, max(one, tokens * one // TYPICAL_TOKENS))
    return -(-tokens // group.block_tokens)


def _tier_bytes(spec: CacheSpec, tokens: int) -> int:
    return sum((_blocks_for(group, tokens) + 1) * group.block_bytes for group in spec.groups)
