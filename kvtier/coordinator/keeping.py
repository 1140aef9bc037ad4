"""What stays of each text: the one place that decides it, for every caller.

A conversation's boundary is hit once, by its next turn. Then this turn's own boundary supersedes it. The boundary of a
prompt that many share is hit over and over. Windows make the difference costly: for a short turn, most of the kept
content is the windows' content at its end. So content is *superseded* if a text has moved on from it, no other text is
known to want it, and ends of its kind do not pay. All content of a *guest* is. So are a tail, and an answer's full
blocks if nothing of answers is found again.

A text's way has four occasions: it begins with a hit, others part from it, its prompt ends, and it ends itself. Each
changes its ``Course``: which boundaries are named, and which of its tokens go first.

Owns       ``Boundaries``, which knows the ends that pay, and ``Returns``, which knows the texts that come back.
Promises   pure: no table, no pool, no clock. No block that a kept boundary of the text needs is superseded (I31).
Does not   know blocks. ``Retention`` (rows) and ``HostText`` (the host tier's door) act on what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.boundaries import Boundaries, End, Found, needed_from
from kvtier.coordinator.partings import SLACK
from kvtier.coordinator.returns import NEVER, NOTHING, Before, Bytes, Returns, TextBytes
from kvtier.geometry.keys import KeyArray
from kvtier.geometry.kinds import Kind
from kvtier.remote.objects import KeptGroup

Mask = npt.NDArray[np.bool_]

SHORT = 256
"""Tokens before the end of a prompt, up to which one state serves all that part there: to compute them again costs
little."""
SHORT_PAYS = 8
"""It stays if what full attention keeps of the text has so many times its bytes. Where a text parts from one without
it, all of that is lost."""
MOST_TOLD = 32
"""Boundaries that a caller may tell of a text: the last ones."""


@dataclass(slots=True, eq=False)
class Course:
    """One text's way. Boundaries and all other figures are tokens."""

    begun_with: int = 0
    """The hit that it has begun with."""
    short: int = 0
    """The boundary shortly before its prompt's end up to which its newest state stays; 0 if none does for that."""
    went_on_from: int = 0
    """Its hit, if no other text had wanted one there: a conversation goes on."""
    named_from: int = NEVER
    """From here on windows' blocks are named as they pass."""
    slack_from: int = NEVER
    """From here on they stay, for hits shortly before the prompt's end."""
    reach: int = 0
    """So long before the prompt's end others are expected to part from it, if nothing like it was there."""
    behind_from: int = 0
    behind_to: int = 0
    """Between these windows stay as they pass: others are expected to part from it too, behind its stem."""
    cold_from: int = 0
    cold_to: int = 0
    """Windows' content between these two is superseded."""
    gone_from: int = NEVER
    """Full attention's content from here on is superseded."""
    is_guest: bool = False
    """Others are kept whole instead of its content."""
    has_begun: bool = False
    before: Before | None = None
    """What it has in common with an earlier text, once that was looked up."""
    app: bytes = b""
    """The name of its first unit; b"" if it has none."""
    branches: set[int] = field(default_factory=set)
    """Boundaries to name: others part from it there."""
    told: set[int] = field(default_factory=set)
    """Boundaries to name: its caller says that others will part there."""
    prompt_end: int = NEVER
    """The prompt's last boundary, once the prompt has ended."""
    kept: set[int] = field(default_factory=set)
    """Boundaries that stay: no content that hits there need is superseded."""


class Text(NamedTuple):
    """A text as it begins: its key chain, uint64 [n, 2], and figures in tokens."""

    keys: KeyArray
    num_tokens: int
    """Its length so far."""
    hit: int
    """It begins with this much."""
    full: int
    """Full attention alone has found this much."""
    told: Sequence[int] = ()
    """Where its caller says that others will part."""
    may_be_guest: bool = True
    before: Before | None = None
    """What it has in common with an earlier text; None if nobody has looked."""
    tenant: bytes | None = None
    """Its cache salt, if it has one."""


