"""Boundaries: where prompts were found again, and which kinds of ends are worth keeping.

A *boundary* is a length at which a prompt's prefix is found again. Which one the next request finds depends on how its
client writes it. A template that keeps answers as they were finds the answer's end. One that drops the thinking, or
ends its prompts otherwise than its history, finds the prompt's. So it is learned:

    PROMPT   the end of a prompt
    SHORT    shortly before the end of a prompt
    ANSWER   the end of a text
    LEFT     an end that one request has found and gone on from
    STEM     where a caller says that prompts part, or where they have parted
    PASSED   anywhere else: windows came by, and let go of what a hit there needs

A hit credits its end's class. So does what would have been a hit: full attention alone has it, or all of it has gone.
Credits of stems and of what is passed fade with each request. Credits of ends fade with each chance that an end has
had: a text that goes on from another one, or a text that nobody comes back to.

One client drops the thinking, another one keeps its answers. So each *app* has credits of its own. An app is the texts
that begin with the same unit, as with one system prompt. Until it has credits enough, its tenant's tell what pays.
These are of all texts with its cache salt. Without a salt, or until these are enough too, those of all texts tell it.

Owns       names of boundaries, and the credits and counters of the classes.
Promises   pure: no table, no pool, no clock. Bounded memory; a hit costs the same however much is remembered.
Does not   know blocks, nor texts: ``Keeping`` asks it which ends to keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from kvtier.geometry.kinds import Attention, Kind
from kvtier.machine.stats import EndStats

MOST_APPS = 4096
"""Apps and tenants that are remembered."""
AT_FIRST = (0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0)
"""Credits before anything is known: a turn mostly goes on from the answer, callers know where prompts part, and what is
passed goes first."""
PRIOR = 2.0
"""What others tell counts like so many requests, and half of it once an app or tenant has had so many of its own."""

T = TypeVar("T")
Found = tuple[bytes, int]
"""The name of a boundary, and its tokens."""

MOST = 65_536
"""Boundaries that are remembered, of those that were wanted and of ends."""
FADES = 0.98
"""The weight of the past after each chance: some fifty count."""
PAYS = 0.05
"""Ends are kept if their class has this share of the credits of all ends and of unused texts. Stems and what is passed
need it of the credits of all classes. To keep them in vain costs memory, to miss them costs the whole hit."""


def needed_from(attention: Attention, end: int, reach: int) -> int:
    """The first token that hits at the prompt's ``end`` need, and hits up to ``reach`` tokens before it.

    A chunk has its own tokens for all of them. The chunk before it would cost far more than it brings.
    """
    first = attention.first_visible(end)
    return max(0, first - reach) if attention.kind is Kind.WINDOW else first


class End(IntEnum):
    """What a boundary is the end of."""

    PROMPT = 0
    ANSWER = 1
    LEFT = 2
    SHORT = 3
    STEM = 4
    PASSED = 5


_UNUSED = len(End)
"""Where the credits of texts are that nobody has come back to."""
_OF_ENDS = End.PROMPT, End.SHORT, End.ANSWER, End.LEFT, _UNUSED
_OF_BEGINNINGS = End.STEM, End.PASSED


class Boundaries:
    """The ends of one cache's texts, and whether their kinds pay. Boundaries go by the bytes of their keys."""

    def __init__(self) -> None:
        self._wanted: OrderedDict[bytes, bool] = OrderedDict()  # whether by more than one
        self._ends: OrderedDict[bytes, End] = OrderedDict()
        self._short: OrderedDict[bytes, None] = OrderedDict()  # of which a prompt may have many
        self._left: OrderedDict[bytes, None] = OrderedDict()
        self._credits = [*AT_FIRST]  # of all apps
        self._apps: OrderedDict[bytes, list[float]] = OrderedDict()  # of each app and each tenant
        self._tenants: dict[bytes, bytes] = {}  # of apps that have one
        self._newest: tuple[bytes, list[bool]] | None = None  # the last request's app, and what pays in it
        self._hits, self._missed = [0] * len(End), [0] * len(End)  # requests, by the end that they found, or would have

    def is_wanted(self, name: bytes) -> bool:
        """Whether a request has wanted this boundary, as far as is remembered."""
        return name in self._wanted

    def want(self, name: bytes) -> bool:
        """Remembers that a request wants this boundary. Returns whether it is the first to want it, as far as is
        remembered."""
        is_first = name not in self._wanted
        _remember(self._wanted, name, not is_first)
        return is_first

    def is_stem(self, name: bytes) -> bool:
        """Whether several requests have wanted this boundary, or a caller has told of it, as far as is remembered."""
        return self._wanted.get(name, False) or self._ends.get(name) is End.STEM

    def end(self, name: bytes, end: End) -> None:
        """A text, or its prompt, has this end, whether or not its blocks are kept."""
        if end is End.SHORT:
            _remember(self._short, name, None)
        elif name not in self._wanted:
            _remember(self._ends, name, end)

    def is_end(self, name: bytes) -> bool:
        """Whether one text ends there, or its prompt, as far as is remembered."""
        return self._ends.get(name, End.STEM) is not End.STEM or name in self._short

    def leave(self, name: bytes) -> bool:
        """The request that has found this boundary goes on from it. Returns whether it is the end of one text."""
        if self.is_end(name):
            _remember(self._left, name, None)
        return self.is_end(name)

    def learn(
        self, hit: Found | None, missed: Found | None = None, app: bytes = b"", tenant: bytes | None = None
    ) -> None:
        """A request of this app, and of this tenant if it has one, begins. Its hit ends at ``hit``. If all content were
        there, it would end at ``missed``, which is longer."""
        hit_end, missed_end = hit and self._class_of(hit), missed and self._class_of(missed)
        for counts, found, end in (self._hits, hit, hit_end), (self._missed, missed, missed_end):
            if found is not None:
                counts[End.PASSED if end is None else end] += 1
                counts[End.LEFT] += found[0] in self._left
        best, end = (hit, hit_end) if missed_end is None else (missed, missed_end)
        longest, reached = missed or hit, best[1] if best is not None and end is not None else 0
        own: list[list[float]] = []  # of the tenant, and of the app
        if tenant is not None:
            self._tenants[app] = tenant
        for name in (app,) if tenant is None else (tenant, app):
            known = self._apps.pop(name, None) or [0.0] * len(AT_FIRST)
            self._apps[name] = known
            own += [known]
        while len(self._apps) > MOST_APPS:
            self._tenants.pop(self._apps.popitem(last=False)[0], None)
        comes_back = longest is not None and end is not End.STEM
        for credits in self._credits, *own:
            _fade(credits, _OF_BEGINNINGS)
            if comes_back:
                _fade(credits, _OF_ENDS)
            if best is not None and end is not None:
                credits[end] += 1
                credits[End.LEFT] += best[0] in self._left
            if longest is not None:
                credits[End.PASSED] += 1 - reached / longest[1]
        self._newest = app, self._judge(app)

    def unused(self, app: bytes) -> None:
        """Nobody has come back to a text of this app: none of its ends has paid."""
        self._newest = None
        for name in {app, self._tenants.get(app, app)} & self._apps.keys():
            _fade(self._apps[name], _OF_ENDS)
            self._apps[name][_UNUSED] += 1
        _fade(self._credits, _OF_ENDS)
        self._credits[_UNUSED] += 1

    def _class_of(self, found: Found) -> End | None:
        """None: no end that is remembered."""
        if found[0] in self._ends:
            return self._ends[found[0]]
        if found[0] in self._short:
            return End.SHORT
        return End.STEM if found[0] in self._wanted else None

    def stats(self) -> dict[str, EndStats]:
        """Each class's counts; from any thread."""
        return {end.name.lower(): EndStats(self._hits[end], self._missed[end], self.pays(end)) for end in End}

    def pays(self, end: End, app: bytes | None = None) -> bool:
        """Whether ends of this class are worth their memory: in this app, or in all of them together."""
        if self._newest is not None and app == self._newest[0]:
            return self._newest[1][end]
        return self._judge(app)[end]

    def _judge(self, app: bytes | None) -> list[bool]:
        """Judges each class: whether it pays in this app, by its credits, its tenant's and those of all."""
        credits = self._credits
        for name in () if app is None else (self._tenants.get(app), app):
            if name is not None and name in self._apps:
                own = self._apps[name]
                weight = PRIOR * PRIOR / (PRIOR + sum(own)) / (sum(credits) or 1.0)
                credits = [weight * of_all + of_own for of_all, of_own in zip(credits, own, strict=True)]
        prompt = credits[End.PROMPT] + credits[End.SHORT]  # which take the end's windows too
        ends = prompt + credits[End.ANSWER]
        of_all, of_ends = PAYS * (ends + credits[End.STEM] + credits[End.PASSED]), PAYS * (ends + credits[_UNUSED])
        paying = [credit > of_ends for credit in credits[: len(End)]]
        paying[End.PROMPT] = prompt > of_ends
        paying[End.STEM], paying[End.PASSED] = credits[End.STEM] > of_all, credits[End.PASSED] > of_all
        return paying


def _fade(credits: list[float], which: Sequence[int]) -> None:
    for each in which:
        credits[each] *= FADES


def _remember(names: OrderedDict[bytes, T], name: bytes, value: T) -> None:
    names[name] = value
    names.move_to_end(name)
    if len(names) > MOST:
        names.popitem(last=False)
