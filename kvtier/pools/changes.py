"""The compiled loop that finds what has changed in a pool: keys that can be found now and not before, and keys that no
longer can."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import jit
from kvtier.pools.pool_state import Mark

_READY = int(Mark.READY)
_U = np.uint64


@jit
def changed_keys(blocks: Any, ready: Any, keys: Any, gone: Any, come: Any) -> Any:
    """Writes the keys to ``gone`` and ``come``, uint64 [len(blocks), 2] each, and returns how many there are of each.

    ready[i], keys[i]: whether entry i could be found at the last poll, and its key then; they become those of now. A
    key that has moved to another entry is in both.
    """
    num_gone, num_come = 0, 0
    for i in range(len(blocks)):
        block = blocks[_U(i)]
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
