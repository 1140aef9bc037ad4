"""Bytes that are copied to where they belong and summed up in one pass, for backends that read by way of other memory.

Promises   the sum is that of ``envelope.checksum_of`` over all words in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.remote.backends.contract import Buffers
from kvtier.remote.sums import copy_words

WORD = 8
Words = npt.NDArray[np.uint64]


def words_of(buffers: Buffers) -> list[Words] | None:
    """The buffers as words; None if one is no whole, aligned words."""
    if any(len(piece) % WORD for piece in buffers):
        return None
    found = [np.frombuffer(piece, np.uint64) for piece in buffers if len(piece)]
    return found if all(words.flags.carray for words in found) else None


class Summing:
    """Fills the words of one object from its beginning. ``total`` grows with it."""

    def __init__(self, targets: Iterable[Words]) -> None:
        self._targets: Iterator[Words] = iter(targets)
        self._target = np.empty(0, np.uint64)
        self._place = 0
        self._total = 0

    def add(self, words: Words) -> None:
        """The next words."""
        at = 0
        while at < len(words):
            if not len(self._target):
                self._target = next(self._targets)
            count = min(len(self._target), len(words) - at)
            self._total += int(copy_words(words[at : at + count], self._place, self._target[:count]))
            self._target = self._target[count:]
            at, self._place = at + count, self._place + count

    @property
    def total(self) -> int:
        """The sum of all words so far."""
        return self._total & (2**64 - 1)
