"""What is under way between the host tier and a remote: spills, fetches, and questions.

Promises   one object with one lifetime holds its pins. Each move ends exactly once, by the machine of states that
           transfers between device and host have. Keeps I18.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.transfer import MOVES, TransferState
from kvtier.machine.errors import TransferError
from kvtier.pools.block_pool import Ids, Words
from kvtier.remote.objects import Objects

Bytes = npt.NDArray[np.int64]


class Way(Enum):
    """Spill: host to remote. Fetch: remote to host."""

    SPILL = "spill"
    FETCH = "fetch"


@dataclass(eq=False)
class Move:
    """One call: objects, and the host blocks that it reads or writes, one reference each; int32 [n]."""

    ticket: int
    way: Way
    objects: Objects
    groups: Ids
    hosts: Ids
    keys: Words
    of: Ids
    """The object of each block, by position, ascending. A fetch reads objects of which some blocks are here already."""
    object_bytes: Bytes
    """Bytes that it reads or writes of each object, int64 [objects]."""
    epoch: int
    deadline_s: float
    pinned: tuple[Ids, Ids] = field(default_factory=lambda: (np.empty(0, np.int32), np.empty(0, np.int32)))
    """Further host blocks that a fetch keeps in place: the part of the hit that is there already."""
    state: TransferState = TransferState.IN_FLIGHT

    @property
    def num_bytes(self) -> int:
        """Bytes of all objects."""
        return int(self.object_bytes.sum())

    def move(self, state: TransferState) -> None:
        """Goes to ``state``; raises ``TransferError`` if there is no such arrow."""
        if state not in MOVES[self.state]:
            raise TransferError(f"{self.way.value} {self.ticket} cannot go from {self.state.value} to {state.value}")
        self.state = state


class SeekState(Enum):
    """How far a request is with the remote."""

    LOOKING = "looking"
    FOUND = "found"
    """A hit is there, and is not fetched yet."""
    FETCHING = "fetching"
    OVER = "over"


@dataclass(eq=False)
class Seek:
    """A request that asks the remote for its prefix, once."""

    state: SeekState
    until_s: float = 0.0
    """Time at which it stops waiting for answers."""
    asked_s: float = 0.0
    """Time of its last question."""
    is_late: bool = False
    """Whether it does not wait for answers, or not any more."""
    ticket: int = 0
    """Ticket of the question, or of the fetch."""
    bound: int = 0
    """The longest hit that is possible."""
    have: int = 0
    """The hit of the two tiers here."""
    end: int = 0
    """The boundary of the hit that was found."""
    here: int = 0
    """Tiles that the two tiers here have, in strides of the plan of objects, as are the next three."""
    low: int = 0
    """Tiles that are here or in the remote for certain."""
    high: int = 0
    """Tiles that may be here or in the remote."""
    samples: list[int] = field(default_factory=list)
    """The tiles that the question names first."""
    ends: list[int] = field(default_factory=list)
    """The boundaries whose ends the question names after them."""
    sizes: list[int] = field(default_factory=list)
    """The number of names of each of these ends."""
    there: set[int] = field(default_factory=set)
    """Boundaries whose ends the remote has."""
    lacking: set[int] = field(default_factory=set)
    """Boundaries whose ends the remote lacks."""
    is_second: bool = False
    """Whether the question is about shorter hits."""
    fetched: Words = field(default_factory=lambda: np.empty((0, 2), np.uint64))
    """Keys of the blocks that came from the remote for it."""
