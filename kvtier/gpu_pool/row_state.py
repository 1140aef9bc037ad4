"""The state of the block tables' rows, what a mask needs of them, and where a row lies.

Promises   a window's or a chunk's first block is computed in one place, for planning, release and export alike.
Does not   change anything.

``pools.pool_state`` says what the loops' arguments are.

Entries [lo, hi) of a row are held. For a window or chunk group lo follows the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.geometry.kinds import Kind
from kvtier.machine.loops.jit import inlined

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_WINDOW, _CHUNK, _STATE = int(Kind.WINDOW), int(Kind.CHUNK), int(Kind.STATE)
PARTINGS = 4
"""Boundaries ahead of a row at which the next step keeps its state, beside the last one."""
HELD = 2
"""Columns of ``span`` before those of partings."""


class Phase(IntEnum):
    """The phase of a row."""

    FREE = 0
    LOADING = 1  # its loads are under way
    FRESH = 2  # computing known tokens, and has computed none since it was admitted; it cannot be preempted
    PREFILL = 3  # computing known tokens
    DECODE = 4  # exactly the last sampled token is still to be computed


class Publish(IntEnum):
    """What becomes of a row's full blocks."""

    OUTDATED = 0  # a reset has outdated its content
    TOLD = 1  # others find them, and stores may be planned
    UNTOLD = 2  # others find them


class Geo(IntEnum):
    """Columns of ``geometry``, one row per group."""

    BLOCK_TOKENS = 0
    KIND = 1
    SPAN = 2  # window or chunk tokens
    UNITS = 3  # links of the key chain per block
    OFFSET = 4  # of the group's table in ``table``
    WIDTH = 5  # columns of the group's table


_BT, _KIND, _SPAN = int(Geo.BLOCK_TOKENS), int(Geo.KIND), int(Geo.SPAN)
_OFFSET, _WIDTH = int(Geo.OFFSET), int(Geo.WIDTH)


def geometry_of(groups: Sequence[Any], hash_tokens: int) -> Int64s:
    """The ``geometry`` of groups with an attention and block_tokens, int64 [G, len(Geo)]; OFFSET and WIDTH are 0."""
    geometry = np.zeros((len(groups), len(Geo)), np.int64)
    for g, group in enumerate(groups):
        units = group.block_tokens // hash_tokens
        geometry[g, :_OFFSET] = group.block_tokens, group.attention.kind, group.attention.span_tokens, units
    return geometry


class RowCol(IntEnum):
    """Columns of ``state``, one row per row of the tables: a step reads one cache line per request."""

    COMPUTED = 0  # tokens whose KV is written
    TOTAL = 1  # tokens known
    LIMIT = 2  # tokens at which the request ends
    GENERATED = 3  # tokens sampled since the row was taken
    LAST = 4  # the newest token
    PHASE = 5
    PUBLISH = 6  # ``Publish``
    VERSION = 7  # grows when an entry of the row's tables becomes another block


class RowArrays(NamedTuple):
    """State of all rows. G groups, M rows, u = hash_tokens."""

    geometry: Int64s  # [G, len(Geo)]
    table: Int32s  # flat; entry j of row r in group g at OFFSET[g] + r * WIDTH[g] + j
    span: Int32s  # [M, G, 2] first held entry and end of the held entries; with states [M, G, 2 + PARTINGS], and in the
    # further columns of their groups, ascending, the ends of blocks to keep on the way; 0 unused
    state: Int64s  # [M, len(RowCol)]
    chain: npt.NDArray[np.uint64]  # [M, 2] key of the last full unit
    tail: Int32s  # [M, u] tokens since then
    eos: Int32s  # [M, E] tokens that end the request; -1 unused
    generated: Int32s  # [M, cap] tokens sampled since the row was taken
    superseded: Int64s  # [M, 3] tokens: from .. to; no other request is known to want the windows' content. From the
    # third on, nobody is known to want that of full groups either

    # Views by name, for callers in Python.

    @property
    def lo(self) -> Int32s:
        """First held entry, int32 [G, M]."""
        return self.span[:, :, 0].T

    @property
    def hi(self) -> Int32s:
        """End of the held entries, int32 [G, M]."""
        return self.span[:, :, 1].T

    @property
    def computed(self) -> Int64s:
        """Tokens whose KV is written, int64 [M]."""
        return self.state[:, RowCol.COMPUTED]

    @property
    def total(self) -> Int64s:
        """Tokens known, int64 [M]."""
        return self.state[:, RowCol.TOTAL]

    @property
    def limit(self) -> Int64s:
        """Tokens at which the request ends, int64 [M]."""
        return self.state[:, RowCol.LIMIT]

    @property
    def num_generated(self) -> Int64s:
        """Tokens sampled since the row was taken, int64 [M]."""
        return self.state[:, RowCol.GENERATED]

    @property
    def last(self) -> Int64s:
        """The newest token, int64 [M]."""
        return self.state[:, RowCol.LAST]

    @property
    def phase(self) -> Int64s:
        """``Phase``, int64 [M]."""
        return self.state[:, RowCol.PHASE]

    @property
    def publish(self) -> Int64s:
        """``Publish``, int64 [M]."""
        return self.state[:, RowCol.PUBLISH]


# --- what a mask needs ----------------------------------------------------------------------------


@inlined
def first_position(geometry: Any, g: Any, position: Any) -> Any:
    """The first token of group g that ``position`` sees, or that a hit of ``position`` tokens needs."""
    kind, span = geometry[g, _KIND], geometry[g, _SPAN]
    if kind == _WINDOW or kind == _STATE:  # noqa: SIM109 - numba
        return max(np.int64(0), position - span + 1)
    if kind == _CHUNK:
        return position - position % span
    return np.int64(0)


@inlined
def first_block(geometry: Any, g: Any, position: Any) -> Any:
    """The logical block of ``first_position``."""
    return first_position(geometry, g, position) // geometry[g, _BT]


@inlined
def first_block_from(geometry: Any, g: Any, position: Any, lo: Any) -> Any:
    """``first_block``, known to be at least ``lo``, and a block or two from it in a row that decodes: no division."""
    first, bt = first_position(geometry, g, position), geometry[g, _BT]
    if (lo + 4) * bt <= first:
        return first // bt
    j = np.int64(lo)
    while (j + 1) * bt <= first:
        j += 1
    return j


@inlined
def num_blocks(geometry: Any, g: Any, num_tokens: Any) -> Any:
    """Logical blocks of group g that ``num_tokens`` tokens touch."""
    bt = geometry[g, _BT]
    return (num_tokens + bt - 1) // bt


@inlined
def _partings(span: Any, g: Any, r: Any, want: Any) -> Any:
    """States of group g, before the last two of ``want``, that row r keeps since prompts part there."""
    found = np.int64(0)
    for c in range(HELD, span.shape[2]):
        found += span[r, g, 1] < span[r, g, c] and span[r, g, c] <= want - 2
    return found


@inlined
def takes(geometry: Any, span: Any, g: Any, r: Any, want: Any) -> Any:
    """Blocks of group g that row r takes to have ``want`` logical blocks, which are more than it has.

    Of states: the last two, and those where prompts part. The others are gaps.
    """
    if geometry[g, _KIND] != _STATE:
        return want - span[r, g, 1]
    return min(want - span[r, g, 1], np.int64(2)) + _partings(span, g, r, want)


# --- rows -----------------------------------------------------------------------------------------


@inlined
def row_at(geometry: Any, g: Any, r: Any) -> Any:
    """The place in the flat table at which row r of group g begins."""
    return geometry[g, _OFFSET] + r * geometry[g, _WIDTH]
