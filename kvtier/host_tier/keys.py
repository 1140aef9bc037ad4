"""The keys of a text, of which its first ones are read first.

Owns       the keys that were read, and how the others are.
Promises   an array that was handed out never changes. No key is read twice.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtier.machine.arguments import NO_KEYS, KeyArray, check_function, joined_keys, key_array
from kvtier.machine.errors import InvalidRequest

Reads = Callable[[int, int], KeyArray]
"""Keys from one number up to another one, uint64 [n, 2]."""


class TextKeys:
    """``are_distinct``: whether any two are equal need not be looked at."""

    def __init__(self, are_distinct: bool) -> None:
        self._are_distinct = are_distinct
        self._buffer = NO_KEYS
        self._have = 0
        self._read: Reads | None = None
        self.count = 0
        """Keys in all."""

    def add(self, keys: KeyArray) -> None:
        """More keys, at the end. Raises ``InvalidRequest``."""
        self._buffer = joined_keys(self.first(self.count), keys, self._are_distinct)
        self._have = self.count = len(self._buffer)

    def announce(self, count: int, read: Reads) -> None:
        """There are ``count`` keys now. Raises ``InvalidRequest`` for fewer than before, or a ``read`` that is none."""
        check_function(read, "read")
        if count < self.count:
            raise InvalidRequest(f"count must be {self.count:,} keys, as before, or more, got {count:,}")
        self.count, self._read = count, read

    def first(self, count: int) -> KeyArray:
        """At least the first ``count`` keys, or all: uint64 [n, 2]. Raises ``InvalidRequest`` if ``read`` errs."""
        count = min(count, self.count)
        if count > self._have:
            assert self._read is not None, "keys that were announced"
            read = key_array(self._read(self._have, count), "what read gives", count - self._have)
            if count > len(self._buffer):
                larger = np.empty((max(count, 2 * len(self._buffer)), 2), np.uint64)
                larger[: self._have] = self._buffer[: self._have]
                self._buffer = larger
            self._buffer[self._have : count] = read
            self._have = count
        return self._buffer[: self._have]
