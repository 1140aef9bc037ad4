"""The compiled loop that finds what has changed in a pool: keys that can be found now and not before, and keys that no
longer can.

Each loop that changes a block's key or mark writes the block's id to its group's log. The log says where to look, and
no more: what is there is compared with what was there. If more has changed than the log holds, all blocks are
compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import jit, prefetch
from kvtier.pools.pool_state import Col, Mark

_BASE, _LOG, _LOG_MASK = int(Col.BASE), int(Col.LOG_BASE), int(Col.LOG_MASK)
_READY = int(Mark.READY)
_U = np.uint64
_LEAST = 64
_AHEAD = 8
"""Entries of the log by which cache lines of blocks are fetched ahead."""


def room_for_changes(blocks: int) -> int:
    """Changes that a log of so many blocks holds, a power of two: an eighth to a sixteenth of them.

    A block that is compared because of the log takes some eight times as long as one of a pass over all of them. Small
    pools have room for ``_LEAST``.
    """
    return 1 << max(_LEAST, blocks // 8).bit_length() - 1


@jit
def changed_keys(
    meta: Any, blocks: Any, ring: Any, g: Any, since: Any, ready: Any, keys: Any, gone: Any, come: Any
) -> tuple[Any, Any]:
    """Writes keys of group g to ``gone`` and ``come``, uint64 [n, 2] each, and returns how many there are of each.

    ready[i], keys[i]: whether entry i of the tier could be found at the last poll, and its key then; they become those
    of now. A key that has moved to another entry is in both. If ``since`` is -1, all n blocks of the group are
    compared. Else it is the group's ``CHANGES`` at the last poll: the blocks of the n changes since then are compared.
    The log must still hold them.
    """
    log, mask = meta[g, _LOG], meta[g, _LOG_MASK]
    num_gone, num_come = 0, 0
    for k in range(len(gone)):
        i = _U(meta[g, _BASE] + k)
        if since >= 0:
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
