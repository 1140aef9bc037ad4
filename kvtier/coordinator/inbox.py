"""The mail of other threads for the scheduler: requests that arrive, and requests that are to end.

Owns       the lock, the ids in use, and the mail that the scheduling thread has not taken yet.
Promises   an id is in use from ``add`` until its request is reported. A request has one ending, the first that was
           asked for or decided. This ending is reported. Nothing here waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvtier.coordinator.request import FinishReason
from kvtier.coordinator.tracked import Tracked
from kvtier.machine.errors import DuplicateRequest
from kvtier.machine.integers import shown


class Inbox:
    """Any thread may call every method except ``take`` and ``forget``, which belong to the scheduling thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Tracked] = {}
        self._arrived: list[Tracked] = []
        self._ended: list[tuple[Tracked, FinishReason]] = []
        self._count = 0

    def __len__(self) -> int:
        """Requests that are not reported yet."""
        return len(self._known)

    @property
    def has_mail(self) -> bool:
        """Whether ``take`` would return something."""
        return bool(self._arrived or self._ended)

    @property
    def num_arrived(self) -> int:
        """Requests that the scheduling thread has not seen yet."""
        return len(self._arrived)

    def unreported(self) -> tuple[set[str], set[str]]:
        """Ids of requests that are not reported yet, and ids of requests that are not taken yet; for auditing."""
        with self._lock:
            return set(self._known), {seq.request.request_id for seq in self._arrived}

    def check_new(self, request_id: str) -> None:
        """Raises ``DuplicateRequest`` if the id is in use."""
        if request_id in self._known:
            raise DuplicateRequest(f"a request {shown(request_id)} is already waiting or running; use another id")

    def add(self, request_id: str, make: Callable[[int], Tracked]) -> None:
        """Queues ``make(arrival number)``. Raises ``DuplicateRequest``; then nothing changed."""
        with self._lock:
            self.check_new(request_id)
            self._known[request_id] = make(self._count)
            self._arrived.append(self._known[request_id])
            self._count += 1

    def end(self, request_id: str, reason: FinishReason) -> bool:
        """Asks for a request to be ended; False if no request of this id still goes on.

        True is a promise: the request will be reported with this reason.
        """
        with self._lock:
            seq = self._known.get(request_id)
            if seq is None or seq.ending is not None:
                return False
            seq.ending = reason
            self._ended.append((seq, reason))
            return True

    def decide(self, seq: Tracked, reason: FinishReason) -> FinishReason:
        """The scheduling thread ends a request for ``reason``, unless another ending was asked for. Returns the final
        reason."""
        with self._lock:
            seq.ending = seq.ending or reason
            return seq.ending

    def find(self, request_id: str) -> Tracked | None:
        """The request of this id, if it is not reported yet."""
        return self._known.get(request_id)

    def take(self) -> tuple[list[Tracked], list[tuple[Tracked, FinishReason]]]:
        """(requests that arrived, endings that were asked for with their reasons) since the last call."""
        if not self.has_mail:
            return [], []
        with self._lock:
            arrived, self._arrived = self._arrived, []
            ended, self._ended = self._ended, []
            return arrived, ended

    def request_ids(self) -> list[str]:
        """Ids of the requests that are not reported yet, in the order in which they arrived."""
        with self._lock:
            return list(self._known)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are reported: their ids are free."""
        with self._lock:
            for request_id in request_ids:
                del self._known[request_id]
