"""The last minutes of a server in numbers, so that a page that opens later has a past.

Promises   a fixed piece of memory, whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KEPT = 600
"""Rows: ten minutes, one a second."""


class History:
    """A ring of rows of ``width`` integers."""

    def __init__(self, width: int, kept: int = KEPT) -> None:
        self._rows = np.zeros((kept, width), np.int64)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._rows))

    @property
    def kept(self) -> int:
        """Rows, at most."""
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the history's memory."""
        return self._rows.nbytes

    def add(self, row: Sequence[int]) -> None:
        """The newest row; the oldest one goes."""
        self._rows[self._count % len(self._rows)] = row
        self._count += 1

    def columns(self) -> list[list[int]]:
        """The history by column, oldest first."""
        start = self._count % len(self._rows) if self._count > len(self._rows) else 0
        found: list[list[int]] = np.roll(self._rows[: len(self)], -start, axis=0).T.tolist()
        return found
