"""The state of a tier's pools: where a block can be, what its key is worth, and the arrays that say so.

Places, and what moves a block between them:

    EMPTY  --take-->  HELD  --last release-->  EMPTY (no key) | CACHED (key) | FENCED (a store still reads it)
    CACHED --take-->  HELD  (its key is forgotten)        CACHED --acquire--> HELD  (a prefix hit)
    CACHED --fence--> FENCED --acquire--> HELD            FENCED --unfence--> EMPTY | CACHED
    any    --quarantine--> QUARANTINED --restore--> EMPTY | HELD (somebody still references it)

Entry 0 of a group is the null block and at the same time the head of its list of cached blocks; entry ``rows`` is no
block but the head of its list of empty ones.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


class Place(IntEnum):
    """Where a block is; exactly one of these."""

    NULL = 0
    EMPTY = 1
    CACHED = 2
    FENCED = 3
    HELD = 4
    QUARANTINED = 5


class Mark(IntEnum):
    """What a block's key is worth."""

    NONE = 0
    PENDING = 1  # a transfer is writing the content
    READY = 2  # findable


class Col(IntEnum):
    """Columns of ``meta``, one row per group."""

    BASE = 0  # entry of block 0
    ROWS = 1  # usable blocks + 1
    EMPTY = 2
    CACHED = 3
    FENCED = 4
    QUARANTINED = 5
    INDEX_BASE = 6
    INDEX_MASK = 7
    KEYED = 8  # entries in the key index
    EVICTED = 9  # counter: cached blocks handed out
    PEAK_HELD = 10
    HELD = 11  # counted by itself, so that it can be checked against the others


class PoolArrays(NamedTuple):
    """The state of all pools of a tier. N entries: per group its blocks, the null block and one list head."""

    meta: npt.NDArray[np.int64]  # [groups, len(Col)]
    refs: npt.NDArray[np.int32]  # [N]
    place: npt.NDArray[np.uint8]  # [N] Place
    mark: npt.NDArray[np.uint8]  # [N] Mark
    key: Words  # [2 N] low and high word
    next: Ids  # [N] list links, block ids within the group
    prev: Ids  # [N]
    fence: npt.NDArray[np.int64]  # [N] ticket of the store that still reads the block; 0 none; negative: expired
    slots: Words  # the key index: open addressing, high half of the key's high word << 32 | block id; 0 empty
