"""The checksum of a payload that lies in pieces, as compiled loops that release the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import jit


@jit
def sum_words(words: Any, place: Any) -> Any:
    """The checksum of ``words``, a uint64 array, in a payload in which ``place`` words come before them.

    The sum over all pieces, mod 2^64, is the checksum of ADR 0014 of the payload as a whole, however it is cut.
    """
    golden, mix, half = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(32)
    total, key = np.uint64(0), np.uint64(place) * golden
    for i in range(np.uint64(len(words))):
        key += golden
        x = words[i] ^ key
        x = (x ^ (x >> half)) * mix
        x = (x ^ (x >> half)) * mix
        total += x ^ (x >> half)
    return total


@jit
def copy_words(words: Any, place: Any, target: Any) -> Any:
    """``sum_words`` that also copies to ``target``, of the same length. It takes no longer than a copy."""
    golden, mix, half = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(32)
    total, key = np.uint64(0), np.uint64(place) * golden
    for i in range(np.uint64(len(words))):
        key += golden
        word = words[i]
        target[i] = word
        x = word ^ key
        x = (x ^ (x >> half)) * mix
        x = (x ^ (x >> half)) * mix
        total += x ^ (x >> half)
    return total
