"""What the model itself says of tokens: log-probabilities before penalties, biases, masks and temperature.

Promises   a row's numbers depend on its own logits, bit by bit; the best tokens come in the order of their logits, of
           equal ones the lowest id first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.weights import UNIT, by_chunks, chunk_masses, largest, rows_at_once, weigh


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of m tokens: each one's own number, and the k best in its place.

    ``ids`` int32 [m, k + 1] and ``logprobs`` float32 [m, k + 1]: the token first, then the best, the best first; so the
    token may stand there twice. ``ranks`` int32 [m]: the place of the token among all, 1 is the best. ``rows`` int64
    [m]: the rows of the logits that they belong to. Of a row that asked for fewer than k, the first ones are what it
    asked for. Host arrays.
    """

    rows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]


def logprobs(logits: Tensor, tokens: Tensor, k: int, rows: Tensor | None = None) -> Logprobs:
    """Of one token for each row: logits float32 [n, vocab], tokens int64 [n], ``rows`` int64 [m] or None for all.

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
