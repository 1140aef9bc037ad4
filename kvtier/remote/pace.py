"""How long it takes to compute the tokens of a prompt, from the steps so far.

Owns       a fit of a step's seconds to a constant, its tokens, and its pairs of tokens that attend to each other.
Does not   count decode steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KEPT = 0.98
"""The weight of the past after each step: some fifty steps count."""
ROUNDING = 1e-9
"""A share of a step's time that is no more than this, of the largest, is nothing; so it may be below zero."""
_FITS = ([0, 1, 2], [0, 1], [1, 2], [1])
"""Sets of features, of which the first is taken that fits with nothing negative."""


class Pace:
    """Written by the engine's thread; any thread may ask."""

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._most_tokens = 1.0

    def note(self, lengths: npt.NDArray[np.integer], ends: npt.NDArray[np.integer], seconds: float) -> None:
        """A step has computed ``lengths[i]`` tokens of texts up to token ``ends[i]``; both [n]."""
        tokens = float(lengths.sum())
        step = np.array([1.0, tokens, float((lengths * (ends - lengths / 2)).sum())])
        self._products = KEPT * self._products + np.outer(step, step)
        self._sums = KEPT * self._sums + step * seconds
        self._most_tokens = max(tokens, self._most_tokens)

    def seconds(self, start: int, end: int) -> float | None:
        """About how long tokens ``start`` to ``end`` of a prompt take alone; None before the first prompt."""
        products, sums = self._products, self._sums
        if not products[1, 1]:
            return None
        steps = max(1.0, (end - start) / self._most_tokens)
        wanted = np.array([steps, end - start, (end**2 - start**2) / 2])
        for chosen in _FITS:
            scale = np.sqrt(np.diag(products)[chosen])
            scaled = products[np.ix_(chosen, chosen)] / np.outer(scale, scale)
            if np.linalg.cond(scaled) < 1e6:
                found = np.linalg.solve(scaled, sums[chosen] / scale)
                if (found >= -ROUNDING * found.max()).all():
                    return float(wanted[chosen] @ (np.maximum(found, 0.0) / scale))
        return float(wanted[1] * sums[1] / products[1, 1])
