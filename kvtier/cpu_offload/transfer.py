"""A transfer: one copy of a set of blocks between the tiers, from plan to end.

Promises   one object with one lifetime owns its pins, so that a dead request needs no special path. Every transfer ends
           exactly once. Keeps I18.

    PLANNED --submit--> IN_FLIGHT --ok--> LANDED --publish--> SETTLED
       |                   |  `--error--> FAILED --unpublish--> SETTLED
       |                   `--deadline--> EXPIRED --engine confirms the end--> SETTLED
       `--cancel--> SETTLED
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.machine.errors import TransferError


class Direction(Enum):
    """Store: device to host. Load: host to device."""

    STORE = "store"
    LOAD = "load"


class TransferState(Enum):
    """See the module's diagram."""

    PLANNED = "planned"
    IN_FLIGHT = "in flight"
    LANDED = "landed"
    FAILED = "failed"
    EXPIRED = "expired"
    SETTLED = "settled"


MOVES = {
    TransferState.PLANNED: {TransferState.IN_FLIGHT, TransferState.SETTLED},
    TransferState.IN_FLIGHT: {TransferState.LANDED, TransferState.FAILED, TransferState.EXPIRED},
    TransferState.LANDED: {TransferState.SETTLED},
    TransferState.FAILED: {TransferState.SETTLED},
    TransferState.EXPIRED: {TransferState.SETTLED},
    TransferState.SETTLED: set(),
}
"""The arrows of the diagram."""


@dataclass(slots=True)
class Transfer:
    """One copy between the tiers. ``groups``, ``device`` and ``host`` are int32 [n].

    Block host[k] of the host pool belongs to block device[k] of the device pool of group groups[k]. ``keys`` is uint64
    [n, 2], the content's names.
    """

    ticket: int
    direction: Direction
    groups: npt.NDArray[np.int32]
    device: npt.NDArray[np.int32]
    host: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint64]
    num_bytes: int
    epoch: int
    cold: bool = False  # a store made because its blocks are next to be evicted
    state: TransferState = TransferState.PLANNED
    submitted_s: float = 0.0  # on the engine's clock
    deadline_s: float = float("inf")  # likewise; set when submitted
    superseded: npt.NDArray[np.bool_] | None = None  # host blocks that no other request is known to want
    ordered: bool = False  # a store with all writers ordered behind it: it fences nothing any more

    def move(self, state: TransferState) -> None:
        """Goes to ``state``; raises ``TransferError`` if the diagram has no such arrow."""
        if state not in MOVES[self.state]:
            raise TransferError(f"transfer {self.ticket} cannot go from {self.state.value} to {state.value}")
        self.state = state
