"""A connector's counters, and the books beside its transfers, for statistics and audits."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtier.machine.stats import LATENCY_BOUNDS_S, LatencyStats
from kvtier.pools.block_pool import Ids


@dataclass
class TransferCounts:
    """Counters since construction; they never fall."""

    stores: int = 0
    loads: int = 0
    """Transfers that ended, well or not, including transfers that ended after they were given up."""
    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    failed_store_blocks: int = 0
    failed_load_blocks: int = 0
    corrupt_blocks: int = 0
    """Loaded blocks whose bytes were not the stored bytes."""
    expired: int = 0
    dropped_blocks: int = 0
    """Blocks that were not stored: the host tier had no block to give, or stores hung."""


class Latencies:
    """Seconds from a transfer's submission until its end was seen, of one direction; only transfers that went well."""

    def __init__(self) -> None:
        self.counts = np.zeros(len(LATENCY_BOUNDS_S) + 1, np.int64)
        """Entry i counts latencies up to bound i; the last entry counts all longer ones."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Counts one more."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def stats(self) -> LatencyStats:
        """A snapshot."""
        return LatencyStats(LATENCY_BOUNDS_S, tuple(self.counts.tolist()), self.sum_s)


class Books(NamedTuple):
    """The books beside a connector's transfers."""

    planned: tuple[int, ...]
    """Tickets of stores that wait for the link, in the order of their coming submission."""
    fencing: tuple[int, ...]
    """Tickets of stores that fence their source, in the order in which writers will be ordered after them."""
    store_bytes: int
    """Bytes of stores that are submitted and have neither ended nor been given up."""
    deadline_s: float
    corrupt: tuple[tuple[Ids, Ids], ...]
    """(groups, host blocks) that are quarantined until a reset."""
    failed_loads: frozenset[int]
    """Tickets of loads that ended badly, which were not reported to the scheduler yet."""
