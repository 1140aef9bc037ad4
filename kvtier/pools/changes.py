"""The compiled loop that finds what has changed in a pool: the entries that can be found now and not before, or no
longer, or by another key."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import jit
from kvtier.pools.pool_state import Mark

_READY = int(Mark.READY)
_U = np.uint64


@jit
def changed_entries(blocks: Any, ready: Any, keys: Any, out: Any) -> Any:
    """Writes the changed entries to ``out`` and returns their number.

    ready[i], keys[i]: the state of entry i at the last poll.
    """
    n = 0
    for i in range(len(blocks)):
        block = blocks[_U(i)]
        is_ready = block.mark == _READY
        if is_ready != ready[i] or (is_ready and (block.low != keys[i, 0] or block.high != keys[i, 1])):
            out[n] = i
            n += 1
    return n
