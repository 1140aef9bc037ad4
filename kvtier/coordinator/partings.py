"""How long before the end of a new prompt others part from it, and how much of its windows is kept for that.

A system prompt comes with a question behind it. So the second one to use it parts from the first some hundred tokens
before that prompt's end, and what windows would need there has passed. To keep the windows of a new prompt from so many
tokens before its end on, its *reach*, finds the second one too. It costs memory, which would find something else.

Both are measured in tokens found for a byte:

    value(reach) = what is found of new texts, if that is kept  /  bytes of new texts, with windows of that reach

The best reach is kept, if a byte finds LEAST times as much as one of the whole cache. Only what use alone would have
kept counts as found: one who comes back too late finds nothing.

A *new* text has nothing in common with earlier ones. Of others it is known where they part from each other.

Owns       fading sums: tokens found of new texts by distance from their end, of all texts, and the bytes of both.
Promises   pure: no table, no pool, no clock. What is decided does not change what is measured.
Does not   know blocks, nor names: ``Returns`` tells it what came back.
"""

from __future__ import annotations

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

    def begin(self, size: float, is_new: bool) -> None:
        """A text of so many bytes begins."""
        self._sums *= FADES
        self._sums[-3] += size
        if is_new:
            self._sums[-2:] += 1.0, size

    def find(self, tokens: int, early: int, of_new: bool) -> None:
        """A text begins with so many tokens of an earlier one, which use alone would have kept.

        ``early``: where it parts from that one, in tokens before the end of its prompt; 0 for its ends, and where
        somebody has parted before. ``of_new``: the earlier one was a new text.
        """
        self._sums[REACHES + 1] += tokens
        if of_new:
            octave = (early - 1) // SLACK
            self._sums[min(REACHES, octave.bit_length()) if early else REACHES] += tokens

    def reach(self, slack_bytes: float) -> int:
        """The reach of a new text that begins now, in tokens; 0 if it does not pay. ``slack_bytes``: what SLACK tokens
        take in all windows."""
        *early, at_ends, found, size, count, new_size = self._sums.tolist()
        if not count or not slack_bytes:
            return 0
        best, reach, sum_found = max(at_ends / new_size, LEAST * found / size), 0, at_ends
        for k, tokens in enumerate(early):
            sum_found += tokens
            value = sum_found / (new_size / count + slack_bytes * 2**k) / (count + DOUBT)
            if value > best:
                best, reach = value, SLACK << k
        return reach
