"""What a scheduler keeps of a request: where it stands, why it waits, its row, and its hit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.keeping import Course
from kvtier.coordinator.request import FinishReason, Request
from kvtier.geometry.keys import KeyArray, Text
from kvtier.machine.errors import StepError
from kvtier.remote.moves import Seek


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # holds a row and blocks; its loads are under way
    RUNNING = "running"  # holds a row and blocks
    FINISHED = "finished"  # holds nothing


class Wait(Enum):
    """Why a request waits: the answer that it got when it was last looked at."""

    QUEUE = "queue"  # not looked at yet: it has come, or come back, and earlier requests do not run yet
    TOKENS = "tokens"  # the step has none left for it
    ROWS = "rows"  # as many run as may
    BLOCKS = "blocks"  # a shortage
    STORES = "stores"  # stores still read the blocks that it needs
    TRANSFER = "transfer"  # a transfer is bringing its prefix
    TWIN = "twin"  # another request is computing its prefix


_NEXT = {
    State.WAITING: {State.LOADING, State.RUNNING, State.FINISHED},
    State.LOADING: {State.RUNNING, State.WAITING, State.FINISHED},
    State.RUNNING: {State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(frozen=True, slots=True, eq=False)
class ForTransfer:
    """Waits for a transfer: looks again when the connector's ``num_settled`` is no longer ``settled``."""

    settled: int


@dataclass(frozen=True, slots=True, eq=False)
class ForTwin:
    """Waits for a running request that computes its prefix, up to token ``until``."""

    seq: Tracked
    until: int

    @property
    def is_coming(self) -> bool:
        """Whether the other request has still to get there."""
        return self.until in self.seq.course.branches


@dataclass(slots=True, eq=False)
class Tracked:
    """A request inside the scheduler."""

    request: Request
    arrival: int
    text: Text  # prompt, and tokens generated before the last preemption
    state: State = State.WAITING
    row: int = -1
    ticket: int = 0  # of the load that it waits for
    epoch: int = 0  # the connector's when it was admitted: a later reset has outdated its content
    use_host: bool = True  # False once a load has failed: the same source is not tried again
    cached_tokens: dict[str, int] | None = None
    preemptions: int = 0
    ending: FinishReason | None = None  # why it ends, once decided; set under the inbox's lock
    wait: Wait = Wait.QUEUE
    wait_reason: str = ""
    waits_for: ForTransfer | ForTwin | None = None  # content on its way; None: looked at in every step
    looks: int = 0  # in vain, since room to spare was lacking
    course: Course = field(default_factory=Course)  # what of it stays
    anchored_at: int = -1  # tokens computed when its anchors were named last
    hit: tuple[int, int, int] = field(default=(0, 0, 0))  # tokens from (device, host, store) by this admission
    is_warm: bool = False  # its hit was touched since it waits
    seek: Seek | None = None  # what it has asked the remote tier
    arrived_s: float = field(default_factory=time.perf_counter)
    queue_s: float | None = None  # until it first ran

    def move(self, state: State) -> None:
        """Goes to ``state``; raises ``StepError`` if there is no such arrow."""
        if state not in _NEXT[self.state]:
            raise StepError(f"{self.request!r} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def wait_again(self, reason: str) -> None:
        """Back in the queue: its last look at the cache no longer holds."""
        self.wait, self.wait_reason, self.waits_for, self.is_warm = Wait.QUEUE, reason, None, False

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt, and the tokens generated before the last preemption."""
        return self.text.tokens

    @property
    def keys(self) -> KeyArray:
        """Keys of the full units of ``tokens``."""
        return self.text.keys

    def shares_prefix(self, other: Tracked) -> bool:
        """Whether both begin with the same key, so that they can share blocks."""
        return self.text.head == other.text.head != b""

    @property
    def order(self) -> tuple[int, int]:
        """Place in the service order: priority, then arrival."""
        return self.request.priority, self.arrival

    @property
    def num_generated(self) -> int:
        """Generated tokens in ``tokens``."""
        return len(self.tokens) - len(self.request.tokens)
