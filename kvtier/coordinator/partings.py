"""How long before a new prompt's end, or behind a stem, others part from a text, and how much is kept for that.

A system prompt comes with a question behind it. So the second one to use it parts from the first some hundred tokens
before that prompt's end, and what windows would need there has passed. To keep the windows of a new prompt from so many
tokens before its end on, its *reach*, finds the second one too. It costs memory, which would find something else.

Both are measured in tokens found for a byte:

    value(reach) = what is found of new texts, if that is kept  /  bytes of new texts, with windows of that reach

The best reach is kept, if a byte finds LEAST times as much as one of the whole cache. Only what use alone would have
kept counts as found: one who comes back too late finds nothing.

A *new* text has nothing in common with earlier ones. Of others it is known where they part from each other. One more
may part from them a little later: a document behind a system prompt, asked about again. How far *behind* a stem content
stays is measured in the same way.

Owns       fading sums: tokens found of new texts by distance from their end, behind stems by distance from these, and
           of all texts; and the bytes of new texts and of all.
Promises   pure: no table, no pool, no clock. What is decided does not change what is measured.
Does not   know blocks, nor names: ``Returns`` tells it what came back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FADES = 0.99
"""The weight of the past after each request: some hundred count."""
SLACK = 64
"""Tokens before the end of a prompt that a hit may end at too. A template writes the last of them anew: the header of
the next answer, its thinking. That is some ten tokens, forty at most. A reach is this times a power of two."""
REACHES = 6
"""Reaches that are compared: up to 2,048 tokens, twice the longest window in use."""
LEAST = 0.25
"""About what one more byte of the cache would find, as a share of what a byte finds on average. A cache twice as large
mostly finds a quarter to a third more."""
DOUBT = 2.0
"""New texts of which nothing was found, before anything is known."""


class Partings:
    """What partings have found, in one cache."""

    def __init__(self) -> None:
        # tokens found of new texts, by the shortest reach that finds them and, last, at their ends; tokens found of
        # all texts; bytes of all texts; new texts, and their bytes
        self._sums = np.zeros(REACHES + 5)
        # tokens found behind stems, by the shortest distance that finds them; texts that have a stem
        self._behind = np.zeros(REACHES + 1)

    def begin(self, size: float, is_new: bool, has_stem: bool) -> None:
        """A text of so many bytes begins. ``has_stem``: it parts from an earlier one."""
        self._sums *= FADES
        self._behind *= FADES
        self._behind[-1] += has_stem
        self._sums[-3] += size
        if is_new:
            self._sums[-2:] += 1.0, size

    def find(self, tokens: int, early: int, of_new: bool, behind: int = 0) -> None:
        """A text begins with so many tokens of an earlier one, which use alone would have kept.

        ``early``: where it parts from that one, in tokens before the end of its prompt; 0 for its ends, and where
        somebody has parted before. ``of_new``: the earlier one was a new text. ``behind``: where it parts from that
        one, in tokens behind that one's stem; 0 if it goes on from it.
        """
        self._sums[REACHES + 1] += tokens
        if behind and (octave := _octave(behind)) < REACHES:
            self._behind[octave] += behind
        if of_new:
            self._sums[min(REACHES, _octave(early)) if early else REACHES] += tokens

    def reach(self, slack_bytes: float) -> int:
        """The reach of a new text that begins now, in tokens; 0 if it does not pay. ``slack_bytes``: what SLACK tokens
        take in all windows."""
        *early, at_ends, found, size, count, new_size = self._sums.tolist()
        if not count or not slack_bytes or not any(early):
            return 0
        least = max(at_ends / new_size, LEAST * found / size)
        return _best(early, at_ends, new_size / count, slack_bytes, count, least)

    def behind(self, slack_bytes: float) -> int:
        """How many tokens behind its stem a text's content stays, for others who part from it there; 0 if it does not
        pay. ``slack_bytes``: what SLACK tokens of it take.
        """
        *found, count = self._behind.tolist()
        if not count or not slack_bytes or not any(found):
            return 0
        least = LEAST * float(self._sums[REACHES + 1]) / float(self._sums[-3])
        return _best(found, 0.0, 0.0, slack_bytes, count, least)


def _octave(tokens: int) -> int:
    """Of the least reach that has so many tokens."""
    return ((tokens - 1) // SLACK).bit_length()


def _best(found: Sequence[float], always: float, each: float, slack_bytes: float, count: float, least: float) -> int:
    """The reach that finds most for a byte, if that is more than ``least``.

    found[k]: tokens found with a reach of SLACK << k and none shorter, ``always``: with any. ``each``: bytes of one of
    ``count`` texts without a reach.
    """
    best, reach, sum_found = least, 0, always
    for k, tokens in enumerate(found):
        sum_found += tokens
        value = sum_found / (each + slack_bytes * 2**k) / (count + DOUBT)
        if value > best:
            best, reach = value, SLACK << k
    return reach
