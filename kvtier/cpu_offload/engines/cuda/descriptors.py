"""From blocks to copies: addresses of a transfer's blocks, as few and as long copies as they allow.

Promises   the copies together move exactly the bytes of the blocks, each byte once. Blocks that are neighbours on both
           sides become one copy, in ascending or descending order. No copy touches two pieces of registered host
           memory. Keeps I29.
Does not   sort: blocks that allocators hand out together lie in runs already.

A copy costs the CPU about a microsecond, and the driver never merges neighbours. So merging is worth more than anything
else about a submission.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.machine.loops.jit import jit

Addresses = npt.NDArray[np.uint64]


class Copies(NamedTuple):
    """Copy k moves ``sizes[k]`` bytes from address ``src[k]`` to ``dst[k]``; uint64 [n], C-contiguous."""

    dst: Addresses
    src: Addresses
    sizes: Addresses


@jit
def _merge(dst: Any, src: Any, sizes: Any, host: Any, starts: Any, out_dst: Any, out_src: Any, out_sizes: Any) -> int:
    """Merges neighbours and cuts at ``starts``, ascending host addresses; returns the number of copies.

    ``host`` is ``dst`` or ``src``. Stops if the copies do not fit: then the number is larger than the room.
    """
    room, count, k = len(out_dst), 0, 0
    while k < len(dst):
        d, s, at, n = dst[k], src[k], host[k], sizes[k]
        k += 1
        while k < len(dst):
            if dst[k] == d + n and src[k] == s + n:
                n += sizes[k]
            elif dst[k] + sizes[k] == d and src[k] + sizes[k] == s:
                d, s, at, n = dst[k], src[k], host[k], n + sizes[k]
            else:
                break
            k += 1
        piece = np.searchsorted(starts, at, side="right")  # the first start beyond the copy's own beginning
        while n > 0:
            part = n
            if piece < len(starts) and starts[piece] - at < n:
                part = starts[piece] - at
            if count < room:
                out_dst[count], out_src[count], out_sizes[count] = d, s, part
            count += 1
            piece += 1
            d, s, at, n = d + part, s + part, at + part, n - part
    return count


def coalesce(dst: Addresses, src: Addresses, sizes: Addresses, host_is_dst: bool, starts: Addresses) -> Copies:
    """The copies of these blocks; uint64 [n] each. ``starts``: the first address of each piece of registered host
    memory.

    No two blocks overlap on either side.
    """
    room = len(dst) + len(starts)
    out = np.empty((3, room), np.uint64)
    count = _merge(dst, src, sizes, dst if host_is_dst else src, starts, out[0], out[1], out[2])
    return Copies(out[0, :count], out[1, :count], out[2, :count])
