"""The state of a tier's pools: the places of a block, the marks of its key, and their arrays.

Places, and the moves of a block between them:

    EMPTY  --take-->  HELD  --last release-->  EMPTY (no key) | CACHED (key) | FENCED (a store still reads it)
    CACHED --evict--> EMPTY  (its key is forgotten)       CACHED --acquire--> HELD  (a prefix hit)
    CACHED --fence--> FENCED --acquire--> HELD            FENCED --unfence--> EMPTY | CACHED
    any    --quarantine--> QUARANTINED --restore--> EMPTY | HELD (it still has references)

A block is one record of 32 bytes, so each operation on it costs one cache line. Cached blocks stand in a ring, coldest
first; a block that is hit leaves a hole. Empty blocks stand on a stack for every slab. Ids that were never handed out
since the pool got the slab are a counter, not a list.

A pool knows ids for the whole arena, but only the ids in its present slabs are its own. The records of other ids say
EMPTY and count nowhere. A slab changes hands when none of its blocks is held, fenced or quarantined.

Loops that Python calls often get arrays one by one, since a call with a record takes longer, and make the records.
Parts of loops get the records; those that need only counters or the geometry get these arrays.

Arguments of the compiled loops have these names, here and in ``gpu_pool`` and ``coordinator``. There are G groups, and
M rows of the block tables:

    p, t                                  a whole ``PoolArrays``, a whole ``RowArrays`` (``gpu_pool/row_state.py``)
    meta blocks slots ring empties slabs  the fields of ``PoolArrays``
    geometry table span state chain tail  the fields of ``RowArrays``; also eos, generated and superseded
    g, b, s                               a group, a block id of its pool, a slab; b's record is blocks[BASE[g] + b]
    r                                     a row of the block tables
    low, high                             the two words of a key
    groups, ids, keys                     blocks one by one: int32 [n], int32 [n], uint64 [n, 2]
    rows, ends                            entries of a step: int32 [n], and int64 [n], the token up to which it computes
    order                                 int32 [n], rows in service order
    skip, among                           uint8 [M], 1 for rows to leave out, 1 for rows to count
    need, later, total                    int64 [G], blocks by group: of the plan so far, of the rows still to come, of
                                          all that must fit
    secret, hit_tokens                    uint64 [2], the secret of the key chain; and an int, the unit of hits
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

BLOCK = np.dtype(
    [
        ("low", np.uint64),  # the key
        ("high", np.uint64),
        ("link", np.int32),  # CACHED: its place in the ring; FENCED: 1 if its content is superseded
        ("refs", np.int32),
        ("fence", np.int32),  # ``fence_of`` the store that still reads the block; 0 none; negative: expired
        ("place", np.uint8),
        ("mark", np.uint8),
        ("slab", np.uint16),  # the slab of the block; set once it was handed out
    ],
    align=True,
)
"""One block."""


class Place(IntEnum):
    """The place of a block; exactly one of these."""

    EMPTY = 0
    CACHED = 1
    FENCED = 2
    HELD = 3
    QUARANTINED = 4
    NULL = 5


class Mark(IntEnum):
    """The mark of a block's key."""

    NONE = 0
    PENDING = 1  # a transfer is writing the content
    READY = 2  # findable


class Col(IntEnum):
    """Columns of ``meta``, one row per group."""

    BASE = 0  # entry of block 0
    ROWS = 1  # ids: blocks of all slabs that the pool can have, and the null block
    EMPTY = 2
    CACHED = 3
    FENCED = 4
    QUARANTINED = 5
    INDEX_BASE = 6
    INDEX_MASK = 7
    KEYED = 8  # entries in the key index
    EVICTED = 9  # counter: cached blocks whose content was given up for another
    PEAK_HELD = 10
    HELD = 11  # counted separately, so that it can be checked against the others
    RING_BASE = 12
    RING_SIZE = 13  # a power of two, at least half as large again as the pool
    HEAD = 14  # the ring's coldest entry; positions only grow, entry i lies at i % RING_SIZE
    TAIL = 15  # behind its hottest entry
    CLOSED = 16  # the sweep has closed the holes before this position ...
    SWEEP = 17  # ... and comes to this one next; -1 without a sweep
    PER_SLAB = 18  # blocks in a slab
    FIRST_SLAB = 19  # the slab that begins with block 1
    MOST_SLABS = 20  # slabs that the pool can have
    SLABS = 21  # slabs that it has
    OPEN = 22  # the slab of its own that empty blocks are taken from next, -1 if it has no empty block
    STUCK = 23  # slabs of its own that cannot be emptied, since copies may still write there
    CLOCK = 24  # of the tier, in row 0: grows with every step
    UNUSED = 25  # of the tier, in row 0: the first slab that no pool has had yet
    STAMPS = 26  # where in ``ring`` the stamps of the group's entries begin
    SWEEPS = 27  # counter: sweeps of the ring that were begun
    CHANGES = 28  # counter: times that a block of the group got, lost or changed its key or mark
    LOG_BASE = 29  # where in ``ring`` the blocks of the newest of them begin ...
    LOG_MASK = 30  # ... change i's at i & LOG_MASK


class SlabCol(IntEnum):
    """Columns of ``slabs``, one row per slab."""

    OWNER = 0  # group, -1 none
    EMPTY = 1  # blocks
    CACHED = 2  # blocks
    LISTED = 3  # empty blocks in its list; the others were never handed out since the pool got the slab
    FRESH = 4  # the next id never handed out
    STAMP = 5  # the clock when a block was last cached here
    NEXT = 6  # among the pool's slabs with empty blocks, -1 at the end
    PREVIOUS = 7
    SUPERSEDED = 8  # cached blocks with superseded content
    STUCK = 9  # blocks that cannot be moved until a copy ends: PENDING, QUARANTINED, or held behind an expired fence
    FENCES = 10  # blocks that cannot be moved until a writer is ordered after the store that reads them


class PoolArrays(NamedTuple):
    """The state of all pools of a tier. N entries: block b of group g is entry BASE[g] + b."""

    meta: npt.NDArray[np.int64]  # [groups, len(Col)]
    blocks: npt.NDArray[np.void]  # [N] BLOCK
    slots: Words  # the key index: open addressing, high half of the key's high word << 32 | block id; 0 empty
    ring: Ids  # cached blocks by group, negative if superseded, 0 for a hole; stamps, one for a few entries; the log
    empties: Ids  # [N] empty blocks by slab, the last goes out first; slab s's list begins at its first block's entry
    slabs: npt.NDArray[np.int64]  # [S, len(SlabCol)]

    @property
    def refs(self) -> Ids:
        """int32 [N], a view."""
        return self.blocks["refs"]

    @property
    def fence(self) -> Ids:
        """int32 [N], a view."""
        return self.blocks["fence"]

    @property
    def place(self) -> npt.NDArray[np.uint8]:
        """``Place``, uint8 [N], a view."""
        return self.blocks["place"]

    @property
    def mark(self) -> npt.NDArray[np.uint8]:
        """``Mark``, uint8 [N], a view."""
        return self.blocks["mark"]

    @property
    def key(self) -> Words:
        """Low and high word, uint64 [N, 2], a view."""
        return self.blocks.view(np.uint64).reshape(len(self.blocks), -1)[:, :2]


def fence_of(ticket: Any) -> Any:
    """The number for a ticket in a block's record; positive. No two live transfers share one."""
    return 1 + (ticket - 1) % (2**31 - 1)
