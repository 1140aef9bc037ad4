"""What a connector has counted, and what it keeps beside its transfers, as others may look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.gpu_pool.block_pool import Ids


@dataclass
class TransferCounts:
    """Counters since construction; they never fall."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
    corrupt_blocks: int = 0
    """Loaded blocks whose bytes were not those that had been stored."""
    expired: int = 0
    dropped_blocks: int = 0
    """Blocks that were not stored: the host tier had no block to give, or stores hung."""


class Books(NamedTuple):
    """What a connector keeps beside its transfers."""

    planned: tuple[int, ...]
    """Tickets of stores that wait for the link, in the order in which they will be submitted."""
    fencing: tuple[int, ...]
    """Tickets of stores that fence their source, in the order in which writers will be ordered after them."""
    store_bytes: int
    """Of stores that are submitted and have neither ended nor been given up."""
    deadline_s: float
    corrupt: tuple[tuple[Ids, Ids], ...]
    """(groups, host blocks) that are quarantined until a reset."""
    failed_loads: frozenset[int]
    """Tickets of loads that ended badly, which the scheduler has not been told of yet."""
