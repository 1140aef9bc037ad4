"""Where the blocks of every group lie in a tier's arena, and which slabs their pools exchange.

Owns       the geometry of an arena, computed once from its bytes or its numbers of blocks.
Promises   block b of group g lies at ``origins[g] + b * strides[g]``, whichever pool has its slab. A slab holds whole
           blocks of every group. No usable block touches a null block. The arena is no larger than the given size.
           Keeps I22.
Does not   know which blocks or slabs are in use.

A *shared* arena is a row of equal slabs, each cut into blocks of the group that has it. A *fixed* arena has one slab
for every group, of the given size, which is never exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.geometry.kinds import ALIGN_BYTES

Int64s = npt.NDArray[np.int64]
Seams = Sequence[tuple[int, int]]
"""(offset, bytes), ascending: where memory may be cut; from each offset on, after every ``bytes`` bytes."""

MOST_SLABS = 1024
"""The most slabs of an arena, unless blocks are larger: each pool can leave one of them half used."""
FEWEST_SLABS = 8
"""Slabs per group that an arena must have to be shared: with fewer, half-used slabs waste too much."""
LARGEST_SLAB = 1 / 200
"""Share of the arena above which a slab is too coarse, so that blocks are padded to make it smaller."""
MOST_PADDING = 1 / 16
"""Share of the smallest block that is tried as a unit of padding. The models of benchmarks/models.py, of one or two
groups, need padding of under 0.25 %. Four or six sizes of little in common may take several percent, and so may a host
tier's finer slabs."""
HIGHLY_COMPOSITE = (1, 2, 4, 6, 12, 24, 60, 120, 360, 840, 2520, 5040)
"""Multiples of these are tried as slabs: they have many divisors."""


