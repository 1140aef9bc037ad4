"""The model's own view of tokens: log-probabilities before penalties, biases, masks and temperature.

Promises   a row's numbers depend on its own logits, bit by bit. The best tokens come in the order of their logits,
           equal ones with the lowest id first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.sampling.weights import UNIT, by_chunks, chunk_masses, largest, rows_at_once, weigh


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of m tokens: each one's own number, and the k best in its place.

    ``ids`` int32 [m, k + 1] and ``logprobs`` float32 [m, k + 1]: the token itself first, then the best tokens, best
    first. So the token may stand there twice. ``ranks`` int32 [m]: the place of the token among all, 1 is the best.
    ``rows`` int64 [m]: the rows of the logits that they belong to. A row that asked for fewer than k uses only the
    first columns. Host arrays.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]

    def by_row(self) -> Iterator[tuple[int, TokenLogprobs]]:
        """One after another, with the row of the logits that it belongs to."""
        for i, row in enumerate(self.rows.tolist()):
            yield row, TokenLogprobs(self.ids[i], self.logprobs[i], int(self.ranks[i]))

    def among(self, places: npt.NDArray[np.int64]) -> Logprobs:
        """The logprobs of the rows at ``places``, int64 ascending, which are rows 0, 1 ... there."""
        rows = np.searchsorted(places, self.rows)
        kept = np.flatnonzero(np.isin(self.rows, places, assume_unique=True))
        return Logprobs(rows[kept], self.ids[kept], self.logprobs[kept], self.ranks[kept])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's numbers: ``ids`` int32 and ``logprobs`` float32, [k + 1] each as in ``Logprobs``, and its rank."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    rank: int


class PromptLogprobs:
    """The logprobs that a request wants of its prompt, and its progress with them."""

    def __init__(self, tokens: npt.NDArray[np.int32], k: int) -> None:
        """``tokens``: the prompt, int32 [n]; ``k``: how many to name beside each."""
        self._tokens, self._k = tokens, k
        self.told = 0
        """Positions whose logits were looked at; the last one's are for the first new token."""

    def positions(self, start: int, end: int) -> range:
        """The positions of a step whose logits are still wanted."""
        return range(max(start, self.told), min(end, len(self._tokens) - 1))

    def of(self, logits: Tensor) -> Iterator[TokenLogprobs]:
        """Log-probabilities of the next positions: logits float32 [m, vocab]."""
        following = torch.from_numpy(self._tokens[self.told + 1 : self.told + 1 + len(logits)].astype(np.int64))
        self.told += len(logits)
        for _, one in logprobs(logits, following.to(logits.device), self._k).by_row():
            yield one


def rows_of_prompts(step: Any, prompts: Mapping[str, PromptLogprobs]) -> list[tuple[str, npt.NDArray[np.int64]]]:
    """Requests that want logits of a step's prompt tokens, and the rows of these tokens, int64."""
    found = []
    starts, positions = np.asarray(step.query_start), np.asarray(step.positions)
    for entry in np.asarray(step.prefills).tolist():
        name = step.request_ids[entry]
        if name in prompts:
            first = int(positions[starts[entry]])
            wanted = prompts[name].positions(first, first + int(starts[entry + 1] - starts[entry]))
            if len(wanted):
                found.append((name, np.arange(len(wanted)) + int(starts[entry]) + wanted.start - first))
    return found


def logprobs(logits: Tensor, tokens: Tensor, k: int, rows: Tensor | None = None) -> Logprobs:
    """One token's for each row: logits float32 [n, vocab], tokens int64 [n], ``rows`` int64 [m] or None for all.

    Prompts: the logits of positions 0 .. n - 1 with the tokens of 1 .. n. ``k``: 0 .. vocab; more is taken as vocab.
    """
    device = logits.device
    rows = torch.arange(len(logits), device=device) if rows is None else rows
    at_once, k = rows_at_once(logits.shape[1], device), min(k, logits.shape[1])
    parts = [_of_slab(logits[some], tokens[some, None], k) for some in rows.split(at_once)]
    ids, values, ranks = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    return Logprobs(rows.cpu().numpy(), ids, values, ranks)


def _of_slab(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    values, ids = largest(logits, max(1, k))
    best, own = values[:, :1], logits.gather(1, tokens)
    total = chunk_masses(by_chunks(weigh(logits, best, torch.ones_like(best)), 0.0)).sum(dim=-1, keepdim=True)
    found = torch.cat([own, values[:, :k]], dim=1).double() - best.double() - (total.double() / UNIT).log()
    return torch.cat([tokens, ids[:, :k]], dim=1).int(), found.float(), _ranks(logits, tokens, own, ids).int()


def _ranks(logits: Tensor, tokens: Tensor, own: Tensor, best: Tensor) -> Tensor:
    """The places of tokens int64 [m, 1] with logits ``own`` [m, 1]; ``best`` int64 [m, k] are the first places."""
    is_own = best == tokens
    ranks = is_own.int().argmax(dim=-1) + 1
    others = (~is_own.any(dim=-1)).nonzero()[:, 0]
    if len(others):
        logits, tokens, own = logits[others], tokens[others], own[others]
        numbers = torch.arange(logits.shape[1], device=logits.device)
        ranks[others] = ((logits > own) | ((logits == own) & (numbers < tokens))).sum(dim=-1) + 1
    return ranks
