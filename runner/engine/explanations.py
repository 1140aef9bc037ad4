"""Explanations of requests by the names that callers know: ``explain``.

Owns       which requests of the cache a caller's request was made of, and whose it is.
Promises   it remembers a bounded number of names, for each owner its own. An owner is told of its own requests, by any
           of their names, and learns no other's. All calls may come from any thread.
Does not   know what happened: the cache's journal does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier import ConfigError, Explanation, Journal
from kvtier.cache.explanation import ComputeSeconds, explain_all
from kvtier.machine.integers import shown
from runner.errors import UnknownRequest

MOST_NAMES = 16384
MOST_PARTS = 64
"""Most parts of one request that are explained."""


_Whole = tuple[str, str]
"""A caller's request: its owner and its name."""


@dataclass(frozen=True)
class RequestExplanation:
    """What became of one request as its caller knows it: a part for each of its prompts and answers."""

    request_id: str
    parts: list[Explanation]

    @property
    def state(self) -> str:
        """The state of the part that is least far."""
        order = ("waiting", "loading", "running", "finished")
        return min((part.state for part in self.parts), key=order.index)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        parts = [part.to_dict() for part in self.parts]
        return {"request_id": self.request_id, "state": self.state, "text": str(self), "parts": parts}

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts))


class Explanations:
    """Explains the requests in ``journal``; ``compute_s`` says how long their tokens take to compute."""

    def __init__(self, journal: Journal, compute_s: ComputeSeconds) -> None:
        self.journal = journal
        self.compute_s = compute_s
        """How long the tokens of a prompt take to compute."""
        self._lock = threading.Lock()
        self._parts: OrderedDict[_Whole, tuple[str, ...]] = OrderedDict()
        self._wholes: dict[str, tuple[_Whole, str]] = {}  # of a part: the whole, and which part of it

    def name(self, name: str, parts: Sequence[str], owner: str = "") -> None:
        """The caller's request ``name`` is made of these requests, by the names that they have or will get.

        ``owner``: whose it is. Its parts are the same owner's, whatever they are made of later on.
        """
        if not self.journal.is_on:
            return
        with self._lock:
            if name in self._wholes:
                owner = owner or self._wholes[name][0][0]
            whole = owner, name
            self._forget(whole)
            self._parts[whole] = tuple(parts)
            for i, one in enumerate(parts):
                self._wholes[one] = whole, "" if len(parts) == 1 else f" ({i + 1} of {len(parts)})"
            while len(self._parts) > MOST_NAMES:
                self._forget(next(iter(self._parts)))

    def _forget(self, whole: _Whole) -> None:
        for one in self._parts.pop(whole, ()):
            self._wholes.pop(one, None)

    def knows(self, name: str, owner: str | None = "") -> bool:
        """Whether ``owner`` has a request of this name; None: whether anybody has."""
        with self._lock:
            return self._find(name, owner) in self._parts

    def caller_of(self, request_id: str) -> tuple[str, str]:
        """The caller's request that a request of the cache is a part of, and which part; "" for all of it."""
        (_, name), which = self._whole_of(request_id)
        return name, which

    def _whole_of(self, request_id: str) -> tuple[_Whole, str]:
        owner, name, which = "", request_id, ""
        while name in self._wholes:
            (owner, above), part = self._wholes[name]
            if above == name:
                break
            name, which = above, part + which
        return (owner, name), which

    def _find(self, name: str, owner: str | None) -> _Whole:
        """The parts of this request; with ``owner`` None of the newest of this name, whosever it is."""
        if owner is not None:
            return owner, name
        return next((whole for whole in reversed(self._parts) if whole[1] == name), ("", name))

    def _requests(self, whole: _Whole) -> list[str]:
        """The cache's names of the requests that ``whole`` is made of."""
        owner, name = whole
        parts = self._parts.get(whole)
        if parts is None or parts == (name,):
            return [name]
        return [one for part in parts for one in self._requests((owner, part))]

    def explain(self, name: str, owner: str | None = "") -> RequestExplanation:
        """``owner``: who asks; None: one who may see all.

        Raises ``UnknownRequest`` for a name that was never given, is forgotten, or is somebody else's, and
        ``ConfigError`` without a journal. Of many parts the first ones are told.
        """
        journal = self.journal
        if not journal.is_on:
            raise ConfigError("nothing is explained without a journal; load the model with journal_events=32768")
        ids: list[str] = []
        if isinstance(name, str):
            with self._lock:
                whole = self._find(name, owner)
                ids = self._requests(whole)[:MOST_PARTS] if whole in self._parts else []

        def name_of(request_id: str) -> str:
            (its, caller), which = self._whole_of(request_id)
            return caller + which if owner in (its, None) else "of another caller"

        found = explain_all(journal.since(), ids, self.compute_s, journal.unix_s, name_of) if ids else []
        parts = [part for part in found if part is not None]
        if not parts:
            raise UnknownRequest(f"no request {shown(name)} is known here: it was never queued, or it is forgotten")
        return RequestExplanation(name, parts)
