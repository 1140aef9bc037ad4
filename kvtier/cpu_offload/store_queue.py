"""``StoreQueue``: planned stores, and the bytes of submitted stores.

Owns       the order of submission, and the bound on the bytes in flight.
Promises   a store is due only while fewer bytes than the bound are under way. So a load never waits behind all stores
           of a long prompt.
Does not   submit: the ``Connector`` does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.engines import CopyEngine
from kvtier.cpu_offload.transfer import Transfer

STORE_BYTES_IN_FLIGHT = 256 << 20
"""Submitted stores: far under a second of a memory copy, and enough for an engine that has not measured its link."""
STORE_S_IN_FLIGHT = 0.05
"""The same on a measured link, if that is more: about a step, after which the next ones follow."""
STORE_BYTES_PER_TRANSFER = 32 << 20


class StoreQueue:
    """Stores on the link of ``engine``, oldest first."""

    def __init__(self, engine: CopyEngine | None) -> None:
        self.planned: deque[Transfer] = deque()
        self.num_bytes = 0
        """Bytes of stores that are submitted, and have neither ended nor been given up."""
        self.most_in_flight = _most_in_flight(engine)
        self.most_a_transfer = STORE_BYTES_PER_TRANSFER

    @property
    def is_due(self) -> bool:
        """Whether the oldest planned store may be submitted now."""
        return bool(self.planned) and self.num_bytes < self.most_in_flight

    def parts(self, sizes: npt.NDArray[np.int64]) -> Iterator[tuple[slice, int]]:
        """Blocks of these sizes, int64 [n], as transfers: (blocks, bytes). One block at least in each."""
        done = np.cumsum(sizes)
        start, before = 0, 0
        while start < len(sizes):
            end = len(sizes)
            if done[-1] - before > self.most_a_transfer:
                end = max(start + 1, int(np.searchsorted(done, before + self.most_a_transfer, side="right")))
            yield slice(start, end), int(done[end - 1]) - before
            start, before = end, int(done[end - 1])


def _most_in_flight(engine: CopyEngine | None) -> int:
    """While fewer bytes of stores than this are under way, the next one is submitted."""
    told = None if engine is None else engine.link_stats()
    gbps = 0.0 if told is None or told.store_gbps is None else told.store_gbps
    return max(STORE_BYTES_IN_FLIGHT, int(STORE_S_IN_FLIGHT * gbps * 1e9) if math.isfinite(gbps) else 0)
