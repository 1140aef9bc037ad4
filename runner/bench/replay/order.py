"""Which request begins next."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from runner.bench.replay.asked import Asked

AHEAD = 64
"""Requests that are looked at for one whose session is free."""


class Order:
    """The order of requests of which ``at_once`` run at a time, and one of a session."""

    def __init__(self, asked: Sequence[Asked], at_once: int) -> None:
        self._asked, self._at_once = asked, at_once
        self._waiting = list(range(len(asked)))
        self._busy: set[Hashable] = set()

    def __bool__(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._busy)

    def begin(self) -> Iterator[int]:
        """The requests that begin now."""
        if len(self._busy) == self._at_once:
            return
        for k in self._waiting[:AHEAD]:
            if len(self._busy) < self._at_once and self._asked[k].session not in self._busy:
                self._waiting.remove(k)
                self._busy.add(self._asked[k].session)
                yield k

    def end(self, k: int) -> None:
        """The request has ended."""
        self._busy.remove(self._asked[k].session)
