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

from kvtier import ConfigError, Explanation, Journal, explain
from kvtier._integers import shown
from kvtier.explanation import ComputeSeconds
from runner.errors import UnknownRequest

MOST_NAMES = 16384


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

    def name(self, name: str, parts: Sequence[str]) -> None:
        """The caller's request ``name`` is made of these requests, by the names that they have or will get."""
        if not self.journal.is_on:
            return
        with self._lock:
            self._parts.pop(name, None)
            self._parts[name] = tuple(parts)
            for i, one in enumerate(parts):
                self._wholes[one] = name, "" if len(parts) == 1 else f" ({i + 1} of {len(parts)})"
            while len(self._parts) > MOST_NAMES:
                for one in self._parts.popitem(last=False)[1]:
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

    def explain(self, name: str) -> RequestExplanation:
        """Raises ``UnknownRequest`` for a name that was never given, or is forgotten, and ``ConfigError`` without a
        journal."""
        journal = self.journal
        if not journal.is_on:
            raise ConfigError("nothing is explained without a journal; load the model with journal_events=32768")
        with self._lock:
            ids = self._requests(name) if isinstance(name, str) and name in self._parts else []
        events = journal.since() if ids else []
        found = (explain(events, one, self.compute_s, journal.unix_s, self.name_of) for one in ids)
        parts = [part for part in found if part is not None]
        if not parts:
            raise UnknownRequest(f"no request {shown(name)} is known here: it was never queued, or it is forgotten")
        return RequestExplanation(name, parts)
