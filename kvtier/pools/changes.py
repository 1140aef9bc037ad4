"""The compiled loop that finds what has changed in a pool: keys that can be found now and not before, and keys that no
longer can.

Each loop that names a block, or takes its name, writes the block's id to its group's log. The log says where to look,
and no more: what is there is compared with what was there. If more has changed than the log holds, all blocks are
compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import jit, prefetch
from kvtier.pools.pool_state import Col, Mark

_BASE, _ROWS, _CHANGES = int(Col.BASE), int(Col.ROWS), int(Col.CHANGES)
_LOG, _LOG_MASK = int(Col.LOG_BASE), int(Col.LOG_MASK)
_READY = int(Mark.READY)
_U = np.uint64
_LEAST = 64
_AHEAD = 8


def room_for_changes(blocks: int) -> int:
    """Changes that a log of so many blocks holds, a power of two: an eighth to a sixteenth of them.

    A block that is compared because of the log takes some eight times as long as one of a pass over all of them.
    """
    return max(_LEAST, 1 << (blocks // 8).bit_length() - 1) if blocks >= 8 else _LEAST


@jit
def changed_keys(
    meta: Any, blocks: Any, ring: Any, g: Any, since: Any, ready: Any, keys: Any, gone: Any, come: Any
) -> tuple[Any, Any]:
    """Writes keys of group g to ``gone`` and ``come``, uint64 [n, 2] each, and returns how many there are of each.

    ready[i], keys[i]: whether entry i of the tier could be found at the last poll, and its key then; they become those
    of now. A key that has moved to another entry is in both. ``since``: the group's ``CHANGES`` then; -1: all blocks
    are compared, as if more had changed than the log holds. n: as many as are compared.
    """
    count, log, mask = meta[g, _CHANGES] - since, meta[g, _LOG], meta[g, _LOG_MASK]
    is_all = since < 0 or count > mask + 1
    if is_all:
        count = meta[g, _ROWS]
    num_gone, num_come = 0, 0
    for k in range(count):
        i = _U(meta[g, _BASE] + k)
        if not is_all:
            i = _U(meta[g, _BASE] + ring[_U(log + ((since + k) & mask))])
            prefetch(blocks, _U(meta[g, _BASE] + ring[_U(log + ((since + k + _AHEAD) & mask))]))
        block = blocks[i]
        is_ready = block.mark == _READY
        if is_ready != ready[i] or (is_ready and (block.low != keys[i, 0] or block.high != keys[i, 1])):
            if ready[i]:
                gone[num_gone, 0], gone[num_gone, 1] = keys[i, 0], keys[i, 1]
                num_gone += 1
            if is_ready:
                come[num_come, 0], come[num_come, 1] = block.low, block.high
                num_come += 1
            ready[i], keys[i, 0], keys[i, 1] = is_ready, block.low, block.high
    return num_gone, num_come
