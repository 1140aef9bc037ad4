"""Waiting and running requests, in service order, and the row of each running request.

Owns       the two lists and the rows.
Promises   both lists are in service order (priority, then arrival). A request is in at most one of them. A row belongs
           to at most one request.
Does not   decide which request moves, or touch blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.tracked import State, Tracked, Wait


def _order(seq: Tracked) -> tuple[int, int]:
    return seq.order


class Roster:
    """Requests of a scheduler with ``num_rows`` rows."""

    def __init__(self, num_rows: int) -> None:
        self.waiting: list[Tracked] = []
        """Requests that hold nothing."""
        self.running: list[Tracked] = []
        """Requests that hold a row and blocks, including requests whose loads are under way."""
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._by_row: list[Tracked | None] = [None] * num_rows
        self._ids = np.full(num_rows, "", object)
        self.numbers = np.zeros(num_rows, np.int64)
        """[num_rows], of the request that has a row or had it last, in the order of arrival, from 1 on; 0: none had."""
        self.entered = 0
        """Times that a request got a row."""
        self._rows = np.empty(0, np.int32)
        self._loading: list[Tracked] = []
        self._names: list[str] | None = None

    @property
    def has_free_row(self) -> bool:
        """Whether one more request can run."""
        return bool(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        """How many more requests can run."""
        return len(self._free_rows)

    @property
    def has_loading(self) -> bool:
        """Whether there may be requests whose loads are under way."""
        return bool(self._loading)

    @property
    def free_rows(self) -> tuple[int, ...]:
        """The rows without a request; for auditing."""
        return tuple(self._free_rows)

    @property
    def holders(self) -> tuple[Tracked | None, ...]:
        """The request of each row; for auditing."""
        return tuple(self._by_row)

    @property
    def watched(self) -> tuple[Tracked, ...]:
        """The requests to look at when loads end; for auditing."""
        return tuple(self._loading)

    def count_waiting(self, num_arrived: int) -> dict[str, int]:
        """Requests that hold nothing, by why they wait (``Wait``); ``num_arrived`` more are not looked at yet."""
        counted = Counter(seq.wait for seq in self.waiting.copy())
        counted[Wait.QUEUE] += num_arrived
        return {wait.value: counted[wait] for wait in Wait}

    def next_row(self) -> int:
        """The row that the next request to ``enter`` gets."""
        return self._free_rows[-1]

    def of_row(self, row: int) -> Tracked:
        """The request that has this row."""
        seq = self._by_row[row]
        assert seq is not None
        return seq

    def ids(self, rows: npt.NDArray[np.int32]) -> list[str]:
        """Request ids of rows."""
        ids: list[str] = self._ids[rows].tolist()
        return ids

    def names(self) -> list[str]:
        """Request ids of the running requests, in service order; kept until requests come or go, and never changed."""
        if self._names is None:
            self._names = self.ids(self.rows())
        return self._names

    def rows(self) -> npt.NDArray[np.int32]:
        """Rows of the running requests, int32, in service order; kept until requests come or go, and never changed."""
        return self._rows

    def younger(self, seq: Tracked) -> list[Tracked]:
        """Running requests that come after ``seq`` in service order, the last first."""
        return [other for other in reversed(self.running) if other.order > seq.order]

    def num_before(self, seq: Tracked) -> int:
        """How many running requests come before ``seq`` in service order."""
        return bisect_left(self.running, seq.order, key=_order)

    def enqueue(self, seq: Tracked) -> None:
        """``seq`` waits: it takes its place among the waiting requests."""
        insort(self.waiting, seq, key=_order)

    def enter(self, seq: Tracked) -> None:
        """``seq`` has left the queue and got the row of ``next_row``."""
        row = self._free_rows.pop()
        assert seq.row == row
        self.waiting.remove(seq)
        place = self.num_before(seq)
        self.running.insert(place, seq)
        entered = np.array([row], self._rows.dtype)
        self._rows, self._names = np.concatenate((self._rows[:place], entered, self._rows[place:])), None
        self._by_row[seq.row] = seq
        self._ids[seq.row] = seq.request.request_id
        self.numbers[seq.row] = seq.arrival + 1
        self.entered += 1
        if seq.state is State.LOADING:
            self._loading.append(seq)

    def leave(self, seq: Tracked, row: int) -> None:
        """``seq`` has run in ``row``, and runs no more."""
        place = self.num_before(seq)
        assert self.running[place] is seq
        del self.running[place]
        self._rows, self._names = np.concatenate((self._rows[:place], self._rows[place + 1 :])), None
        self._by_row[row] = None
        self._free_rows.append(row)
        self._loading = [other for other in self._loading if other is not seq]

    def drop(self, seq: Tracked) -> None:
        """``seq`` ends; it waited, or was never queued."""
        if seq in self.waiting:
            self.waiting.remove(seq)

    def loading(self) -> list[Tracked]:
        """Running requests whose loads are under way."""
        if self._loading:
            self._loading = [seq for seq in self._loading if seq.state is State.LOADING]
        return list(self._loading)

    def loading_of(self, failed: Sequence[Tracked]) -> list[Tracked]:
        """Requests whose loads may bring content of one of these, or that hold such content meanwhile."""
        return [seq for seq in self.loading() if any(seq.shares_prefix(other) for other in failed)]
