"""What fits: blocks and bytes of requests of a given length, and how many of them a tier holds.

Owns       the arithmetic of ``kvtier plan``, of the capacity benchmark and of their tests, over a ``CacheSpec`` alone.
Promises   blocks are counted by ``GroupSpec.blocks_needed`` and ``GroupSpec.peak_blocks``, as admission counts them.
Does not   know pools, requests or tensors. It does not count sharing between requests, nor blocks that a row keeps for
           a coming anchor and gives up when blocks are short.

"n tokens" are n tokens whose KV is written. All counts are per group, in the order of ``spec.groups``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import assert_never

from kvtier.geometry.kinds import Kind
from kvtier.geometry.layout import Layout
from kvtier.geometry.spec import CacheSpec, GroupSpec

Blocks = tuple[int, ...]
"""Blocks per group."""

MOST_TOKENS = 2**31 - 1
"""The longest request that is considered."""


# --- one request ----------------------------------------------------------------------------------


def held_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Held between two steps by a request of ``num_tokens`` tokens: the blocks that a mask can still reach.

    Full attention: all. Window: of the last window_tokens - 1. Chunk: since the chunk began, none at its boundary.
    """
    return tuple(group.blocks_needed(num_tokens, num_tokens) for group in spec.groups)


def running_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Held while such a request computes its next token; at least one block in every group."""
    return tuple(group.blocks_needed(num_tokens, num_tokens + 1) for group in spec.groups)


def peak_blocks(spec: CacheSpec, num_tokens: int, step_tokens: int = 1) -> Blocks:
    """The most held on the way to ``num_tokens`` tokens in steps of at most ``step_tokens``, wherever a step begins.

    With one token a step this is ``GroupSpec.peak_blocks``, by which a request is refused. With more it is the need of
    a chunk of prompt while it runs.
    """
    return tuple(_peak_blocks(group, num_tokens, min(step_tokens, max(1, num_tokens))) for group in spec.groups)


def _peak_blocks(group: GroupSpec, num_tokens: int, step_tokens: int) -> int:
    least, whole = group.peak_blocks(num_tokens), -(-num_tokens // group.block_tokens)
    span, bt = group.attention.span_tokens, group.block_tokens
    if group.attention.kind is Kind.STATE:  # beside those where prompts part
        return max(least, group.blocks_needed(max(1, num_tokens) - min(step_tokens, max(1, num_tokens)), num_tokens))
    if group.attention.kind is Kind.WINDOW:  # the step and the window before it, which need not begin with a block
        return max(least, min(whole, -(-(span - 1 + step_tokens + bt - 1) // bt)))
    if group.attention.kind is Kind.CHUNK:  # the step may begin at the end of a chunk
        return max(least, min(whole, -(-(span - 1 + step_tokens) // bt)))
    if group.attention.kind is Kind.FULL:
        return whole
    assert_never(group.attention.kind)


def full_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Blocks if every layer kept all tokens, as in a cache that does not tell attention kinds apart; one state."""
    return tuple(
        group.blocks_needed(num_tokens, num_tokens)
        if group.attention.kind is Kind.STATE
        else -(-num_tokens // group.block_tokens)
        for group in spec.groups
    )


def hit_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Blocks of the longest hit within ``num_tokens`` tokens: the blocks to load if all are in the host tier."""
    hit = num_tokens // spec.hit_tokens * spec.hit_tokens
    return tuple(group.blocks_needed(hit, hit) for group in spec.groups)


def stored_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Kept in the host tier of a request that ended with ``num_tokens`` tokens: its full blocks, and its anchors.

    Anchors are the blocks of two hits: on all of these tokens, and on the same tokens sent again. The second hit leaves
    the last token to be computed.
    """
    unit = spec.hit_tokens
    return tuple(
        num_tokens // group.block_tokens
        if group.attention.kind is Kind.FULL
        else len(_anchor(group, num_tokens // unit * unit) | _anchor(group, max(0, num_tokens - 1) // unit * unit))
        for group in spec.groups
    )


def _anchor(group: GroupSpec, hit: int) -> set[int]:
    """Logical blocks that a hit of ``hit`` tokens needs."""
    return set(range(group.attention.first_visible(hit) // group.block_tokens, hit // group.block_tokens))


def bytes_of(spec: CacheSpec, blocks: Sequence[int]) -> tuple[int, ...]:
    """Bytes of these blocks, per group."""
    return tuple(n * group.block_bytes for n, group in zip(blocks, spec.groups, strict=True))


def saving_factor(spec: CacheSpec, num_tokens: int) -> float:
    """Bytes if every layer kept all tokens, over the bytes that a request of ``num_tokens`` tokens holds.

    Infinite if it holds nothing: chunks alone, at a boundary.
    """
    held = sum(bytes_of(spec, held_blocks(spec, num_tokens)))
    return sum(bytes_of(spec, full_blocks(spec, num_tokens))) / held if held else math.inf


# --- many requests --------------------------------------------------------------------------------


def _slabs(layout: Layout, blocks: Sequence[int]) -> list[int]:
    """Slabs that these blocks of each group take."""
    return [-(-n // per_slab) for n, per_slab in zip(blocks, layout.per_slab.tolist(), strict=True)]


def fits(layout: Layout, blocks: Sequence[int]) -> bool:
    """Whether the pools can hold these blocks at once: a slab of a group serves no other group, full or not."""
    slabs = _slabs(layout, blocks)
    return all(n <= most for n, most in zip(slabs, layout.most_slabs.tolist(), strict=True)) and (
        sum(slabs) <= layout.num_slabs
    )


def room(layout: Layout, blocks: Sequence[int]) -> Blocks:
    """The most blocks of each group that the pools can hold beside these blocks of the other groups."""
    slabs = _slabs(layout, blocks)
    spare = layout.num_slabs - sum(slabs) if layout.shared else layout.num_slabs
    return tuple(
        max(0, min(most, spare + own)) * per_slab
        for own, most, per_slab in zip(slabs, layout.most_slabs.tolist(), layout.per_slab.tolist(), strict=True)
    )


def requests(layout: Layout, each: Sequence[int], last: Sequence[int] | None = None) -> int:
    """How many requests fit: all but one take ``each`` blocks, and one takes ``last``; requests share slabs.

    ``last`` is for the request that still has to get through its prompt (``peak_blocks``); by default it equals
    ``each``.
    """
    one = each if last is None else last
    most = int((layout.rows - 1).max())
    return _largest(lambda n: fits(layout, [(n - 1) * a + b for a, b in zip(each, one, strict=True)]), most + 1)


def longest(layout: Layout, spec: CacheSpec, step_tokens: int = 1) -> int | None:
    """Tokens of the longest request that can run alone in steps of ``step_tokens``; None if it has no limit.

    None is for models without full attention whose windows or chunks fit.
    """
    found = _largest(lambda n: fits(layout, peak_blocks(spec, n, step_tokens)), MOST_TOKENS)
    return None if found == MOST_TOKENS else found


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 0..most that fits, for a ``fits`` that turns false once; 0 always fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
