"""Explanations of requests by the names that callers know: ``explain``.

Owns       which requests of the cache a caller's request was made of.
Promises   it remembers a bounded number of names. All calls may come from any thread.
Does not   know what happened: the cache's journal does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier import ConfigError, Explanation, Journal
from kvtier._integers import shown
from kvtier.explanation import ComputeSeconds, explain_all
from runner.errors import UnknownRequest

MOST_NAMES = 16384
MOST_PARTS = 64
"""Of one request, that are explained."""


@dataclass(frozen=True)
class RequestExplanation:
    """Of one request as its caller knows it: a part for each of its prompts and answers."""

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
    """Of the requests in ``journal``; ``compute_s`` says how long their tokens take to compute."""

    def __init__(self, journal: Journal, compute_s: ComputeSeconds) -> None:
        self.journal = journal
        self.compute_s = compute_s
        """How long the tokens of a prompt take to compute."""
        self._lock = threading.Lock()
        self._parts: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._wholes: dict[str, tuple[str, str]] = {}  # of a part: the whole, and which part of it
        self._owners: dict[str, str] = {}

    def name(self, name: str, parts: Sequence[str], owner: str = "") -> None:
        """The caller's request ``name`` is made of these requests, by the names that they have or will get.

        ``owner``: only callers with this name may ask about it; "": anybody.
        """
        if not self.journal.is_on:
            return
        with self._lock:
            for one in self._parts.pop(name, ()):
                self._wholes.pop(one, None)
            self._owners.pop(name, None)
            self._parts[name] = tuple(parts)
            if owner:
                self._owners[name] = owner
            for i, one in enumerate(parts):
                self._wholes[one] = name, "" if len(parts) == 1 else f" ({i + 1} of {len(parts)})"
            while len(self._parts) > MOST_NAMES:
                old, forgotten = self._parts.popitem(last=False)
                self._owners.pop(old, None)
                for one in forgotten:
                    self._wholes.pop(one, None)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def name_of(self, request_id: str) -> str:
        """What its caller calls a request of the cache."""
        return "".join(self.caller_of(request_id))

    def caller_of(self, request_id: str) -> tuple[str, str]:
        """The caller's request that a request of the cache is a part of, and which part; "" for all of it."""
        which, name = "", request_id
        while name in self._wholes and self._wholes[name][0] != name:
            name, part = self._wholes[name]
            which = part + which
        return name, which

    def _requests(self, name: str) -> list[str]:
        """The cache's names of the requests that ``name`` is made of."""
        parts = self._parts.get(name)
        return [name] if parts is None or parts == (name,) else [one for part in parts for one in self._requests(part)]

    def explain(self, name: str, owner: str = "") -> RequestExplanation:
        """Raises ``UnknownRequest`` for a name that was never given, is forgotten, or is somebody else's, and
        ``ConfigError`` without a journal. Of many parts the first ones are told."""
        journal = self.journal
        if not journal.is_on:
            raise ConfigError("nothing is explained without a journal; load the model with journal_events=32768")
        with self._lock:
            is_known = isinstance(name, str) and name in self._parts and self._owners.get(name, owner) == owner
            ids = self._requests(name)[:MOST_PARTS] if is_known else []

        def name_of(request_id: str) -> str:
            caller, which = self.caller_of(request_id)
            return caller + which if self._owners.get(caller, owner) == owner else "of another caller"

        found = explain_all(journal.since(), ids, self.compute_s, journal.unix_s, name_of) if ids else []
        parts = [part for part in found if part is not None]
        if not parts:
            raise UnknownRequest(f"no request {shown(name)} is known here: it was never queued, or it is forgotten")
        return RequestExplanation(name, parts)
