"""Rows of the block tables: which block holds which tokens of a running request.

Owns       one row per running request in every group's table, and the counters that the compiled loops need, as flat
           arrays. No Python object per block and none per decode token.
Promises   an entry is a held block if the mask can look there, null (0) before that and everywhere past the end. An
           entry is null from the moment its block is released. Keeps I15.
Does not   decide anything: it takes, releases and names blocks for its callers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from kvtier.gpu_pool.row_state import (
    HELD,
    PARTINGS,
    Geo,
    Int32s,
    Int64s,
    RowArrays,
    RowCol,
    first_block,
    geometry_of,
    num_blocks,
    row_at,
    takes,
)
from kvtier.gpu_pool.seals import Sealed, seal_range
from kvtier.machine.loops import aligned
from kvtier.machine.loops.jit import inlined, jit, prefetch
from kvtier.pools.block_pool import BlockPools
from kvtier.pools.pool_loops import AHEAD, make_empty, release, release_run, take
from kvtier.pools.pool_state import Col, PoolArrays

_BASE, _MOST_SLABS = int(Col.BASE), int(Col.MOST_SLABS)
_KIND, _FULL, _STATE = int(Geo.KIND), int(Kind.FULL), int(Kind.STATE)
_BT, _PHASE, _VERSION = int(Geo.BLOCK_TOKENS), int(RowCol.PHASE), int(RowCol.VERSION)
_U = np.uint64

FIRST_UNITS, FIRST_SAMPLED = 64, 64
"""Initial room of a row: tokens, in units of ``hit_tokens`` but no more than the pools hold, and sampled tokens."""


@inlined
def extend_group(p: Any, t: Any, g: Any, r: Any, want: Any) -> None:
    """Row r takes the blocks of group g that it lacks to have ``want``; ``make_empty`` has been called."""
    span, table, held = t.span, t.table, np.int64(t.span[r, g, 1])
    if want > held:
        at, near = row_at(t.geometry, g, r) + held, np.int64(-1)
        if p.meta[g, _MOST_SLABS] > 1 and held > span[r, g, 0]:  # a request's blocks lie together, and leave together
            near = np.int64(p.blocks[_U(p.meta[g, _BASE] + table[_U(at - 1)])].slab)
        n = takes(t.geometry, span, g, r, want)
        take(p, g, table, at, n, near)
        if n < want - held:
            _spread(t, g, r, held, want, n)
        span[r, g, 1] = want


@inlined
def _spread(t: Any, g: Any, r: Any, held: Any, want: Any, n: Any) -> None:
    """Row r has taken n states, which lie from entry ``held`` on: puts them to their places, the last one first.

    These are the last two of ``want`` entries, and the partings before them. What is between them is null.
    """
    at, table = row_at(t.geometry, g, r), t.table
    source, place, c = held + n - 1, want - 1, t.span.shape[2] - 1
    while source >= held:
        b = table[_U(at + source)]
        table[_U(at + source)] = 0
        table[_U(at + place)] = b
        source -= 1
        if place == want - 1:
            place -= 1
        else:
            while c >= HELD and not (held < t.span[r, g, c] <= want - 2):
                c -= 1
            place = np.int64(t.span[r, g, c]) - 1
            c -= 1


@jit
def extend_row(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    geometry: Any, table: Any, span: Any, state: Any, chain: Any, tail: Any, eos: Any, generated: Any, superseded: Any,
    r: Any, end: Any,
) -> None:
    """Takes the blocks that row r still lacks for tokens up to ``end``, in every group. The caller has checked."""
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    t = RowArrays(geometry, table, span, state, chain, tail, eos, generated, superseded)
    for g in range(len(geometry)):
        want = num_blocks(geometry, g, end)
        if want > span[r, g, 1]:
            make_empty(p, g, takes(geometry, span, g, r, want))
            extend_group(p, t, g, r, want)


@inlined
def release_span(p: Any, t: Any, g: Any, r: Any, stop: Any) -> Any:
    """Releases row r's blocks of group g before logical block ``stop``; returns their number.

    Content in ``superseded``, which only this row is known to have wanted, is given up first.
    """
    span = t.span
    first, end = np.int64(span[r, g, 0]), min(stop, np.int64(span[r, g, 1]))
    if end <= first:
        return np.int64(0)
    at, bt, j = row_at(t.geometry, g, r), t.geometry[g, _BT], first
    for piece in range(3):  # before it, within, after it
        stop = min(end, t.superseded[r, piece] // bt) if piece < 2 else end
        if stop > j:
            release_run(p, g, t.table, at + j, stop - j, piece == 1)
            j = stop
    span[r, g, 0] = end
    return end - first


@jit
def release_before(p: Any, t: Any, r: Any, position: Any) -> Any:
    """Releases blocks that ``position`` and its successors cannot see; returns the number of blocks."""
    released = 0
    for g in range(len(t.geometry)):
        released += release_span(p, t, g, r, first_block(t.geometry, g, position))
    return released


@jit
def release_row(
    meta: Any, blocks: Any, slots: Any, ring: Any, empties: Any, slabs: Any,
    geometry: Any, table: Any, span: Any, state: Any, superseded: Any, r: Any,
) -> None:
    """Releases everything, the end first so that it is evicted first, and clears the row.

    Content in ``superseded`` is given up before all other.
    """
    p = PoolArrays(meta, blocks, slots, ring, empties, slabs)
    for g in range(len(geometry)):
        at, first, bt = row_at(geometry, g, r), np.int64(span[r, g, 0]), geometry[g, _BT]
        cold, stop = superseded[r, 0] // bt, superseded[r, 1] // bt
        if geometry[g, _KIND] == _FULL:
            cold, stop = superseded[r, 2] // bt, np.int64(span[r, g, 1])
        for j in range(np.int64(span[r, g, 1]) - 1, first - 1, -1):
            prefetch(blocks, _U(meta[g, _BASE] + table[_U(at + max(first, j - AHEAD))]))
            if table[_U(at + j)] == 0:  # a gap between states
                continue
            release(p, g, np.int64(table[_U(at + j)]), cold <= j < stop)
            table[_U(at + j)] = 0
        for c in range(span.shape[2]):
            span[r, g, c] = 0
    state[r, _PHASE] = 0
    state[r, _VERSION] += 1


@jit
def _set_row(geometry: Any, table: Any, span: Any, state: Any, r: Any, first: Any, counts: Any, blocks: Any) -> None:
    """Writes acquired blocks, counts[g] of each group g, into row r from logical block first[g] on."""
    k = 0
    for g in range(len(geometry)):
        at = row_at(geometry, g, r) + first[g]
        for i in range(counts[g]):
            table[_U(at + i)] = blocks[k]
            k += 1
        span[r, g, 0] = first[g]
        span[r, g, 1] = first[g] + counts[g]
    state[r, _VERSION] += 1


class BlockTables:
    """The rows of a scheduler over the device pools."""

    def __init__(self, spec: CacheSpec, pools: BlockPools, num_rows: int) -> None:
        self.spec = spec
        self.pools = pools
        self.state_groups = [g for g, group in enumerate(spec.groups) if group.attention.kind is Kind.STATE]
        """The groups that keep states."""
        self.use_rows(num_rows)

    @property
    def has_states(self) -> bool:
        """Whether a group keeps states."""
        return bool(self.state_groups)

    def use_rows(self, num_rows: int) -> None:
        """From now on there are ``num_rows`` rows, all free; none is held. Raises ``MemoryError``: nothing changed."""
        groups, unit = self.spec.groups, self.spec.hash_tokens
        arrays = RowArrays(
            geometry=geometry_of(groups, unit),
            table=np.zeros(0, np.int32),
            span=aligned.zeros((num_rows, len(groups), HELD + (PARTINGS if self.has_states else 0)), np.int32),
            state=aligned.zeros((num_rows, len(RowCol)), np.int64),
            chain=np.zeros((num_rows, 2), np.uint64),
            tail=aligned.zeros((num_rows, unit), np.int32),
            eos=np.full((num_rows, 1), -1, np.int32),
            generated=np.zeros((num_rows, FIRST_SAMPLED), np.int32),
            superseded=np.zeros((num_rows, 3), np.int64),
        )
        most = max(int(n) * group.block_tokens for n, group in zip(self.pools.usable, groups, strict=True))
        tokens = min(FIRST_UNITS * self.spec.hit_tokens, most)
        self.arrays = self._with_room(arrays, tokens)
        self._max_tokens = tokens
        self.num_rows = num_rows
        self.sealed = Sealed()
        """The blocks that ``seal`` has named."""

    def reserve(self, num_tokens: int) -> None:
        """Makes room for rows of ``num_tokens`` tokens; tables grow by doubling."""
        if num_tokens <= self._max_tokens:
            return
        tokens = max(num_tokens, 2 * self._max_tokens)
        self.arrays = self._with_room(self.arrays, tokens)
        self._max_tokens = tokens

    @classmethod
    def _with_room(cls, old: RowArrays, num_tokens: int) -> RowArrays:
        """The same rows in wider tables: each has room for ``num_tokens`` tokens."""
        geometry = old.geometry.copy()
        widths = -(-num_tokens // geometry[:, Geo.BLOCK_TOKENS]) + 1
        offsets = np.concatenate([[0], np.cumsum(widths * len(old.state))])
        geometry[:, Geo.OFFSET] = offsets[:-1]
        geometry[:, Geo.WIDTH] = widths
        new = old._replace(geometry=geometry, table=np.zeros(int(offsets[-1]), np.int32))
        if old.table.size:
            for g in range(len(geometry)):
                before = cls._matrix(old, g)
                cls._matrix(new, g)[:, : before.shape[1]] = before
        return new

    def reserve_generated(self, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` sampled tokens per row; grows by doubling."""
        generated = self.arrays.generated
        if num_tokens > generated.shape[1]:
            wider = np.zeros((self.num_rows, max(num_tokens, 2 * generated.shape[1])), np.int32)
            wider[:, : generated.shape[1]] = generated
            self.arrays = self.arrays._replace(generated=wider)

    def set_eos(self, r: int, eos: tuple[int, ...]) -> None:
        """The tokens that end row r's request."""
        if len(eos) > self.arrays.eos.shape[1]:
            wider = np.full((self.num_rows, len(eos)), -1, np.int32)
            wider[:, : self.arrays.eos.shape[1]] = self.arrays.eos
            self.arrays = self.arrays._replace(eos=wider)
        self.arrays.eos[r] = -1
        self.arrays.eos[r, : len(eos)] = eos

    @staticmethod
    def _matrix(t: RowArrays, g: int) -> Int32s:
        offset, width = int(t.geometry[g, Geo.OFFSET]), int(t.geometry[g, Geo.WIDTH])
        return t.table[offset : offset + width * len(t.state)].reshape(len(t.state), width)

    def table(self, g: int) -> Int32s:
        """Group g's table, int32 [rows, width]; a view."""
        return self._matrix(self.arrays, g)

    def set_row(self, r: int, first: Int64s, counts: Int64s, blocks: Int32s) -> None:
        """Row r holds ``blocks`` (already acquired): counts[g] of each group g, from logical block first[g] on."""
        t = self.arrays
        _set_row(t.geometry, t.table, t.span, t.state, r, first, counts, blocks)

    def extend(self, r: int, end: int) -> None:
        """Takes the blocks that row r lacks up to token ``end``."""
        self.reserve(end)
        extend_row(*self.pools.arrays, *self.arrays, r, end)

    def release_before(self, r: int, position: int) -> int:
        """Releases blocks that tokens from ``position`` on cannot see; returns the number of blocks."""
        return int(release_before(self.pools.arrays, self.arrays, r, position))

    def freed_before(self, r: int, position: int) -> npt.NDArray[np.int64]:
        """Blocks by group, int64 [groups], that ``release_before`` would free: blocks that no other row holds."""
        t, p = self.arrays, self.pools.arrays
        freed = np.zeros(len(self.spec.groups), np.int64)
        for g, group in enumerate(self.spec.groups):
            kept = self.table(g)[r, t.lo[g, r] : group.attention.first_visible(position) // group.block_tokens]
            freed[g] = (p.refs[p.meta[g, Col.BASE] + kept[kept > 0]] == 1).sum()
        return freed

    def lacked(self, rows: Int32s, ends: Int64s) -> Int64s:
        """Blocks by group, int64 [groups], that these rows take to have tokens up to ``ends``."""
        t = self.arrays
        held = t.hi[:, rows].astype(np.int64)
        want = np.maximum(held, -(-ends // t.geometry[:, Geo.BLOCK_TOKENS, None]))
        more = want - held
        for g in self.state_groups:
            kept = t.span[rows, g, HELD:]
            kept_here = ((kept > held[g][:, None]) & (kept <= want[g][:, None] - 2)).sum(1)
            more[g] = np.minimum(more[g], 2) + kept_here
        lacked: Int64s = more.sum(1)
        return lacked

    def set_partings(self, r: int, boundaries: Iterable[int]) -> None:
        """From now on row r's steps keep its states at the first few of these boundaries, multiples of hit_tokens."""
        ahead = sorted(n for n in boundaries if n > self.arrays.computed[r])[:PARTINGS]
        ends = np.array(ahead, np.int64) // self.spec.hit_tokens
        for g in self.state_groups:
            self.arrays.span[r, g, HELD:] = 0
            self.arrays.span[r, g, HELD : HELD + len(ends)] = ends

    def gaps(self, r: int, boundary: int) -> list[int]:
        """The groups of states in which row r's step passes this boundary without a block for it."""
        t, j = self.arrays, boundary // self.spec.hit_tokens - 1
        return [g for g in self.state_groups if t.lo[g, r] <= j < t.hi[g, r] and self.table(g)[r, j] == 0]

    def fill_gap(self, r: int, g: int, boundary: int, block: int) -> None:
        """Row r keeps its state at this boundary, one of ``gaps``, in this block, which was taken for it."""
        self.table(g)[r, boundary // self.spec.hit_tokens - 1] = block
        self.arrays.state[r, RowCol.VERSION] += 1

    def clear(self, r: int) -> None:
        """Releases all of row r and frees it."""
        t = self.arrays
        release_row(*self.pools.arrays, t.geometry, t.table, t.span, t.state, t.superseded, r)

    def seal(
        self, r: int, g: int, first: int, end: int, keys: npt.NDArray[np.uint64], is_told: bool = True
    ) -> None:
        """Names logical blocks [first, end) of row r in group g; newly findable blocks go to ``sealed``, if it
        ``is_told``."""
        if end > first:
            sealed = self.sealed
            if sealed.count + end - first > sealed.room:
                sealed.reserve(end - first)
            arrays = *self.pools.arrays, *self.arrays
            count = seal_range(*arrays, r, g, first, end, keys, sealed.count, *sealed.arrays)
            sealed.count = count if is_told else sealed.count

    def seal_anchors(self, r: int, boundaries: Iterable[int], keys: npt.NDArray[np.uint64]) -> None:
        """Names, in the window and chunk groups, the blocks that hits of these numbers of tokens need.

        ``boundaries`` are multiples of hit_tokens; blocks that the row has given up (``trim``) are left out.
        """
        for g, group in enumerate(self.spec.groups):
            if group.attention.kind is Kind.FULL:
                continue
            done = 0
            for boundary in sorted(boundaries):
                first, end = (
                    group.attention.first_visible(boundary) // group.block_tokens,
                    boundary // group.block_tokens,
                )
                if end > max(first, done):
                    self.seal(r, g, max(first, done), end, keys)
                    done = end
