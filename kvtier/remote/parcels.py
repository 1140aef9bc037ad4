"""What goes between a host tier and the remote tier, as plain data: other processes may carry it out.

Promises   receipts of several workers add up: the worst outcome of an object counts.
Does not   know backends: ``kvtier.remote.relay`` makes parcels, and calls of a backend of them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.pools.block_pool import Ids


class Grade(IntEnum):
    """What became of an object, from well to bad."""

    OK = 0
    MISS = 1
    REFUSED = 2
    FAILED = 3


class Parcel(NamedTuple):
    """Objects to store, or to read. Block i belongs to object ``of[i]``, which ascends; arrays are int32 [n].

    ``names``: kind and key of each object. ``hosts``: 0 for a block whose bytes are read and not kept, since it is
    there already. ``namespaces``: of each host memory, 16 bytes.
    """

    ticket: int
    is_put: bool
    names: tuple[tuple[str, bytes], ...]
    groups: Ids
    hosts: Ids
    of: npt.NDArray[np.int32]
    within_s: float
    namespaces: tuple[bytes, ...] = ()


class Receipt(NamedTuple):
    """The end of a parcel, by object. ``reasons``: by position. ``seconds``: as ``Answer``'s."""

    grades: tuple[Grade, ...]
    reasons: dict[int, str]
    seconds: float = 0.0

    def both(self, other: Receipt) -> Receipt:
        """The worse of two workers' ends. If both have a reason, the reason of the worse one, or the first."""
        grades, reasons = [], dict[int, str]()
        for k, (mine, yours) in enumerate(zip(self.grades, other.grades, strict=True)):
            first, second = (self, other) if mine >= yours else (other, self)
            reason = first.reasons.get(k) or second.reasons.get(k)
            grades.append(max(mine, yours))
            if reason:
                reasons[k] = reason
        return Receipt(tuple(grades), reasons, max(self.seconds, other.seconds))
