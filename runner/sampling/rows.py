"""The sampling parameters of running requests: a record for each row.

Owns       the records, and the state of each row's request.
Promises   a request is looked at when it gets its row. After that a batch is a choice of records.
Does not   choose tokens (``draw.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.errors import RunnerError
from runner.sampling.logits import are_edited
from runner.sampling.params import GREEDY_BELOW
from runner.sampling.state import SamplingState

RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("is_greedy", np.bool_),  # the largest logit is the only choice
        ("temperature", np.float32),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("top_k", np.int64),
        ("tells", np.bool_),  # logprobs were asked for
        ("logprobs", np.int64),  # how many of the likeliest tokens
        ("is_edited", np.bool_),  # its logits are changed first
        ("follows", np.bool_),  # something looks at each token that it takes
    ]
)

_HOTTEST, _MOST = float(np.finfo(np.float32).max), 2**62

Rows = npt.NDArray[np.integer[Any]]


class SamplingRows:
    """The sampling parameters of an engine with ``num_rows`` rows."""

    def __init__(self, num_rows: int) -> None:
        self.records = np.zeros(num_rows, RECORD)
        """[num_rows]; what no request has entered is zero."""
        self._states: list[SamplingState | None] = [None] * num_rows
        self.entered = 0
        """Requests that have got a row so far: while it is the same, the rows have the same requests."""

    def enter(self, row: int, state: SamplingState) -> bool:
        """The request of ``state`` has this row from now on; False if it has had it before."""
        if self._states[row] is state:
            return False
        params = state.params
        self._states[row] = state
        self.entered += 1
        self.records[row] = (
            state.seed,
            params.temperature < GREEDY_BELOW or params.top_k == 1,
            min(float(params.temperature), _HOTTEST),
            params.top_p,
            params.min_p,
            min(params.top_k, _MOST),
            params.logprobs is not None,
            params.logprobs or 0,
            are_edited(state),
            bool(state.followers),
        )
        return True

    def state(self, row: int) -> SamplingState:
        """The state of the request that has this row."""
        state = self._states[row]
        assert state is not None
        return state

    def take(self, rows: Rows, token_ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, RunnerError]]:
        """The requests of rows int [n] have taken these tokens. Yields the places of those that can take no more."""
        for place in np.flatnonzero(self.records["follows"][rows]).tolist():
            state = self.state(rows[place])
            state.take(int(token_ids[place]))
            if state.error is not None:
                yield place, state.error
