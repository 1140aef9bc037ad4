"""What comes back, and after how much else: conversations that go on, and beginnings that many prompts share.

Content that went unused for longest goes first. A round of conversations that is a little too long for the cache then
finds nothing: each is pushed out just before its turn. To keep some of them whole, and to let the others go at once,
finds nearly as much as fits. How much would be found either way follows from the distances at which conversations come
back: the bytes of other texts that were used since.

What comes behind a beginning that texts share, a *stem*, is a text's *tail*. A text is *unused* if nobody has asked
for more than its stem, while texts of the cache's size were used.

Owns       the newest texts: where they begin like others, their sizes in the order of use, and a fading histogram of
           distances.
Promises   what is known does not depend on what the cache still has, so that what is decided does not change it.
           Bounded memory; a request costs the same however much is remembered.
Does not   know blocks: the content of a *guest* is what its callers give up first.

The distances are Mattson's (1970) stack distances. That a part of the accesses, given all of the cache, does better
where the curve of hits is not concave is Talus (Beckmann and Sanchez, HPCA 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.partings import FADES, SLACK, Partings
from kvtier.geometry.keys import KeyArray
from kvtier.geometry.kinds import Kind
from kvtier.pools.block_pool import BlockPools, Col
from kvtier.remote.objects import KeptGroup

TEXTS = 4096
"""Texts that are remembered."""
NAMES = 1 << 20
"""Places for the names of their prefixes, 8 bytes each; a newer name may take an older one's place."""
NUMBER = np.uint64((1 << 24) - 1)
"""The part of a place that is its text's number; the rest is the name's."""
LOOK = 64
"""Units of a prompt that are looked up first. Of a text that was used lately, newer ones have taken few names."""
BINS_PER_OCTAVE = 4
EVIDENCE = 8
"""So many must have come back lately before anything is decided, and a quarter of all: what many share is found by
use."""
GAIN = 2.0
"""So many times as much must keeping some find, by the estimate, as keeping what was used last. The estimate knows
nothing of what is lost while others take the place of what was kept."""
UNUSED = 1.0
"""After so many times the cache's size of other texts, a text counts as one that nobody comes back to. It would have
gone by then, if all texts stayed."""
LOTTERY = 16
"""While only some are kept, one in so many of the others takes the place of one of them: what is kept stays current."""

NEVER = 2**40
"""No text has so many tokens."""

Bytes = npt.NDArray[np.float64]


class TextBytes:
    """What texts take in pools of these groups. Bytes by group are float64 [groups]."""

    def __init__(self, groups: Sequence[KeptGroup]) -> None:
        self._of_block = np.array([group.block_bytes for group in groups], np.float64)
        is_state = np.array([group.attention.kind is Kind.STATE for group in groups])
        self._of_token = self._of_block / np.where(is_state, 1, [group.block_tokens for group in groups])
        kinds = [(group.attention.kind, group.attention.span_tokens or NEVER) for group in groups]
        self._is_full = np.array([kind is Kind.FULL for kind, _ in kinds])
        self._chunk = np.array([span if kind is Kind.CHUNK else NEVER for kind, span in kinds])
        is_window = np.array([kind is Kind.WINDOW for kind, _ in kinds])
        self.slack = 0.0 if is_state.any() else SLACK * float(self._of_token[is_window].sum())
        """Bytes of SLACK tokens in all windows; 0 if hits end at states, which have no slack."""
        self.state = float(self._of_block[is_state].sum())
        """Bytes of one state in all groups."""
        self._full_token = float(self._of_token[self._is_full].sum())
        ends = Kind.WINDOW, Kind.STATE  # of a state one block, whatever its tokens
        self._window = np.array([max(1, span - 1) if kind in ends else NEVER for kind, span in kinds])

    def of(self, num_tokens: int) -> Bytes:
        """The bytes of a text, with the windows and chunks at its end."""
        of: Bytes = self._of_token * np.minimum(np.maximum(1, num_tokens % self._chunk), self._window)
        return of

    def full(self, num_tokens: int) -> float:
        """The bytes of a text in full attention."""
        return num_tokens * self._full_token

    def alone(self, num_tokens: int, shared: int) -> float:
        """The bytes of a text that shares its first tokens with other conversations."""
        return float((self.of(num_tokens) - self._of_token * self._is_full * shared).sum())

    def room(self, pools: BlockPools, each: Bytes, held: Any = 0) -> float:
        """Bytes for texts of which ``each`` group has such a part, beside the blocks that are ``held``, by group."""
        if pools.shared:
            slab = (pools.column(Col.PER_SLAB) * self._of_block).max()
            return float(len(pools.arrays.slabs) * slab - np.sum(held * self._of_block))
        room = (pools.usable - held) * self._of_block
        return float((room / each).min() * each.sum())