@dataclass(frozen=True, eq=False)
class Layout:
    """G groups. All arrays are int64 [G], in blocks or bytes as documented."""

    block_bytes: Int64s
    """Bytes copied per block."""
    strides: Int64s
    """Bytes from one block to the next."""
    origins: Int64s
    """Byte offset of block 0, the null block."""
    per_slab: Int64s
    """Blocks in a slab."""
    first_slab: Int64s
    """The slab that begins with block 1."""
    most_slabs: Int64s
    """Slabs the group's pool can have."""
    num_slabs: int
    slab_bytes: int
    """0 if slabs differ in size, since they are not exchanged."""
    num_bytes: int
    spare: npt.NDArray[np.bool_]
    """Whether memory for one more block, ``rows[g]``, follows those of the pool: padded rows write there. It is in no
    pool. Those of several groups may overlap."""

    @property
    def shared(self) -> bool:
        """Whether pools exchange slabs."""
        return self.slab_bytes > 0

    @property
    def rows(self) -> Int64s:
        """Block ids of each group: the blocks of all slabs that its pool can have, and the null block."""
        rows: Int64s = self.per_slab * self.most_slabs + 1
        return rows

    @property
    def seams(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes), ascending: from each offset on, a cut after every ``bytes`` bytes splits no slab.

        If slabs are not exchanged: it splits no block.
        """
        if self.shared:
            return ((int(self.origins[0] + self.strides[0]), self.slab_bytes),)
        return tuple(zip(self.origins.tolist(), self.strides.tolist(), strict=True))

    @property
    def cell_bytes(self) -> int:
        """The greatest common divisor of all strides and origins."""
        return math.gcd(*self.strides.tolist(), *self.origins.tolist())

    def cells(self, groups: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> tuple[Int64s, Int64s]:
        """The arena's cells under blocks, and for each cell the position of its block.

        Two groups' blocks share cells if they lie in the same slab.
        """
        cell = self.cell_bytes
        sizes = self.strides[groups] // cell
        of = np.repeat(np.arange(len(blocks)), sizes)
        first = (self.origins[groups] + blocks * self.strides[groups]) // cell - (np.cumsum(sizes) - sizes)
        return first[of] + np.arange(len(of)), of

    @staticmethod
    def fixed(block_bytes: Sequence[int], blocks: Sequence[int], spare: Sequence[bool] = ()) -> Layout:
        """Separate pools: ``blocks[g]`` usable blocks of every group, side by side; no spare ones unless given."""
        sizes, per_slab = np.array(block_bytes, np.int64), np.array(blocks, np.int64)
        one_more = _spare(spare, sizes)
        ends = np.cumsum((per_slab + 1 + one_more) * sizes)
        return Layout(
            block_bytes=sizes,
            strides=sizes,
            origins=np.concatenate([[0], ends[:-1]]).astype(np.int64),
            per_slab=per_slab,
            first_slab=np.arange(len(sizes)),
            most_slabs=np.ones(len(sizes), np.int64),
            num_slabs=len(sizes),
            slab_bytes=0,
            num_bytes=int(ends[-1]),
            spare=one_more,
        )

    @staticmethod
    def of_slabs(
        block_bytes: Sequence[int], num_bytes: int, spare: Sequence[bool] = (), finer: int = 1
    ) -> Layout | None:
        """An arena of at most ``num_bytes`` whose pools exchange slabs; None if the slabs would be too coarse.

        ``finer``: about so many times as many slabs.
        """
        if num_bytes < sum(block_bytes):
            return None
        sizes = np.array(block_bytes, np.int64)
        strides, slab = _slab(sizes, num_bytes // finer)
        null = int(strides.max())  # null blocks end at the first slab: no usable block shares a byte with them
        one_more = _spare(spare, sizes)
        beside = null + int((strides * one_more).max())  # spare blocks begin where the last slab ends
        slab *= max(1, (num_bytes - beside) // (slab * MOST_SLABS * finer))
        num_slabs = (num_bytes - beside) // slab
        if num_slabs < FEWEST_SLABS * len(sizes):
            return None
        return Layout(
            block_bytes=sizes,
            strides=strides,
            origins=null - strides,
            per_slab=slab // strides,
            first_slab=np.zeros(len(sizes), np.int64),
            most_slabs=np.full(len(sizes), num_slabs),
            num_slabs=num_slabs,
            slab_bytes=slab,
            num_bytes=beside + num_slabs * slab,
            spare=one_more,
        )


def _spare(spare: Sequence[bool], sizes: Int64s) -> npt.NDArray[np.bool_]:
    return np.array(spare, np.bool_) if len(spare) else np.zeros(len(sizes), np.bool_)


def _slab(sizes: Int64s, num_bytes: int) -> tuple[Int64s, int]:
    """Strides, and the smallest slab that is a whole number of each.

    If block sizes have so little in common that it would be too large, blocks are padded. The padding chosen wastes
    least, by padding and by one slab of every pool that is not full.
    """
    slab = math.lcm(*sizes.tolist())
    if slab <= num_bytes * LARGEST_SLAB:
        return sizes, slab
    ways = [(sizes, slab), *_multiples(sizes), *_divisors(sizes, num_bytes)]
    return min(ways, key=lambda way: _wasted(sizes, way[0], way[1], num_bytes))


def _wasted(sizes: Int64s, strides: Int64s, slab: int, num_bytes: int) -> float:
    """Share of an arena that is padding, at most, or lies in slabs that are not full."""
    return float((strides / sizes).max() - 1) + len(sizes) * slab / num_bytes


def _multiples(sizes: Int64s) -> Iterator[tuple[Int64s, int]]:
    """Strides rounded up to multiples of a common unit."""
    most = int(sizes.min() * MOST_PADDING)
    for unit in range(ALIGN_BYTES, most + 1, max(1, most // ALIGN_BYTES // 512) * ALIGN_BYTES):
        strides = -(-sizes // unit) * unit
        yield strides, math.lcm(*strides.tolist())


def _divisors(sizes: Int64s, num_bytes: int) -> Iterator[tuple[Int64s, int]]:
    """Slabs with many divisors, cut into as many equal blocks as fit: for several sizes of little in common."""
    unit = max(ALIGN_BYTES, 1 << (int(sizes.min()) // 64).bit_length())
    least, most = -(-int(sizes.max()) // unit), num_bytes // (FEWEST_SLABS * len(sizes)) // unit
    step = max((n for n in HIGHLY_COMPOSITE if 64 * n <= most), default=1)
    for n in range(-(-least // step) * step, most + 1, step * max(1, most // step // 512)):
        counts = [max(d for d in _up_to(n, unit * n // size)) for size in sizes.tolist()]
        yield unit * n // np.array(counts, np.int64), unit * n


def _up_to(n: int, most: int) -> list[int]:
    """Divisors of n that are at most ``most``, which is at least 1."""
    small = [d for d in range(1, min(most, math.isqrt(n)) + 1) if n % d == 0]
    return small + [n // d for d in small if n // d <= most]
