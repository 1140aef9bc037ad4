"""The step that is being made: which rows compute up to which token, and the arrays of the step.

Owns       the arrays that a ``Step`` hands out; every step reuses them.
Promises   a row has one entry at most; entries are in service order. Keeps I16.
Does not   decide which request computes what (scheduler, admission).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.plan import fill_step
from kvtier.coordinator.roster import Roster
from kvtier.coordinator.step import Arrays, Step
from kvtier.gpu_pool.block_table import BlockTables
from kvtier.gpu_pool.exports import Exports


class Due(NamedTuple):
    """The input of a commit. The engine was given copies: its changes to them have no effect."""

    rows: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int32]
    """Which entries are sampled."""


class Entries:
    """Entries of one scheduler's steps: ``max_running`` of them and ``max_batched_tokens`` tokens at most."""

    def __init__(self, num_groups: int, max_running: int, max_batched_tokens: int) -> None:
        self._max_tokens = max_batched_tokens
        self._count = 0
        self._tokens = 0
        self._takes = 0
        self.placed = np.zeros(max_running, np.uint8)
        """[max_running] 1 for rows that have their place in this step, or sit it out."""
        self._rows = np.empty(max_running, np.int32)
        self._ends = np.empty(max_running, np.int64)
        self._samples = np.empty(max_running, np.int32)
        self.prefills: list[int] = []
        """Entries of the last step made that compute tokens of a prompt."""
        self._arrays = Arrays(
            rows=np.empty(max_running, np.int32),
            starts=np.empty(max_running, np.int64),
            seq_lens=np.empty(max_running, np.int64),
            token_ids=np.empty(max_batched_tokens, np.int64),
            positions=np.empty(max_batched_tokens, np.int64),
            query_start=np.empty(max_running + 1, np.int32),
            sample_rows=np.empty(max_running, np.int32),
            prefills=np.empty(max_running, np.int32),
        )
        self._handed_out = (-1, 0, 0, 0), self._arrays
        self.due = Due(self._rows, self._ends, self._samples)
        """The rows, ends and samples of the last step made."""
        self._exports = Exports(num_groups, max_running, max_batched_tokens)

    def clear(self) -> None:
        """Begins a new step."""
        self._count = self._tokens = self._takes = 0
        self.placed.fill(0)

    @property
    def budget(self) -> int:
        """Tokens that the step still has room for."""
        return self._max_tokens - self._tokens

    @property
    def chunk_tokens(self) -> int:
        """Tokens beyond one for each entry: the tokens of prompt chunks, however many requests decode."""
        return self._tokens - self._count

    def rest(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The free places of further rows and ends; ``take`` makes them entries."""
        return self._rows[self._count :], self._ends[self._count :]

    def take(self, count: int, tokens: int) -> None:
        """The first ``count`` of ``rest``, marked in ``placed``, are entries now and compute ``tokens`` tokens."""
        self._count += count
        self._tokens += tokens
        self._takes += 1

    def step(self, tables: BlockTables, roster: Roster) -> Step:
        """The step of these entries."""
        n, made = self._count, self._arrays
        rows, ends = self._rows[:n], self._ends[:n]
        if self._takes > 1:
            self._sort(rows, ends, roster.rows())
        num_sampled, num_prefills, longest = fill_step(tables.arrays.state, rows, ends, self._samples, *made)
        self.prefills = made.prefills[:num_prefills].tolist()
        for k in self.prefills:
            tokens = roster.of_row(rows[k]).tokens
            at = slice(made.query_start[k], made.query_start[k + 1])
            made.token_ids[at] = tokens[made.starts[k] : ends[k]]
        ids = roster.names() if n == len(roster.running) else roster.ids(rows)
        return Step(tables, self._exports, ids, self._cut(n, self._tokens, num_sampled, num_prefills), longest)

    def _cut(self, n: int, tokens: int, sampled: int, prefills: int) -> Arrays:
        """The arrays in these lengths; the last step's arrays if the lengths are the same."""
        lengths = n, tokens, sampled, prefills
        if lengths != self._handed_out[0]:
            made = self._arrays
            cut = Arrays(
                rows=made.rows[:n],
                starts=made.starts[:n],
                seq_lens=made.seq_lens[:n],
                token_ids=made.token_ids[:tokens],
                positions=made.positions[:tokens],
                query_start=made.query_start[: n + 1],
                sample_rows=made.sample_rows[:sampled],
                prefills=made.prefills[:prefills],
            )
            self._handed_out = lengths, cut
            self.due = Due(self._rows[:n], self._ends[:n], self._samples[:sampled])
        return self._handed_out[1]

    def _sort(self, rows: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], order: npt.NDArray[np.int32]) -> None:
        """Puts the entries into service order, the order of all running rows. Entries of one ``take`` are in it
        already."""
        rank = np.empty(len(self.placed), np.int64)
        rank[order] = np.arange(len(order))
        ranks = rank[rows]
        if np.any(ranks[1:] < ranks[:-1]):
            by_rank = np.argsort(ranks)
            rows[:], ends[:] = rows[by_rank], ends[by_rank]
