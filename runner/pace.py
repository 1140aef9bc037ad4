"""How long it takes to compute the tokens of a prompt, from the steps so far.

Owns       a fit of seconds to tokens and to pairs of tokens that attend to each other.
Does not   count decode steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KEPT = 0.98
"""The weight of the past after each step: some fifty steps count."""


class Pace:
    """Written by the engine's thread; any thread may ask."""

    def __init__(self) -> None:
        self._products = np.zeros((2, 2))
        self._sums = np.zeros(2)
        self._total = np.zeros(2)  # tokens, seconds

    def note(self, lengths: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], seconds: float) -> None:
        """A step has computed ``lengths[i]`` tokens of texts up to token ``ends[i]``; both [n]."""
        tokens = float(lengths.sum())
        pairs = float((lengths * (ends - lengths / 2)).sum())
        features = np.array([tokens, pairs]) / tokens  # a long step says no more of a token's time than a short one
        self._products = KEPT * self._products + np.outer(features, features)
        self._sums = KEPT * self._sums + features * (seconds / tokens)
        self._total = KEPT * self._total + (tokens, seconds)

    def seconds(self, start: int, end: int) -> float | None:
        """About how long tokens ``start`` to ``end`` of a prompt take; None before the first prompt."""
        tokens, took = self._total.tolist()
        if not tokens:
            return None
        wanted = np.array([end - start, (end**2 - start**2) / 2], float)
        products = self._products
        if np.linalg.cond(products) < 1e12:
            found = np.linalg.solve(products, self._sums)
            if (found >= 0).all():
                return float(wanted @ found)
        return float(wanted[0] * took / tokens)
