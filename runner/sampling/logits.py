"""Changes of logits before a token is chosen: masks, biases, penalties.

Owns       a batch's parameters about single tokens, as positions that last while the same requests are sampled
           together.
Promises   the given logits stay as they are. No step loops over rows or the vocabulary. A batch without such parameters
           has no ``Edits``.

In vLLM's order: grammar, ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``, penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.sampling.grammars.matching import Masks
from runner.sampling.penalties import Penalties
from runner.sampling.positions import positions
from runner.sampling.state import SamplingState

Edit = Callable[[Tensor, npt.NDArray[np.uint64]], None]
"""Changes logits float32 [n, vocab] in place, for requests that have taken uint64 [n] tokens."""

States = Mapping[int, SamplingState]
"""The requests with such parameters, by the rows of their logits."""

NEVER = -torch.inf


def are_edited(state: SamplingState) -> bool:
    """Whether a request's parameters may change its logits."""
    params = state.params
    is_held_back = bool(params.min_tokens and state.stop_ids)
    return bool(state.followers or params.logit_bias or is_held_back) or params.allowed_token_ids is not None


class Edits:
    """The edits of one batch, one after another."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = tuple(edits)

    @classmethod
    def of(cls, states: States, rows: int, vocabulary: int, device: torch.device) -> Edits | None:
        """The edits that parameters ask for, among ``rows`` rows of logits; None if they ask for nothing."""
        made = [make(states, rows, vocabulary, device) for make in (_grammars, _allowed, _banned, _held_back, _biased)]
        edits = [edit for edit in (*made, _penalised(states, vocabulary)) if edit is not None]
        return cls(edits) if edits else None

    def applied(self, logits: Tensor, drawn: npt.NDArray[np.uint64]) -> Tensor:
        """A changed copy of logits float32 [n, vocab]."""
        changed = logits.clone(memory_format=torch.contiguous_format)
        for edit in self._edits:
            edit(changed, drawn)
        return changed


def _grammars(states: States, rows: int, vocabulary: int, device: torch.device) -> Edit | None:
    matchers = {row: s.matcher for row, s in states.items() if s.matcher is not None}
    if not matchers:
        return None
    least = [states[row].params.min_tokens for row in matchers]
    stop_ids = [states[row].stop_ids for row in matchers]
    masks = Masks([*matchers.values()], rows - len(matchers), least, stop_ids, vocabulary)
    index, numbers = torch.tensor([*matchers], device=device), np.array([*matchers])
    is_all = len(matchers) == rows

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        forbidden = masks.forbidden(drawn[numbers]).to(device)
        if is_all:
            logits.masked_fill_(forbidden, NEVER)
        else:
            logits[index] = logits[index].masked_fill_(forbidden, NEVER)

    return edit


def _allowed(states: States, rows: int, vocabulary: int, device: torch.device) -> Edit | None:
    some = [row for row, s in states.items() if s.params.allowed_token_ids is not None]
    if not some:
        return None
    kept = _at(some, [states[row].params.allowed_token_ids or () for row in some], vocabulary, device)
    index = torch.tensor(some, device=device)

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        values = logits.view(-1)[kept]
        logits.index_fill_(0, index, NEVER)
        logits.view(-1)[kept] = values

    return edit


def _banned(states: States, rows: int, vocabulary: int, device: torch.device) -> Edit | None:
    bans = {row: s.ban for row, s in states.items() if s.ban is not None}
    if not bans:
        return None
    always = _at([*bans], [ban.always for ban in bans.values()], vocabulary, device)

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        now = _at([*bans], [ban.now for ban in bans.values()], vocabulary, device)
        logits.view(-1)[torch.cat([always, now])] = NEVER

    return edit


def _held_back(states: States, rows: int, vocabulary: int, device: torch.device) -> Edit | None:
    """``min_tokens``; a request with a grammar has it in its mask."""
    some = [row for row, s in states.items() if s.params.min_tokens and s.stop_ids and s.matcher is None]
    if not some:
        return None
    at = positions(some, [states[row].stop_ids for row in some], vocabulary)
    owner, least = at // vocabulary, np.zeros(rows, np.uint64)
    least[some] = [states[row].params.min_tokens for row in some]

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        due = at[(drawn < least)[owner]]
        if len(due):
            logits.view(-1)[torch.from_numpy(due).to(device)] = NEVER

    return edit


def _biased(states: States, rows: int, vocabulary: int, device: torch.device) -> Edit | None:
    biases = {row: s.params.logit_bias for row, s in states.items() if s.params.logit_bias}
    if not biases:
        return None
    known = [(row, {t: b for t, b in bias.items() if t < vocabulary}) for row, bias in biases.items()]
    at = _at([row for row, _ in known], [list(bias) for _, bias in known], vocabulary, device)
    values = torch.tensor([b for _, bias in known for b in bias.values()], dtype=torch.float32, device=device)

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        logits.view(-1)[at] += values

    return edit


def _penalised(states: States, vocabulary: int) -> Edit | None:
    tallied = [(row, s.params, s.tally) for row, s in states.items() if s.tally is not None]
    if not tallied:
        return None
    rows, params, tallies = zip(*tallied, strict=True)
    penalties = Penalties(rows, params, tallies, vocabulary)
    return lambda logits, drawn: penalties.apply(logits)


def _at(rows: Sequence[int], ids: Sequence[npt.ArrayLike], vocabulary: int, device: torch.device) -> Tensor:
    return torch.from_numpy(positions(rows, ids, vocabulary)).to(device)
