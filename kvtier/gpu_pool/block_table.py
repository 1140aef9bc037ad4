"""Rows of the block tables: which block holds which tokens of a running request.

Owns       one row per running request in every group's table, and the request's counters that the compiled loops
           need, as flat arrays. No Python object per block and none per decode token.
Promises   an entry is a held block where the mask can look, null (0) before that and everywhere past the end. An
           entry is null from the moment its block is released. Keeps I15.
Does not   decide anything: it takes, releases and names blocks as it is told.

Entries [lo, hi) of a row are held. For a window or chunk group lo follows the mask.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier._jit import inlined, jit
from kvtier.gpu_pool.block_pool import BlockPools, Mark
from kvtier.gpu_pool.pool_loops import acquire, find, publish, release, take
from kvtier.spec import CacheSpec, Kind

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_READY = int(Mark.READY)
_WINDOW, _CHUNK = int(Kind.WINDOW), int(Kind.CHUNK)


class Phase(IntEnum):
    """What a row is doing."""

    FREE = 0
    LOADING = 1  # its loads are under way
    PREFILL = 2  # computing known tokens
    DECODE = 3  # exactly the last sampled token is still to be computed


class Geo(IntEnum):
    """Columns of ``geometry``, one row per group."""

    BLOCK_TOKENS = 0
    KIND = 1
    SPAN = 2  # window or chunk tokens
    UNITS = 3  # links of the key chain per block
    OFFSET = 4  # of the group's table in ``table``
    WIDTH = 5  # columns of the group's table


_BT, _KIND, _SPAN, _UNITS, _OFFSET, _WIDTH = (int(c) for c in Geo)


class RowArrays(NamedTuple):
    """State of all rows. G groups, M rows, u = hash_tokens."""

    geometry: Int64s  # [G, len(Geo)]
    table: Int32s  # flat; entry j of row r in group g at OFFSET[g] + r * WIDTH[g] + j
    lo: Int32s  # [G, M] first held entry
    hi: Int32s  # [G, M] end of the held entries
    computed: Int64s  # [M] tokens whose KV is written
    total: Int64s  # [M] tokens known
    limit: Int64s  # [M] tokens at which the request ends
    phase: npt.NDArray[np.uint8]  # [M] Phase
    publish: npt.NDArray[np.uint8]  # [M] 0 once a reset has outdated the row's content
    chain: npt.NDArray[np.uint64]  # [M, 2] key of the last full unit
    tail: Int32s  # [M, u] tokens since then
    last: Int32s  # [M] the newest token
    eos: Int32s  # [M, E] tokens that end the request; -1 unused
    generated: Int32s  # [M, cap] tokens sampled since the row was taken
    num_generated: Int64s  # [M]


# --- what a mask needs ----------------------------------------------------------------------------


@inlined
def first_block(geometry: Any, g: Any, position: Any) -> Any:
    """The first logical block of group g that ``position`` sees, or that a hit of ``position`` tokens needs."""
    kind, span = geometry[g, _KIND], geometry[g, _SPAN]
    first = np.int64(0)
    if kind == _WINDOW:
        first = max(np.int64(0), position - span + 1)
    elif kind == _CHUNK:
        first = position - position % span
    return first // geometry[g, _BT]


@inlined
def num_blocks(t: Any, g: Any, num_tokens: Any) -> Any:
    """Logical blocks of group g that ``num_tokens`` tokens touch."""
    bt = t.geometry[g, _BT]
    return (num_tokens + bt - 1) // bt


# --- rows -----------------------------------------------------------------------------------------


@inlined
def extend_row(p: Any, t: Any, r: Any, end: Any) -> None:
    """Takes the blocks that row r still lacks for tokens up to ``end``, in every group. The caller has checked."""
    for g in range(t.geometry.shape[0]):
        at = t.geometry[g, _OFFSET] + r * t.geometry[g, _WIDTH]
        want = num_blocks(t, g, end)
        for j in range(t.hi[g, r], want):
            t.table[at + j] = take(p, g)
        t.hi[g, r] = max(np.int64(t.hi[g, r]), want)


@inlined
def release_before(p: Any, t: Any, r: Any, position: Any) -> Any:
    """Releases what ``position`` and its successors cannot see; returns the number of blocks."""
    released = 0
    for g in range(t.geometry.shape[0]):
        stop = min(first_block(t.geometry, g, position), np.int64(t.hi[g, r]))
        at = t.geometry[g, _OFFSET] + r * t.geometry[g, _WIDTH]
        for j in range(t.lo[g, r], stop):
            release(p, g, t.table[at + j])
            t.table[at + j] = 0
            released += 1
        t.lo[g, r] = max(np.int64(t.lo[g, r]), stop)
    return released


@jit
def release_row(p: Any, t: Any, r: Any) -> None:
    """Releases everything, the end first so that it is evicted first, and clears the row."""
    for g in range(t.geometry.shape[0]):
        at = t.geometry[g, _OFFSET] + r * t.geometry[g, _WIDTH]
        for j in range(t.hi[g, r] - 1, t.lo[g, r] - 1, -1):
            release(p, g, t.table[at + j])
            t.table[at + j] = 0
        t.lo[g, r] = 0
        t.hi[g, r] = 0
    t.phase[r] = 0


@inlined
def seal_block(p: Any, t: Any, g: Any, r: Any, j: Any, lo: Any, hi: Any) -> Any:
    """Names logical block j of row r; returns the block if it is newly findable, else 0.

    If a twin is findable under the key already, the row switches to it and gives its own block back.
    """
    at = t.geometry[g, _OFFSET] + r * t.geometry[g, _WIDTH] + j
    own = np.int64(t.table[at])
    twin = np.int64(find(p, g, lo, hi))
    if twin == 0:
        publish(p, g, own, lo, hi, _READY)
        return own
    if twin != own and p.mark[p.meta[g, 0] + twin] == _READY and p.mark[p.meta[g, 0] + own] == 0:
        acquire(p, g, twin)
        release(p, g, own)
        t.table[at] = twin
    return np.int64(0)


@jit
def _seal_range(
    p: Any, t: Any, r: Any, g: Any, first: Any, end: Any, keys: Any, groups: Any, blocks: Any, named: Any
) -> Any:
    units, n = t.geometry[g, _UNITS], 0
    for j in range(max(first, np.int64(t.lo[g, r])), end):
        unit = (j + 1) * units - 1
        b = seal_block(p, t, g, r, j, keys[unit, 0], keys[unit, 1])
        if b != 0:
            groups[n] = g
            blocks[n] = b
            named[n, 0] = keys[unit, 0]
            named[n, 1] = keys[unit, 1]
            n += 1
    return n


@jit
def _set_row(p: Any, t: Any, r: Any, g: Any, first: Any, blocks: Any) -> None:
    """Writes acquired blocks into row r from logical block ``first`` on."""
    at = t.geometry[g, _OFFSET] + r * t.geometry[g, _WIDTH]
    for k in range(len(blocks)):
        t.table[at + first + k] = blocks[k]
    t.lo[g, r] = first
    t.hi[g, r] = first + len(blocks)


class Sealed(NamedTuple):
    """Blocks that became findable; parallel arrays of length n."""

    groups: Int32s
    blocks: Int32s
    keys: npt.NDArray[np.uint64]  # [n, 2]

    @staticmethod
    def join(parts: list[Sealed]) -> Sealed:
        """One list from several."""
        if not parts:
            return Sealed(np.empty(0, np.int32), np.empty(0, np.int32), np.empty((0, 2), np.uint64))
        return Sealed(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class BlockTables:
    """The rows of a scheduler over the device pools."""

    def __init__(self, spec: CacheSpec, pools: BlockPools, num_rows: int) -> None:
        self.spec = spec
        self.pools = pools
        groups, unit = spec.groups, spec.hash_tokens
        geometry = np.zeros((len(groups), len(Geo)), np.int64)
        for g, group in enumerate(groups):
            geometry[g, : Geo.OFFSET] = (
                group.block_tokens,
                group.attention.kind,
                group.attention.span_tokens,
                group.block_tokens // unit,
            )
        self.arrays = RowArrays(
            geometry=geometry,
            table=np.zeros(0, np.int32),
            lo=np.zeros((len(groups), num_rows), np.int32),
            hi=np.zeros((len(groups), num_rows), np.int32),
            computed=np.zeros(num_rows, np.int64),
            total=np.zeros(num_rows, np.int64),
            limit=np.zeros(num_rows, np.int64),
            phase=np.zeros(num_rows, np.uint8),
            publish=np.zeros(num_rows, np.uint8),
            chain=np.zeros((num_rows, 2), np.uint64),
            tail=np.zeros((num_rows, unit), np.int32),
            last=np.zeros(num_rows, np.int32),
            eos=np.full((num_rows, 1), -1, np.int32),
            generated=np.zeros((num_rows, 64), np.int32),
            num_generated=np.zeros(num_rows, np.int64),
        )
        self.num_rows = num_rows
        self._max_tokens = 0
        self.reserve(64 * spec.hit_tokens)

    def reserve(self, num_tokens: int) -> None:
        """Makes room for rows of ``num_tokens`` tokens; tables grow by doubling."""
        if num_tokens <= self._max_tokens:
            return
        self._max_tokens = max(num_tokens, 2 * self._max_tokens)
        old, geometry = self.arrays, self.arrays.geometry.copy()
        widths = -(-self._max_tokens // geometry[:, Geo.BLOCK_TOKENS]) + 1
        offsets = np.concatenate([[0], np.cumsum(widths * self.num_rows)])
        geometry[:, Geo.OFFSET] = offsets[:-1]
        geometry[:, Geo.WIDTH] = widths
        table = np.zeros(int(offsets[-1]), np.int32)
        self.arrays = old._replace(geometry=geometry, table=table)
        if old.table.size:
            for g in range(len(geometry)):
                before = self._matrix(old, g)
                self.table(g)[:, : before.shape[1]] = before

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
        return t.table[offset : offset + width * t.lo.shape[1]].reshape(t.lo.shape[1], width)

    def table(self, g: int) -> Int32s:
        """Group g's table, int32 [rows, width]; a view."""
        return self._matrix(self.arrays, g)

    def set_row(self, r: int, g: int, first: int, blocks: Int32s) -> None:
        """Row r holds ``blocks`` (already acquired) from logical block ``first`` on."""
        _set_row(self.pools.arrays, self.arrays, r, g, first, blocks)

    def extend(self, r: int, end: int) -> None:
        """Takes the blocks that row r lacks up to token ``end``."""
        self.reserve(end)
        extend_row(self.pools.arrays, self.arrays, r, end)

    def release_before(self, r: int, position: int) -> int:
        """Releases what tokens from ``position`` on cannot see; returns the number of blocks."""
        return int(release_before(self.pools.arrays, self.arrays, r, position))

    def clear(self, r: int) -> None:
        """Releases all of row r and frees it."""
        release_row(self.pools.arrays, self.arrays, r)

    def seal(self, r: int, g: int, first: int, end: int, keys: npt.NDArray[np.uint64]) -> Sealed:
        """Names logical blocks [first, end) of row r in group g; returns those that became findable."""
        n = max(0, end - first)
        out = Sealed(np.empty(n, np.int32), np.empty(n, np.int32), np.empty((n, 2), np.uint64))
        if n:
            n = int(_seal_range(self.pools.arrays, self.arrays, r, g, first, end, keys, *out))
        return Sealed(out.groups[:n], out.blocks[:n], out.keys[:n])

    def seal_anchor(self, r: int, boundary: int, keys: npt.NDArray[np.uint64]) -> list[Sealed]:
        """Names, in the window and chunk groups, the blocks that a hit of ``boundary`` tokens needs.

        ``boundary`` is a multiple of hit_tokens; blocks that the row has given up (``trim``) are left out.
        """
        parts = []
        for g, group in enumerate(self.spec.groups):
            if group.attention.kind is not Kind.FULL:
                first = group.attention.first_visible(boundary) // group.block_tokens
                parts.append(self.seal(r, g, first, boundary // group.block_tokens, keys))
        return parts
