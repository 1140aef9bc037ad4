"""The order of accesses to memory on a simulated device: vector clocks, and a witness of every missing order.

Owns       the last accesses to every cell of a tier's memory, and the names of the edges that kvtier must keep.
Promises   two accesses to one cell, one of them a write, are reported if they may happen in either order. The later
           one's clock shows what it comes after.
Does not   know how a stream has got its clock (``device``).

Order is kept as vector clocks (Fidge 1988, Mattern 1989), one component per stream. An operation comes after another if
its clock has reached the other's count in the other's stream.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.tier_memory import TierMemory

Ids = npt.NDArray[np.int32]
Clock = npt.NDArray[np.int64]
"""The progress of each stream."""

STREAMS = 6
"""Components of a vector clock: streams a device can have."""

_EDGES = {
    ("forward", "write", "store", "read"): "edge 1: last write -> store read",
    ("forward", "read", "load", "write"): "edge 2: last read -> load write",
    ("forward", "write", "load", "write"): "edge 2: last write -> load write",
    ("load", "write", "forward", "read"): "edge 3: load write -> first read",
    ("load", "write", "forward", "write"): "edge 3: load write -> next writer",
    ("store", "read", "forward", "write"): "edge 4: store read -> next writer",
    ("store", "read", "load", "write"): "edge 4: store read -> next writer",
    ("store", "write", "load", "read"): "edge 5: store write -> load read",
    ("load", "read", "store", "write"): "edge 6: load read -> next store write",
    ("store", "write", "store", "write"): "edge 7: store write -> store write",
}


class Access(NamedTuple):
    """One stream's read or write of one block."""

    stream: int
    access: str
    group: int
    block: int


def edge_between(before: tuple[str, str], after: tuple[str, str]) -> str:
    """The name of the order between two accesses, each the name of a stream and "read" or "write"."""
    return _EDGES.get((*before, *after), f"no order: {' '.join(before)} -> {' '.join(after)}")


class Witness:
    """The last accesses to each cell of a tier's memory, and whether the next access comes after them."""

    def __init__(self, tier: str, memory: TierMemory, total: int) -> None:
        self._tier = tier
        self._memory = memory
        self._writer = np.full(total, -1, np.int64)  # stream of the last write
        self._written = np.zeros(total, np.int64)  # its count there
        self._read = np.zeros((STREAMS, total), np.int64)  # count of the last read in each stream

    def touch(self, stream: int, clock: Clock, groups: Ids, blocks: Ids, writes: bool) -> list[Access]:
        """Notes an access by ``stream``, at ``clock``; returns the earlier accesses that do not come before it."""
        if len(groups) == 0:
            return []
        at, of = self._memory.cells(self._tier, groups, blocks)
        writer, found = self._writer[at], dict[Access, None]()
        for k in np.flatnonzero((writer >= 0) & (clock[writer] < self._written[at])).tolist():
            found[Access(int(writer[k]), "write", int(groups[of[k]]), int(blocks[of[k]]))] = None
        if writes:
            for s in range(STREAMS):
                for k in np.flatnonzero(self._read[s, at] > clock[s]).tolist():
                    found[Access(s, "read", int(groups[of[k]]), int(blocks[of[k]]))] = None
            self._writer[at] = stream
            self._written[at] = clock[stream]
            self._read[:, at] = 0
        else:
            self._read[stream, at] = clock[stream]
        return list(found)
