"""Whether conversations come back before they are pushed out. If most are pushed out just before, some are kept whole.

Content that went unused for longest goes first. A round of conversations that is a little too long for the cache then
finds nothing: each is pushed out just before its turn. To keep some of them whole, and to let the others go at once,
finds nearly as much as fits. How much would be found either way follows from the distances at which conversations come
back: the bytes of other texts that were used since.

Owns       the ends of the newest texts, their sizes in the order of use, and a fading histogram of distances.
Promises   distances are counted whether or not the content was still there, so that what is decided does not change
           them. Bounded memory; a request costs the same however much is remembered.
Does not   know blocks: a *guest* is a request whose content its callers give up first.

The distances are Mattson's (1970) stack distances. Talus (Beckmann and Sanchez, HPCA 2015) gives a part of the accesses
all of the cache: that does better where the curve of hits is not concave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.geometry.keys import KeyArray
from kvtier.pools.block_pool import BlockPools
from kvtier.remote.objects import KeptGroup

TEXTS = 4096
"""Texts whose sizes are remembered."""
NAMES = 1 << 16
"""Places for the names of their ends; a newer name may take an older one's place."""
BINS_PER_OCTAVE = 4
FADES = 0.99
"""The weight of the past after each request: some hundred count."""
EVIDENCE = 8
"""So many must have come back lately before anything is decided, and a quarter of all: what many share is found by
use."""
GAIN = 2.0
"""So many times as much must keeping some find, by the estimate, as keeping what was used last. The estimate knows
nothing of what is lost while others take the place of what was kept."""
LOTTERY = 16
"""While only some are kept, one in so many of the others takes the place of one of them: what is kept stays current."""

NEVER = 2**40
"""No text has so many tokens."""

Bytes = npt.NDArray[np.float64]


class TextBytes:
    """What texts take in pools of these groups. Bytes by group are float64 [groups]."""

    def __init__(self, groups: Sequence[KeptGroup]) -> None:
        self._of_block = np.array([group.block_bytes for group in groups], np.float64)
        self._of_token = self._of_block / [group.block_tokens for group in groups]
        self._spans = np.array([group.attention.span_tokens or NEVER for group in groups])

    def of(self, num_tokens: int) -> Bytes:
        """Of a text, with the windows and chunks at its end."""
        of: Bytes = self._of_token * np.minimum(num_tokens, self._spans)
        return of

    def alone(self, num_tokens: int, shared: int) -> float:
        """Of a text that shares its first tokens with other conversations."""
        return float((self.of(num_tokens) - self._of_token * np.where(self._spans == NEVER, shared, 0)).sum())

    def room(self, pools: BlockPools, each: Bytes, held: Any = 0) -> float:
        """For texts of which ``each`` group has such a part, beside the blocks that are ``held``, by group."""
        room = (pools.usable - held) * self._of_block
        return float(room.max() if pools.shared else (room / each).min() * each.sum())


class Returns:
    """Of one cache. A hit is a multiple of ``unit`` keys of a text's chain."""

    def __init__(self, links: int) -> None:
        self._links = links  # keys to a unit of hits
        self._names = np.zeros(NAMES, np.uint64)
        self._text_of = np.zeros(NAMES, np.int64)
        self._sizes: Bytes = np.zeros(TEXTS)
        self._shared = np.zeros(TEXTS, np.int64)  # units at their beginning that other conversations have too
        self._count = 0  # texts so far
        self._asked = self._recent = 0.0  # requests, and those that have come back, fading
        self._found: Bytes = np.zeros(64 * BINS_PER_OCTAVE)  # tokens of prompts that came back, by distance

    def begin(self, keys: KeyArray, hit_units: int, capacity: float, size: float) -> tuple[bool, int]:
        """A request with these keys begins; its hit has ``hit_units`` units. ``capacity``: bytes for texts; ``size``:
        its own. Returns whether it is a guest, and the number of the text that it goes on from, -1 if of none."""
        highs = keys[self._links - 1 :: self._links, 1]
        places = (highs % np.uint64(NAMES)).astype(np.int64)
        known = np.flatnonzero((self._names[places] == highs) & (self._text_of[places] >= self._count - TEXTS))
        self._asked, self._recent = FADES * self._asked + 1, FADES * self._recent
        self._found *= FADES
        if len(known):
            units, text = int(known[-1]) + 1, int(self._text_of[places[known[-1]]])
            is_there = hit_units - self.shared(text) >= (units - self.shared(text)) / 2  # else little is lost with it
            self._recent += 1
            self._found[_bin_of(self._used_since(text) + size)] += units
        else:
            text, is_there = -1, 2 * hit_units >= len(highs) > 0
            self._found[0] += hit_units  # of others' content: it was there, however far apart they came
        return not is_there and self._keeps_some(capacity) and not _wins(highs), text

    def shared(self, text: int) -> int:
        """Units at a text's beginning that other conversations have too."""
        return int(self._shared[text % TEXTS])

    def end(self, keys: KeyArray, ends: Iterable[int], size: float, before: int, shared: int = 0) -> None:
        """A text has ended. Later ones may go on from these ends, in units. ``size``: its bytes that no other
        conversation has; ``shared``: units that others have. ``before``: the text that it has gone on from, which it
        replaces."""
        if before >= max(0, self._count - TEXTS):
            self._sizes[before % TEXTS] = 0
        self._sizes[self._count % TEXTS] = size
        self._shared[self._count % TEXTS] = shared
        for units in ends:
            high = keys[units * self._links - 1, 1]
            self._names[int(high) % NAMES] = high
            self._text_of[int(high) % NAMES] = self._count
        self._count += 1

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


def _wins(highs: npt.NDArray[np.uint64]) -> bool:
    return len(highs) > 0 and int(highs[-1] >> np.uint64(32)) % LOTTERY == 0


def _bin_of(distance: float) -> int:
    return min(64 * BINS_PER_OCTAVE - 1, int(np.log2(max(1.0, distance)) * BINS_PER_OCTAVE))
