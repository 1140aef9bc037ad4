"""Boundaries: where prompts were found again, and which kinds of ends are worth keeping.

A *boundary* is a length at which a prompt's prefix is found again. Which one the next request finds depends on how its
client writes it: a template that keeps answers as they were finds the answer's end; one that drops the thinking, or
ends its prompts otherwise than its history, finds the prompt's. So it is learned:

    PROMPT   the end of a prompt
    ANSWER   the end of a text
    LEFT     an end that one request has found and gone on from

A hit credits its end's class, and so does what the full-attention groups alone have found: such an end would have been
a hit, had its windows been kept. Credits fade with each request.

Owns       names of boundaries, and the credits and counters of the classes.
Promises   pure: no table, no pool, no clock. Bounded memory; a hit costs the same however much is remembered.
Does not   know blocks: ``Retention`` (rows) and ``HostText`` (the host tier's door) ask it what to keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar

from kvtier.machine.stats import EndStats

T = TypeVar("T")

MOST = 65_536
"""Boundaries that are remembered, of those that were wanted and of ends."""
FADES = 0.98
"""The weight of the past after each request: some fifty requests count."""
PAYS = 0.25
"""An end is kept if it has this share of the other's credits: keeping it in vain costs memory, not keeping it in vain
costs the whole hit."""
LEFT_PAYS = 0.1
"""Likewise an end that was left, which most conversations never come back to."""


class End(IntEnum):
    """What a boundary is the end of."""

    PROMPT = 0
    ANSWER = 1
    LEFT = 2


class Boundaries:
    """Of one cache. Boundaries go by the bytes of their keys."""

    def __init__(self) -> None:
        self._wanted: OrderedDict[bytes, None] = OrderedDict()
        self._ends: OrderedDict[bytes, End] = OrderedDict()
        self._credits = [1.0, 1.0, 0.0]
        self._hits, self._missed = [0] * len(End), [0] * len(End)  # requests, by the end that they found, or would have

    def is_wanted(self, name: bytes) -> bool:
        """Whether a request has wanted this boundary, as far as is remembered."""
        return name in self._wanted

    def want(self, name: bytes) -> bool:
        """Remembers that a request wants this boundary. Returns whether it is the first to want it, as far as is
        remembered."""
        is_first = name not in self._wanted
        _remember(self._wanted, name, None)
        return is_first

    def end(self, name: bytes, end: End) -> None:
        """A text, or its prompt, has this end, whether or not its blocks are kept."""
        if name not in self._wanted:
            _remember(self._ends, name, end)

    def leave(self, name: bytes) -> None:
        """The request that has found this end goes on from it."""
        if name in self._ends:
            self._ends[name] = End.LEFT

    def learn(self, found: Iterable[bytes]) -> None:
        """A request begins. ``found``: the boundaries that it has hit, and would have hit, the longest first."""
        self._credits = [FADES * credit for credit in self._credits]
        end = next((self._ends[name] for name in found if name in self._ends), None)
        if end is not None:
            self._credits[end] += 1

    def count(self, hit: bytes | None, missed: bytes | None) -> None:
        """A request begins. Its hit ends at ``hit``; full attention alone has found ``missed``, which is longer."""
        for counts, name in (self._hits, hit), (self._missed, missed):
            if name is not None and name in self._ends:
                counts[self._ends[name]] += 1

    def stats(self) -> dict[str, EndStats]:
        """Of each class; from any thread."""
        return {end.name.lower(): EndStats(self._hits[end], self._missed[end], self.pays(end)) for end in End}

    def pays(self, end: End) -> bool:
        """Whether ends of this class are worth their memory."""
        prompts, answers, left = self._credits
        match end:
            case End.PROMPT:
                return prompts >= PAYS * answers
            case End.ANSWER:
                return answers >= PAYS * prompts
            case End.LEFT:
                return left > LEFT_PAYS * (prompts + answers)


def _remember(names: OrderedDict[bytes, T], name: bytes, value: T) -> None:
    names[name] = value
    names.move_to_end(name)
    if len(names) > MOST:
        names.popitem(last=False)
