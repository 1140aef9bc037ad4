"""A remote behind a host tier whose bytes lie in other processes, by worker and by rank.

Owns       calls that no worker has been told of yet, and what only a part of the answers say.
Promises   each host memory has objects of its own, under names of its own namespace. A look asks for those of the
           first one; a delete takes those of all. Workers that share a host memory carry each parcel out once. A call
           ends when every worker has reported; the worst outcome counts.
Does not   carry parcels and receipts: the engine does, with a step's orders and reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.cpu_offload.tier_memory import HostSide
from kvtier.remote.backends.contract import Answer, Backend, Outcome
from kvtier.remote.backends.threads import reason_of
from kvtier.remote.moves import Move
from kvtier.remote.names import object_name
from kvtier.remote.objects import Name
from kvtier.remote.parcels import Grade, Parcel, Receipt
from kvtier.remote.wire import Wire, get_parcel, put_parcel

_OUTCOMES = (Outcome.OK, Outcome.MISS, Outcome.REFUSED, Outcome.FAILED)
DRAIN_S = 3.0
"""Time that what was handed to a worker's backend has to get there when the worker ends."""
END_S = 2.0
"""Its threads have so long to end after that."""


class RelayedBackend:
    """The scheduling process's backend. ``backend``: its own, for looks and deletes. ``now``: the tier's clock."""

    def __init__(self, backend: Backend, now: Callable[[], float]) -> None:
        self.kind = backend.kind
        self.backend = backend
        self._now = now
        self._parcels: list[tuple[Parcel, float]] = []  # and when their time is over
        self._answers: list[Answer] = []
        self._folds: dict[int, int] = {}  # deletes under way, and the number of names that stand for one each

    def hand_on(self, parcel: Parcel) -> None:
        """All workers are to carry it out."""
        self._parcels.append((parcel, self._now() + parcel.within_s))

    def take(self) -> tuple[Parcel, ...]:
        """The parcels since the last call, each with the time that it has left."""
        parcels, self._parcels = self._parcels, []
        return tuple(parcel._replace(within_s=max(0.0, until_s - self._now())) for parcel, until_s in parcels)

    def report(self, receipts: Mapping[int, Receipt]) -> None:
        """Parcels, by ticket, that all workers have carried out."""
        for ticket, receipt in receipts.items():
            outcomes = tuple(_OUTCOMES[grade] for grade in receipt.grades)
            self._answers.append(Answer(ticket, outcomes, receipt.reasons, receipt.seconds))

    def delete_all(self, ticket: int, names: Sequence[str], same: int, within_s: float) -> None:
        """Forgets objects; every ``same`` names in a row have one outcome."""
        self._folds[ticket] = same
        self.backend.delete(ticket, names, within_s)

    def poll(self) -> list[Answer]:
        """See ``Backend``."""
        found, self._answers = self._answers, []
        for answer in self.backend.poll():
            same = self._folds.pop(answer.ticket, 1)
            found.append(answer if same == 1 else _folded(answer, same))
        return found

    def close(self, timeout_s: float) -> bool:
        """Ends its own remote; workers end theirs."""
        return self.backend.close(timeout_s)


