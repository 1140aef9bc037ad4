"""What fits: blocks and bytes of requests of a given length, and how many of them a tier holds.

Owns       the arithmetic of ``kvtier plan``, of the capacity benchmark and of their tests, over a ``CacheSpec`` alone.
Promises   blocks are counted by ``GroupSpec.blocks_needed`` and ``GroupSpec.peak_blocks``, as admission counts them.
Does not   know pools, requests or tensors; count what requests share, nor what a row keeps for an anchor to come and
           gives up when blocks are short.

"n tokens" are n tokens whose KV is written. All counts are per group, in the order of ``spec.groups``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.errors import MemoryUnavailable
from kvtier.spec import CacheSpec, GroupSpec, Kind

Blocks = tuple[int, ...]
"""Blocks per group."""

MOST_TOKENS = 2**31 - 1
"""Longest request that is looked at."""

SLAB_FRACTION = 0.005
"""A slab is at most this part of its arena (but never less than one block of every group)."""
SLAB_WASTE = 0.0025
"""Part of a slab that may be left over because a group's blocks do not divide it."""
MOST_BLOCKS_PER_SLAB = 4096
"""Of the largest kind, where slabs are not a common multiple."""
NULL_SLABS = 1
"""Slabs set aside: the null blocks of all groups are block 0, so they lie in the first one."""


# --- one request ----------------------------------------------------------------------------------


def held_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Held between two steps by a request of ``num_tokens`` tokens: what a mask can still reach.

    Full attention: all. Window: the last window_tokens - 1. Chunk: those since the chunk began, none at its boundary.
    """
    return tuple(group.blocks_needed(num_tokens, num_tokens) for group in spec.groups)


def running_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Held while such a request computes its next token; at least one block in every group."""
    return tuple(group.blocks_needed(num_tokens, num_tokens + 1) for group in spec.groups)


def peak_blocks(spec: CacheSpec, num_tokens: int, step_tokens: int = 1) -> Blocks:
    """The most held on the way to ``num_tokens`` tokens in steps of at most ``step_tokens``, wherever a step begins.

    With one token a step this is ``GroupSpec.peak_blocks``, by which a request is refused; more is what a chunk of
    prompt needs for as long as it runs.
    """
    return tuple(_peak_blocks(group, num_tokens, min(step_tokens, max(1, num_tokens))) for group in spec.groups)


def _peak_blocks(group: GroupSpec, num_tokens: int, step_tokens: int) -> int:
    least, whole = group.peak_blocks(num_tokens), -(-num_tokens // group.block_tokens)
    span, bt = group.attention.span_tokens, group.block_tokens
    if group.attention.kind is Kind.WINDOW:  # the step and the window before it, which need not begin with a block
        return max(least, min(whole, -(-(span - 1 + step_tokens + bt - 1) // bt)))
    if group.attention.kind is Kind.CHUNK:  # the step may begin at the end of a chunk
        return max(least, min(whole, -(-(span - 1 + step_tokens) // bt)))
    return whole


def full_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Blocks if every layer kept all tokens, as a cache does that does not tell attention kinds apart."""
    return tuple(-(-num_tokens // group.block_tokens) for group in spec.groups)


def hit_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """What the longest hit within ``num_tokens`` tokens consists of: what it loads if it is all in the host tier."""
    hit = num_tokens // spec.hit_tokens * spec.hit_tokens
    return tuple(group.blocks_needed(hit, hit) for group in spec.groups)


def stored_blocks(spec: CacheSpec, num_tokens: int) -> Blocks:
    """Kept in the host tier of a request that ended with ``num_tokens`` tokens: its full blocks, and its anchors.

    Anchors are what a hit on all of them needs, and what the same tokens sent again need, which leaves the last one to
    be computed.
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

    Infinite where it holds nothing: chunks alone, at a boundary.
    """
    held = sum(bytes_of(spec, held_blocks(spec, num_tokens)))
    return sum(bytes_of(spec, full_blocks(spec, num_tokens))) / held if held else math.inf


# --- many requests --------------------------------------------------------------------------------


def requests_in_blocks(usable: Sequence[int], each: Sequence[int], last: Sequence[int] | None = None) -> int:
    """How many requests fit into pools of fixed size: all but one take ``each`` blocks, and one takes ``last``.

    ``last`` is for the one that still has to get through its prompt (``peak_blocks``); by default it is as the others.
    """
    rows = list(zip(usable, each, each if last is None else last, strict=True))
    if any(one > have for have, _, one in rows):
        return 0
    return 1 + min((have - one) // other for have, other, one in rows if other)


@dataclass(frozen=True)
class Slabs:
    """The memory of one tier as its pools share it: slabs of equal size, each of one group's blocks at a time.

    ``num_slabs`` are free for blocks: the ``NULL_SLABS`` are not among them. ``per_slab[g]``: blocks of group g in one.
    """

    num_slabs: int
    slab_bytes: int
    per_slab: Blocks

    @classmethod
    def of(cls, spec: CacheSpec, num_bytes: int, setting: str) -> Slabs:
        """An arena of ``num_bytes`` bytes, cut so that blocks of every group fill a slab.

        A slab is the least common multiple of the groups' block bytes. Where that exceeds ``SLAB_FRACTION`` of the
        arena, it is the smallest number of the largest blocks of which no group wastes more than ``SLAB_WASTE``, or as
        little as possible. Raises ``MemoryUnavailable``, naming ``setting``, for less than a slab a group.
        """
        sizes = [group.block_bytes for group in spec.groups]
        slab, limit = math.lcm(*sizes), int(num_bytes * SLAB_FRACTION)
        if slab > limit:
            largest = max(sizes)
            candidates = [n * largest for n in range(1, max(1, min(limit // largest, MOST_BLOCKS_PER_SLAB)) + 1)]
            waste = {n: max(n % size for size in sizes) / n for n in candidates}
            fine = (n for n in candidates if waste[n] <= SLAB_WASTE)
            slab = next(fine, min(candidates, key=waste.__getitem__))
        least = slab * (NULL_SLABS + len(sizes))
        if num_bytes < least:
            raise MemoryUnavailable(
                f"{setting} is {num_bytes:,} bytes, but a slab for every group and one for the null blocks take "
                f"{least:,}; raise {setting}"
            )
        return cls(num_bytes // slab - NULL_SLABS, slab, tuple(slab // size for size in sizes))

    def slabs_for(self, blocks: Sequence[int]) -> int:
        """Slabs that these blocks take: a slab of a group serves no other, full or not."""
        return sum(-(-n // per_slab) for n, per_slab in zip(blocks, self.per_slab, strict=True))

    def requests(self, each: Sequence[int], last: Sequence[int] | None = None) -> int:
        """How many requests fit: all but one take ``each`` blocks, and one takes ``last``; requests share slabs."""
        one = each if last is None else last

        def fits(count: int) -> bool:
            blocks = [(count - 1) * n + m for n, m in zip(each, one, strict=True)]
            return self.slabs_for(blocks) <= self.num_slabs

        most = self.num_slabs * max(self.per_slab)
        return _largest(fits, most + 1)

    def longest(self, spec: CacheSpec, step_tokens: int = 1) -> int | None:
        """Tokens of the longest request that can run alone in steps of ``step_tokens``; None if there is no end to it.

        None is for models without full attention whose windows or chunks fit.
        """
        found = _largest(lambda n: self.slabs_for(peak_blocks(spec, n, step_tokens)) <= self.num_slabs, MOST_TOKENS)
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
