"""Which texts were here: marks at their ends. They tell what has gone from what was never there.

Owns       the marks, by the names of boundaries.
Promises   bounded memory. To mark a text, and to look for marks, costs the logarithm of its length. A prompt that goes
           on from a marked end is told so, however much of the text has gone.
Does not   decide anything: it is for explanations. A prompt that parts from a text before its end may look new.

A text of n units (of hit_tokens) is marked at n, and at n rounded down to multiples of 2, 4, 8 ... units. A prompt of
which m units are there looks at the next multiple of 2**k units above m, for each k from the highest down. Where it
meets a mark, it goes on from there. If n is more than m, take the highest bit in which they differ: n rounded down to
it is m's next multiple of it. So the prompt meets one of the text's marks, then the next one, and at last n.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from kvtier.coordinator.match import Match
from kvtier.geometry.keys import KeyArray
from kvtier.geometry.kinds import Kind
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.journal import Gap

MOST = 32_768
"""Marks that are remembered."""


class Why(Enum):
    """Why a prompt did not find tokens."""

    NOT_KEPT = "not_kept"  # full attention has them; windows and chunks were not kept at their end
    PUSHED_OUT = "pushed_out"  # they were there
    PARTED = "parted"  # no text that is remembered goes on like this


class Mark(NamedTuple):
    """Tokens up to a boundary were there."""

    number: int
    """The next event's at that time."""
    end: str = ""
    """What ended there: "prompt", "answer" or "parting"; "" if nothing did."""
    is_kept: bool = False
    """Whether windows and chunks were kept there."""


class Trail:
    """The marks of one cache with these groups."""

    def __init__(self, spec: CacheSpec) -> None:
        self._unit, self._links = spec.hit_tokens, spec.hit_tokens // spec.hash_tokens
        self._full = next((g.name for g in spec.groups if g.attention.kind is Kind.FULL), "")
        self._marks: OrderedDict[bytes, Mark] = OrderedDict()

    def clear(self) -> None:
        """Nothing was ever there."""
        self._marks.clear()

    def mark(self, keys: KeyArray, boundary: int, mark: Mark) -> None:
        """A text has this boundary's tokens now, and ends there, or is parted from there."""
        units = boundary // self._unit
        if not units:
            return
        self._remember(self._name(keys, units), mark)
        passed = Mark(mark.number)
        for at in _rounded_down(units):
            self._remember(self._name(keys, at), passed)

    def gaps(self, keys: KeyArray, known_tokens: int, match: Match) -> tuple[Gap, ...]:
        """What a prompt of ``known_tokens`` tokens with this hit did not find, but for the rest that is always
        computed."""
        return tuple(self._gaps(keys, known_tokens, match))

    def _gaps(self, keys: KeyArray, known_tokens: int, match: Match) -> Iterator[Gap]:
        hit, full, last = match.num_tokens, match.full_tokens, max(0, known_tokens - 1) // self._unit * self._unit
        there = self._beyond(keys, full // self._unit, last // self._unit)
        lacks_full = match.limited_by if hit == full else self._full
        if full > hit:
            mark = self._marks.get(self._name(keys, full // self._unit), Mark(0))
            if mark.end or there is None:  # else it is only where what is left of a text ends
                why = Why.PUSHED_OUT if mark.is_kept else Why.NOT_KEPT
                yield Gap(hit, full, why.value, match.limited_by, mark.end, mark.number)
                hit = full
        if there is not None:
            full, mark = there
            yield Gap(hit, full, Why.PUSHED_OUT.value, lacks_full, mark.end, mark.number)
        if last > full:
            yield Gap(full, last, Why.PARTED.value, "", "", 0)

    def _beyond(self, keys: KeyArray, units: int, most: int) -> tuple[int, Mark] | None:
        """The farthest mark above ``units`` that the prompt meets, with its tokens; None if it meets none."""
        found = None
        for k in reversed(range(most.bit_length())):
            at = ((units >> k) + 1) << k
            mark = self._marks.get(self._name(keys, at)) if at <= most else None
            if mark is not None:
                units, found = at, (at * self._unit, mark)
        return found

    def _name(self, keys: KeyArray, units: int) -> bytes:
        name: bytes = keys[units * self._links - 1].tobytes()
        return name

    def _remember(self, name: bytes, mark: Mark) -> None:
        """A text's end stays known when another one passes there, or ends there and does not keep its end."""
        before = self._marks.pop(name, None)
        if before is not None and (not mark.end or before.is_kept > mark.is_kept):
            mark = Mark(mark.number, before.end, before.is_kept)
        self._marks[name] = mark
        if len(self._marks) > MOST:
            self._marks.popitem(last=False)


def _rounded_down(units: int) -> Iterator[int]:
    """The multiples of 2, 4, 8 ... that it is rounded down to; each once, without 0."""
    while units := units & (units - 1):
        yield units