def _folded(answer: Answer, same: int) -> Answer:
    grades = [_OUTCOMES.index(outcome) for outcome in answer.outcomes]
    worst = [max(grades[k : k + same]) for k in range(0, len(grades), same)]
    reasons = {k // same: reason for k, reason in answer.reasons.items()}
    return Answer(answer.ticket, tuple(_OUTCOMES[grade] for grade in worst), reasons, answer.seconds)


class RelayedWire:
    """``Wire`` for a ``RelayedBackend``. ``namespaces``: of each host memory."""

    def __init__(self, block_bytes: npt.NDArray[np.int64], namespaces: Sequence[bytes]) -> None:
        self.block_bytes = block_bytes
        self._namespaces = tuple(namespaces)

    def look(self, backend: RelayedBackend, ticket: int, names: Sequence[Name], within_s: float) -> None:
        """Asks which objects of the first worker are there."""
        backend.backend.look(ticket, [object_name(self._namespaces[0], *name) for name in names], within_s)

    def delete(self, backend: RelayedBackend, ticket: int, names: Sequence[Name], within_s: float) -> None:
        """Forgets the objects of all workers."""
        texts = [object_name(namespace, *name) for name in names for namespace in self._namespaces]
        backend.delete_all(ticket, texts, len(self._namespaces), within_s)

    def put(self, backend: RelayedBackend, move: Move, within_s: float) -> None:
        """Each worker is to store its part of a spill's objects."""
        backend.hand_on(put_parcel(move, within_s)._replace(namespaces=self._namespaces))

    def get(self, backend: RelayedBackend, move: Move, absent: npt.NDArray[np.bool_], within_s: float) -> None:
        """Each worker is to read its part of a fetch's objects."""
        backend.hand_on(get_parcel(move, absent, within_s)._replace(namespaces=self._namespaces))


class RemoteWorker:
    """Carries parcels out in a worker. ``rank``: its number; ``secret``: as ``Wire``'s.

    ``sharers``: workers that have one host memory. One of them carries a parcel out; the others say at once that it is.
    """

    def __init__(self, backend: Backend, memory: HostSide, rank: int, sharers: int, secret: bytes | None) -> None:
        self._backend = backend
        self._memory = memory
        self._rank = rank
        self._sharers = sharers
        self._secret = secret
        self._wires: dict[bytes, Wire] = {}
        self._live: set[int] = set()
        self._puts: set[int] = set()
        self._at_once: dict[int, Receipt] = {}
        backend.register(memory.arenas[1].bytes.data)

    @property
    def num_live(self) -> int:
        """Parcels that were not reported yet."""
        return len(self._live) + len(self._at_once)

    def begin(self, parcels: Sequence[Parcel]) -> None:
        """Carries them out, on the remote's threads."""
        for parcel in parcels:
            if not self._is_mine(parcel):
                self._at_once[parcel.ticket] = Receipt((Grade.OK,) * len(parcel.names), {})
                continue
            try:
                self._wire(parcel.namespaces[self._rank // self._sharers]).carry(self._backend, parcel)
            except Exception as problem:  # a parcel that cannot even begin has failed
                reasons = dict.fromkeys(range(len(parcel.names)), reason_of(problem))
                self._at_once[parcel.ticket] = Receipt((Grade.FAILED,) * len(parcel.names), reasons)
                continue
            self._live.add(parcel.ticket)
            self._puts |= {parcel.ticket} if parcel.is_put else set()

    def poll(self) -> dict[int, Receipt]:
        """The receipts of what has ended since the last call; never waits."""
        found, self._at_once = self._at_once, {}
        for answer in self._backend.poll():
            grades = tuple(Grade(_OUTCOMES.index(outcome)) for outcome in answer.outcomes)
            found[answer.ticket] = Receipt(grades, dict(answer.reasons), answer.seconds)
            self._live.discard(answer.ticket)
            self._puts.discard(answer.ticket)
        return found

    def close(self, timeout_s: float) -> bool:
        """Ends it, as ``Backend.close`` does; what is on its way to the remote has some seconds to get there."""
        until_s = time.monotonic() + min(DRAIN_S, timeout_s)
        while self._puts and (left_s := until_s - time.monotonic()) > 0:
            self._backend.wait(left_s)
            self.poll()
        return self._backend.close(min(END_S, timeout_s))

    def _is_mine(self, parcel: Parcel) -> bool:
        """Whether this worker carries it out, of those that share its host memory."""
        _, key = parcel.names[0]
        return int.from_bytes(key, "little") % self._sharers == self._rank % self._sharers

    def _wire(self, namespace: bytes) -> Wire:
        if namespace not in self._wires:
            self._wires[namespace] = Wire(self._memory, namespace, self._secret)
        return self._wires[namespace]