class Before(NamedTuple):
    """What a request has in common with an earlier text, whether or not its content is still there."""

    text: int = -1
    """The number of the newest text that begins so; -1 if there is none."""
    units: int = 0
    """Units of it."""
    goes_on: bool = False
    """There the text, or its prompt, ends. Else the two part there."""
    shared: int = 0
    """The units that other texts are known to begin with too."""
    early: int = 0
    """The two part so many tokens before the end of the text's prompt, where nobody was known to; else 0."""
    of_new: bool = False
    """The text had nothing in common with earlier ones."""
    behind: int = 0
    """The two part so many tokens behind the place at which the text has parted from another; else 0."""
    stem: int = 0
    """The units up to where the two part; 0 if the request goes on from the text."""


NOTHING = Before()
"""No text begins so."""


class Returns:
    """The texts that a cache has seen. Hits are whole *units* of ``hit_tokens``; each ``hash_tokens`` has a key.

    What it remembers of a text, in units:

        0        stem      common           prompt         end
        |---------|----------|----------------|-------------|
        |- lent --------|    |- nobody's but this text's ---|

        common    it began like an earlier text up to here
        stem      here it parted from that one: ``common``; if it went on from that one, that one's stem
        prompt    its prompt ends; goes_on: a request that begins like the text up to here, or a little less
        end       its answer ends: goes_on too, at the end
        lent      up to here it counts for a newer text, so that what texts share counts once: size = end - lent

    A request with *known* text t parts from it where their names differ. Beyond t's ``common`` it is the first to do
    so there. When it *ends*, it becomes a text itself. If it went on from t, all of t counts for it; else their stem
    does.
    """

    def __init__(self, sizes: TextBytes, hit_tokens: int, hash_tokens: int, whole: float = 0.0) -> None:
        """``whole``: bytes for texts if nothing runs; the greatest capacity so far, if that is more."""
        self._whole = whole
        self._sizes_of = sizes
        self._unit = hit_tokens
        self._links = hit_tokens // hash_tokens
        self._slack = SLACK // hit_tokens
        self._places = np.zeros(NAMES, np.uint64)  # names, and the newest texts that have them
        self._sizes: Bytes = np.zeros(TEXTS)
        self._prompt, self._end, self._common, self._stem, self._lent = np.zeros((5, TEXTS), np.int64)
        self._is_used = np.zeros(TEXTS, bool)  # whether more than its stem was asked for again
        self._count = 0  # texts so far
        self._first = np.zeros((TEXTS, 2), np.uint64)  # the keys of their first units
        self._oldest = 0  # of those that may still be asked for
        self.unused: list[bytes] = []
        """The first units of texts that are unused since the last request came."""
        self.partings = Partings()
        """Where others part from new texts."""
        self._asked = self._recent = 0.0  # requests, and those that have come back, fading
        self._found: Bytes = np.zeros(64 * BINS_PER_OCTAVE)  # units of prompts that came back, by distance

    def begin(
        self, keys: KeyArray, hit_units: int, capacity: float, size: float, before: Before | None = None
    ) -> tuple[bool, Before]:
        """A request with these keys begins; its hit has ``hit_units`` units. ``capacity``: bytes for texts beside what
        runs; ``size``: its own; ``before``: ``known(keys)``, if it was asked for. Returns whether it is a guest, and
        what it has in common with earlier texts."""
        before, num_units = self.known(keys) if before is None else before, len(keys) // self._links
        self._asked, self._recent = FADES * self._asked + 1, FADES * self._recent
        self._found *= FADES
        self._whole = max(self._whole, capacity)
        self._note_unused(before)
        self.partings.begin(size, not before.shared, before.stem > 0)
        if before.text < 0:
            is_there, fits = 2 * hit_units >= num_units > 0, False
            self._found[0] += hit_units  # of others' content: it was there, however far apart they came
        else:
            t, units = before.text % TEXTS, before.units
            alone = units - int(self._stem[t]) if before.goes_on else units  # little is lost with the rest
            is_there = 2 * (hit_units - units + alone) >= alone
            distance = self._used_since(before.text) + size
            fits = distance <= capacity  # what was used last would have found it: others come back later, not it
            self._recent += 1
            self._found[_bin_of(distance)] += units
            if fits:
                self.partings.find(units * self._unit, before.early, before.of_new, before.behind)
        return not is_there and not fits and self._keeps_some(capacity) and not self._wins(keys), before

    def known(self, keys: KeyArray) -> Before:
        """What a request with these keys has in common with an earlier text."""
        highs = keys[self._links - 1 :: self._links, 1]
        for first in (highs[:LOOK], highs) if len(highs) > 2 * LOOK else (highs,):  # a new prompt is soon seen to be
            found = self._places[(first % np.uint64(NAMES)).astype(np.int64)]
            is_known = found & ~NUMBER == first & ~NUMBER
            if not is_known.any():
                return NOTHING
            age = (np.uint64(self._count) - (found & NUMBER)) & NUMBER
            known = np.flatnonzero(is_known & (age > 0) & (age <= min(TEXTS, self._count)))
            if not len(known):
                return NOTHING
        units = int(known[-1]) + 1
        text = self._count - int(age[units - 1])
        prompt, end = int(self._prompt[text % TEXTS]), int(self._end[text % TEXTS])
        goes_on = prompt - self._slack <= units <= prompt or units >= end - max(1, 2 * self._slack)  # newer names may
        goes_on = goes_on and units > int(self._common[text % TEXTS])  # have taken the last places
        its_stem, common = int(self._stem[text % TEXTS]), int(self._common[text % TEXTS])
        early = max(0, prompt - units) * self._unit if units > common else 0
        if goes_on:
            return Before(text, units, goes_on, its_stem, early, not its_stem)
        behind = max(0, units - common) * self._unit if its_stem and its_stem == common else 0
        return Before(text, units, goes_on, units, early, not its_stem, behind, stem=units)

    def end(self, keys: KeyArray, prompt: int, end: int, before: Before) -> None:
        """A text has ended after ``end`` units, ``prompt`` of which were its prompt."""
        if not end:
            return
        t, p, alone, unit = self._count % TEXTS, before.text % TEXTS, self._sizes_of.alone, self._unit
        stem, lent = before.stem, 0
        if before.text >= max(0, self._count - TEXTS):
            lent = int(self._lent[p])
            if before.goes_on:
                stem, self._sizes[p] = int(self._stem[p]), 0
            elif stem > lent:
                moved = alone(end * unit, lent * unit) - alone(end * unit, stem * unit)
                self._sizes[p], self._lent[p] = max(0, self._sizes[p] - moved), stem
        self._sizes[t], self._is_used[t] = alone(end * unit, min(lent, end) * unit), False
        self._prompt[t], self._end[t], self._common[t] = prompt, end, before.units
        self._stem[t], self._lent[t], self._first[t] = stem, lent, keys[self._links - 1]
        highs = keys[self._links - 1 : end * self._links : self._links, 1]
        self._places[(highs % np.uint64(NAMES)).astype(np.int64)] = highs & ~NUMBER | np.uint64(self._count) & NUMBER
        self._count += 1

    def _note_unused(self, before: Before) -> None:
        """Notes the text that is asked for now, and those that are unused from now on."""
        t = before.text % TEXTS
        self.unused.clear()
        if before.text >= 0 and self._stem[t] < before.units:
            self._is_used[t] = True
        self._oldest = max(self._oldest, self._count - TEXTS)
        used = self._used_since(self._oldest)
        while self._oldest < self._count and used > UNUSED * self._whole:
            t, self._oldest = self._oldest % TEXTS, self._oldest + 1
            used -= float(self._sizes[self._oldest % TEXTS])
            if not self._is_used[t]:
                self.unused.append(self._first[t].tobytes())

    def _wins(self, keys: KeyArray) -> bool:
        """Whether the request is the one in LOTTERY that is kept, which its last key decides."""
        units = len(keys) // self._links
        return units > 0 and int(keys[units * self._links - 1, 1] >> np.uint64(32)) % LOTTERY == 0

    def _used_since(self, text: int) -> float:
        first, last = (text + 1) % TEXTS, self._count % TEXTS
        if first <= last:
            return float(self._sizes[first:last].sum())
        return float(self._sizes[first:].sum() + self._sizes[:last].sum())

    def _keeps_some(self, capacity: float) -> bool:
        """Whether keeping some conversations whole would find more than keeping what was used last."""
        if self._recent < max(EVIDENCE * FADES**EVIDENCE, self._asked / 4):
            return False
        within = np.cumsum(self._found)
        least = 2.0 ** (np.arange(len(within)) / BINS_PER_OCTAVE)  # each bin's least distance
        recent = within[max(0, _bin_of(max(1.0, capacity)) - 1)]
        some = (within * np.minimum(1.0, capacity / (least * 2.0 ** (1 / BINS_PER_OCTAVE)))).max()
        return bool(some > GAIN * recent and some > within[-1] / LOTTERY)


def _bin_of(distance: float) -> int:
    return min(64 * BINS_PER_OCTAVE - 1, int(np.log2(max(1.0, distance)) * BINS_PER_OCTAVE))
