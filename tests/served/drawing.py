"""Requests that are sampled without an engine that gives them rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from runner.sampling.draw import Chosen, Sampler
from runner.sampling.state import SamplingState

ROWS = 1000


class Drawing:
    """A sampler whose requests get rows as they come, and the tokens that each has taken."""

    def __init__(self, rows: int = ROWS) -> None:
        self.sampler = Sampler(rows)
        self.drawn: dict[SamplingState, int] = {}
        self._row: dict[SamplingState, int] = {}

    def choose(self, logits: Tensor, states: Sequence[SamplingState]) -> Chosen:
        """The next token of each."""
        for state in states:
            row = self._row.setdefault(state, len(self._row))
            self.sampler.rows.enter(row, state)
        return self.sampler.choose(logits, np.array([self._row[state] for state in states]), self.counts(states))

    def counts(self, states: Sequence[SamplingState]) -> np.ndarray:
        """The tokens that each has taken, uint64 [n]."""
        return np.array([self.drawn.get(state, 0) for state in states], np.uint64)

    def take(self, state: SamplingState, token: int) -> None:
        """The request takes this token."""
        self.drawn[state] = self.drawn.get(state, 0) + 1
        state.take(token)


def choose(logits: Tensor, states: Sequence[SamplingState]) -> Chosen:
    """The next token of each of some new requests."""
    return Drawing(len(states)).choose(logits, states)