class Keeping:
    """Decides for a cache with these groups.

    ``whole``: as in ``Returns``. ``passes``: what windows pass may be kept. ``shorts``: of long prompts a state is kept
    shortly before the end. The states of an engine with its own memory are where that engine makes them.
    """

    def __init__(
        self,
        groups: Sequence[KeptGroup],
        hit_tokens: int,
        hash_tokens: int,
        whole: float = 0.0,
        passes: bool = False,
        shorts: bool = False,
    ) -> None:
        self._unit, self._hash = hit_tokens, hash_tokens
        self._local = [group.attention for group in groups if group.attention.kind is not Kind.FULL]
        self._has_full = len(self._local) < len(groups)
        self._groups = [(group.attention, group.block_tokens) for group in groups]
        self._passes = passes
        self._shorts = shorts
        self.sizes = TextBytes(groups)
        """What texts take."""
        self.boundaries = Boundaries()
        """Where prompts were found again."""
        self.returns = Returns(self.sizes, hit_tokens, hash_tokens, whole)
        """What came back, and after how much else."""

    # --- a text's way -----------------------------------------------------------------------------

    def begin(self, course: Course, text: Text, room: Callable[[Bytes], float]) -> None:
        """The text begins. ``room``: bytes for texts of such parts by group.

        It may begin again after it has come back. Then it finds what it has left itself, and nothing is learned.
        """
        known, keys, hit = self.boundaries, text.keys, text.hit
        course.short = 0
        app = course.app = self.name(keys, self._unit) if text.num_tokens >= self._unit else b""
        found = (self.name(keys, hit), hit) if hit else None
        last, is_first = min(self.last_boundaries(text.num_tokens)), not course.has_begun
        if is_first:
            full = text.full if self._has_full else hit
            self._come_back(course, text, full, room)
            known.learn(found, self._missed(course, text, full, last), app, text.tenant)
        goes_on = is_first and found is not None and known.want(found[0]) and hit < last and known.leave(found[0])
        course.begun_with, course.kept, course.has_begun = hit, set(), True
        course.cold_from, course.cold_to = hit, self._name_passing(course, last)
        course.behind_to = 0
        course.went_on_from = hit if goes_on and not known.pays(End.LEFT, app) else 0
        course.gone_from = self._tail(course, hit) if is_first else NEVER
        before = course.before if is_first and self._local and not course.went_on_from else None
        if before is not None and before.stem:
            self._name_behind(course, before)
        if text.told:
            self._tell(course, text)
        if course.went_on_from:
            course.cold_from = self._stem(course, text)
            course.kept |= {course.cold_from} - {0}
        if course.is_guest:
            course.cold_from, course.cold_to, course.gone_from = hit, NEVER, hit
        elif self._shorts and self.sizes.full(last) >= SHORT_PAYS * self.sizes.state and last <= course.gone_from:
            self._keep_short(course, last)

    def _keep_short(self, course: Course, last: int) -> None:
        """One state stays for all that part from this text at its prompt's end or up to SHORT tokens before it.

        The text is long, and full attention's part of it stays too.
        """
        course.short = max(0, last - SHORT // self._unit * self._unit)
        if course.short > course.begun_with:
            course.told.add(course.short)
        else:
            course.cold_from = course.begun_with

    def _come_back(self, course: Course, text: Text, full: int, room: Callable[[Bytes], float]) -> None:
        """Learns what the text has in common with earlier ones, and which of these nobody has come back to.

        If the stem is no longer there, it is kept now as it is where prompts are seen to part.
        """
        each, unit = self.sizes.of(text.num_tokens), self._unit
        prompt, begin = text.keys[: text.num_tokens // self._hash], self.returns.begin
        is_guest, course.before = begin(prompt, text.hit // unit, room(each), float(each.sum()), text.before)
        for app in self.returns.unused:
            self.boundaries.unused(app)
        course.is_guest = is_guest and text.may_be_guest
        course.reach = 0 if course.before.shared else self.returns.partings.reach(self.sizes.slack)
        stem = course.before.stem * unit
        if self._local and stem > full:
            course.branches.add(stem)

    def _name_passing(self, course: Course, last: int) -> int:
        """Decides from where on windows' blocks are named as they pass, and from where on these stay. Returns where
        those end that do not."""
        known, hit = self.boundaries, course.begun_with
        course.named_from, course.slack_from = NEVER, NEVER
        if not self._local:
            return hit
        slack = SLACK if known.pays(End.PROMPT, course.app) and known.pays(End.SHORT, course.app) else 0
        reach = max(slack, course.reach)
        if reach:
            first = min(needed_from(attention, last, reach) for attention in self._local)
            course.named_from = course.slack_from = first
        if self._passes and known.pays(End.PASSED, course.app):
            course.named_from = hit
            return max(hit, self._needed(course, last))
        return hit

    def _name_behind(self, course: Course, before: Before) -> None:
        """Decides how far behind its stem windows stay: no further than full attention's blocks."""
        hit, behind = course.begun_with, self.returns.partings.behind(self.sizes.slack)
        start = max(hit, before.stem * self._unit)
        end = min(start + behind, course.gone_from)
        if end > start:
            course.named_from, course.behind_from, course.behind_to = min(course.named_from, start), start, end
            course.cold_from, course.cold_to = course.behind_to, max(course.behind_to, course.cold_to)

    def _tail(self, course: Course, hit: int) -> int:
        """Where the text's tail begins, what comes behind its stem, if no end pays in its app; else NEVER."""
        stem, pays = course.before.stem if course.before is not None else 0, self.boundaries.pays
        if not stem or pays(End.PROMPT, course.app) or pays(End.ANSWER, course.app):
            return NEVER
        behind = self.returns.partings.behind(self.sizes.full(SLACK))
        return max(hit, stem * self._unit + behind)

    def _missed(self, course: Course, text: Text, full: int, last: int) -> Found | None:
        """Where the text would have been found, if no content had gone that it goes on from."""
        keys, hit = text.keys, text.hit
        if course.before is not None and course.before.goes_on:
            full = max(full, min(course.before.units * self._unit, last))
        return (self.name(keys, full), full) if full > hit else None

    def _stem(self, course: Course, text: Text) -> int:
        """The last boundary before the hit that others are known to want too; 0 if there is none."""
        unit, hit = self._unit, text.hit
        stems = {n // unit * unit for n in text.told[-MOST_TOLD:] if unit <= n < hit}
        stems = {n for n in stems if self.boundaries.is_stem(self.name(text.keys, n))}
        if course.before is not None and course.before.shared * unit < hit:
            stems.add(course.before.shared * unit)
        return max(stems, default=0)

    def _tell(self, course: Course, text: Text) -> None:
        """The boundaries beyond the hit that the caller has told of are kept if that pays."""
        unit = self._unit
        stems = {n // unit * unit for n in text.told[-MOST_TOLD:] if n // unit * unit > text.hit}
        for boundary in stems:
            self.boundaries.end(self.name(text.keys, boundary), End.STEM)
        course.told = stems if self.boundaries.pays(End.STEM, course.app) else set()

    def parted(self, course: Course, start: int, end: int) -> list[int]:
        """Boundaries of the text, between these, at which others part from it; ascending."""
        return [b for b in sorted(course.branches | course.told) if start < b <= end]

    def part(self, course: Course, keys: KeyArray, boundary: int) -> None:
        """Others part from the text at this boundary, one of ``parted``, whose content is there now: it is kept."""
        name = self.name(keys, boundary)
        if boundary in course.branches:
            self.boundaries.want(name)
        if not (course.is_guest and self.boundaries.is_end(name)):  # else it is a guest's own end, which has gone
            _keep_up_to(course, boundary)
        course.branches.discard(boundary)
        course.told.discard(boundary)

    def end_prompt(self, course: Course, keys: KeyArray, end: int) -> None:
        """All ``end`` known tokens are there, and tokens are generated from here on.

        The text's own end will supersede this one, unless others have wanted it, or prompts' ends pay.
        """
        ends = self._note_ends(keys, end, End.PROMPT)
        course.prompt_end = min(course.prompt_end, max(ends, default=0))  # the first one, however often it comes back
        if not ends:
            return
        unit = self._unit
        slack = SHORT if self.sizes.state else SLACK
        for boundary in range(max(unit, ends[0] - slack // unit * unit), ends[0], unit):
            self.boundaries.end(self.name(keys, boundary), End.SHORT)
        if course.is_guest or not self._local:
            return
        if course.went_on_from:
            self._want_again(course, keys)
        if any(self.boundaries.is_wanted(self.name(keys, boundary)) for boundary in ends):
            course.cold_from = course.cold_to = ends[-1]
            course.kept.update(ends)
        elif course.reach or self.boundaries.pays(End.PROMPT, course.app):
            needed = self._needed(course, ends[0])
            course.cold_from, course.cold_to = min(course.cold_from, needed), min(course.cold_to, needed)
            course.kept.update(ends)
        else:
            course.cold_to = ends[-1]

    def end(self, course: Course, keys: KeyArray, end: int, is_answer: bool, comes_back: bool = False) -> None:
        """The text has ended after ``end`` tokens; ``is_answer``: after its prompt.

        The end stays if the text comes back, or if such ends pay. If nothing of answers is found again, the answer's
        full blocks are superseded too.
        """
        pays, app = self.boundaries.pays, course.app
        stays = comes_back or pays(End.ANSWER, app) or (not is_answer and pays(End.PROMPT, app))
        if course.went_on_from:
            self._want_again(course, keys)
        if comes_back:
            course.is_guest, course.gone_from = False, NEVER
        elif is_answer and self.answers_go(course):
            course.gone_from = min(course.gone_from, course.prompt_end)
        if stays and self._local and not course.is_guest:
            ends = self.last_boundaries(end)
            course.cold_to = min(course.cold_to, *(attention.first_visible(min(ends)) for attention in self._local))
            course.kept.update(ends)
        if is_answer and not comes_back:
            self._note_ends(keys, end, End.ANSWER)

    def _want_again(self, course: Course, keys: KeyArray) -> None:
        """If others have wanted the boundary since that the text has gone on from, it stays."""
        n = course.went_on_from
        if self.boundaries.is_stem(self.name(keys, n)):
            _keep_up_to(course, n)

    def leave(self, course: Course, keys: KeyArray, prompt: int, end: int) -> None:
        """The text has gone after ``end`` tokens, ``prompt`` of which were its prompt. It does not come back itself."""
        self.returns.end(keys, prompt // self._unit, end // self._unit, course.before or NOTHING)

    # --- what is asked ----------------------------------------------------------------------------

    def names_end(self, course: Course, is_answer: bool, comes_back: bool = False) -> bool:
        """Whether the blocks of hits at a text's end are named: an answer's end is if it comes back, or such ends
        pay."""
        return comes_back or not is_answer or self.boundaries.pays(End.ANSWER, course.app)

    def shared(self, course: Course, keys: KeyArray, parted: Sequence[int]) -> list[int]:
        """Those of ``parted`` that others want, or that the caller has told of: not its ``short`` for itself alone."""
        known = self.boundaries

        def is_shared(name: bytes) -> bool:
            return known.is_wanted(name) or known.is_stem(name)

        return [b for b in parted if b != course.short or is_shared(self.name(keys, b))]

    def answers_go(self, course: Course) -> bool:
        """Whether nothing of answers is found again."""
        return not self.boundaries.pays(End.ANSWER, course.app) and not self.boundaries.pays(End.PASSED, course.app)

    def needed(self, course: Course, num_tokens: int) -> list[int]:
        """By group: the first token that hits at the end of so many tokens, or shortly before it, need."""
        last = min(self.last_boundaries(num_tokens))
        return [min(attention.first_visible(last), course.slack_from) for attention, _ in self._groups]

    def gone(self, course: Course, computed: int) -> list[tuple[int, int]]:
        """By group: the logical blocks, from .. to, whose content is superseded and not another boundary's of the
        text, ``computed`` tokens of which are there."""
        spans = []
        for attention, bt in self._groups:
            first, end = max(course.cold_from, attention.first_visible(course.cold_to)), course.cold_to
            if attention.kind is Kind.FULL:
                first, end = course.gone_from, computed
            spans.append((first // bt, end // bt))
        return spans

    def outrun(
        self, course: Course, keys: KeyArray, end: int, is_answer: bool, there: Callable[[KeyArray], tuple[Mask, Mask]]
    ) -> tuple[KeyArray, KeyArray]:
        """A text has ended, as in ``end``. Returns the keys, uint64 [n, 2], of two parts of its states: of what is as
        young as its K and V from now on, and of what goes first. ``there``: which keys have a state in all groups, and
        in any; bool [n] each.

        The newest state up to ``short`` stays: a turn of a few tokens has none of its own. States that several want do
        not go. None goes if the text has no state at its end.
        """
        is_named, last = course.short and self.names_end(course, is_answer), min(self.last_boundaries(end))
        at = np.arange(self._unit, last + 1 if is_named else 0, self._unit)
        names = np.ascontiguousarray(keys[at // self._hash - 1])
        in_all, in_any = there(names)
        if not in_all[-1:].any():
            return names[:0], names[:0]
        found = np.flatnonzero(in_all[:-1])
        stays = max(0, int(np.searchsorted(at[found], course.short, "right")) - 1)
        kept = found[stays : stays + 1]
        others = np.setdiff1d(np.flatnonzero(in_any[:-1]), kept, assume_unique=True).tolist()
        cold = [k for k in others if not self.boundaries.is_stem(names[k].tobytes())]
        return names[kept], names[np.array(cold, np.int64)]

    def has_lost(self, course: Course, keys: KeyArray, num_tokens: int, hit: int) -> bool:
        """Whether this hit is less than half of what the waiting text has in common with an earlier one."""
        if course.before is None:  # looked up once: each step asks
            course.before = self.returns.known(keys)
        unit = self._unit
        return 2 * hit < min(course.before.units, (num_tokens - 1) // unit) * unit

    def last_boundaries(self, num_tokens: int) -> set[int]:
        """The last hits on these tokens: on all of them, and on the same tokens sent again, less the last token."""
        unit = self._unit
        return {num_tokens // unit * unit, max(0, num_tokens - 1) // unit * unit}

    def name(self, keys: KeyArray, boundary: int) -> bytes:
        """The name of the text's tokens up to ``boundary``, a positive multiple of hit_tokens."""
        name: bytes = keys[boundary // self._hash - 1].tobytes()
        return name

    def _note_ends(self, keys: KeyArray, num_tokens: int, end: End) -> list[int]:
        """The last boundaries of these tokens, ascending, which are ends from now on."""
        boundaries = sorted(self.last_boundaries(num_tokens) - {0})
        for boundary in boundaries:
            self.boundaries.end(self.name(keys, boundary), end)
        return boundaries

    def _needed(self, course: Course, boundary: int) -> int:
        """The first token that a hit at the prompt's end, ``boundary``, needs of any window or chunk; and if slack is
        kept, hits shortly before it."""
        return min(course.slack_from, *(attention.first_visible(boundary) for attention in self._local))


def _keep_up_to(course: Course, boundary: int) -> None:
    """Nothing before this boundary is superseded."""
    course.cold_from, course.cold_to = max(course.cold_from, boundary), max(course.cold_to, boundary)
    course.gone_from = max(course.gone_from, boundary)
    course.kept.add(boundary)
