"""Changes of logits before a token is chosen: masks, biases, penalties.

Owns       a batch's parameters about single tokens, as positions that last while the same requests are sampled
           together.
Promises   the given logits stay as they are. No step loops over rows or the vocabulary. A batch without such parameters
           has no ``Edits``.

In vLLM's order: grammar, ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``, penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

NEVER = -torch.inf


class Edits:
    """The edits of one batch, one after another."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = tuple(edits)

    @classmethod
    def of(cls, states: Sequence[SamplingState], vocabulary: int, device: torch.device) -> Edits | None:
        """The edits that the states' parameters ask for; None if they ask for nothing."""
        found = [make(states, vocabulary, device) for make in (_grammars, _allowed, _banned, _held_back, _biased)]
        edits = [edit for edit in (*found, _penalised(states, vocabulary)) if edit is not None]
        return cls(edits) if edits else None

    def applied(self, logits: Tensor, drawn: npt.NDArray[np.uint64]) -> Tensor:
        """A changed copy of logits float32 [n, vocab]."""
        changed = logits.clone(memory_format=torch.contiguous_format)
        for edit in self._edits:
            edit(changed, drawn)
        return changed


def _grammars(states: Sequence[SamplingState], vocabulary: int, device: torch.device) -> Edit | None:
    held = [(row, s.matcher) for row, s in enumerate(states) if s.matcher is not None]
    if not held:
        return None
    rows, matchers = zip(*held, strict=True)
    least = [states[row].params.min_tokens for row in rows]
    masks = Masks(matchers, len(states) - len(rows), least, [states[row].stop_ids for row in rows], vocabulary)
    index, numbers = torch.tensor(rows, device=device), np.array(rows)
    is_all = len(rows) == len(states)

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        forbidden = masks.forbidden(drawn[numbers]).to(device)
        if is_all:
            logits.masked_fill_(forbidden, NEVER)
        else:
            logits[index] = logits[index].masked_fill_(forbidden, NEVER)

    return edit


def _allowed(states: Sequence[SamplingState], vocabulary: int, device: torch.device) -> Edit | None:
    rows = [row for row, s in enumerate(states) if s.params.allowed_token_ids is not None]
    if not rows:
        return None
    kept = _at(rows, [states[row].params.allowed_token_ids or () for row in rows], vocabulary, device)
    index = torch.tensor(rows, device=device)

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        values = logits.view(-1)[kept]
        logits.index_fill_(0, index, NEVER)
        logits.view(-1)[kept] = values

    return edit


def _banned(states: Sequence[SamplingState], vocabulary: int, device: torch.device) -> Edit | None:
    bans = [(row, s.ban) for row, s in enumerate(states) if s.ban is not None]
    if not bans:
        return None
    rows = [row for row, _ in bans]
    always = _at(rows, [ban.always for _, ban in bans], vocabulary, device)

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        now = _at(rows, [ban.now for _, ban in bans], vocabulary, device)
        logits.view(-1)[torch.cat([always, now])] = NEVER

    return edit


def _held_back(states: Sequence[SamplingState], vocabulary: int, device: torch.device) -> Edit | None:
    """``min_tokens``; a request with a grammar has it in its mask."""
    rows = [row for row, s in enumerate(states) if s.params.min_tokens and s.stop_ids and s.matcher is None]
    if not rows:
        return None
    at = positions(rows, [states[row].stop_ids for row in rows], vocabulary)
    owner = at // vocabulary
    least = np.array([s.params.min_tokens for s in states], np.uint64)

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        due = at[(drawn < least)[owner]]
        if len(due):
            logits.view(-1)[torch.from_numpy(due).to(device)] = NEVER

    return edit


def _biased(states: Sequence[SamplingState], vocabulary: int, device: torch.device) -> Edit | None:
    biases = [(row, s.params.logit_bias) for row, s in enumerate(states) if s.params.logit_bias]
    if not biases:
        return None
    known = [(row, {t: b for t, b in bias.items() if t < vocabulary}) for row, bias in biases]
    at = _at([row for row, _ in known], [list(bias) for _, bias in known], vocabulary, device)
    values = torch.tensor([b for _, bias in known for b in bias.values()], dtype=torch.float32, device=device)

    def edit(logits: Tensor, drawn: npt.NDArray[np.uint64]) -> None:
        logits.view(-1)[at] += values

    return edit


def _penalised(states: Sequence[SamplingState], vocabulary: int) -> Edit | None:
    tallied = [(row, s.params, s.tally) for row, s in enumerate(states) if s.tally is not None]
    if not tallied:
        return None
    rows, params, tallies = zip(*tallied, strict=True)
    penalties = Penalties(rows, params, tallies, vocabulary)
    return lambda logits, drawn: penalties.apply(logits)


def _at(rows: Sequence[int], ids: Sequence[npt.ArrayLike], vocabulary: int, device: torch.device) -> Tensor:
    return torch.from_numpy(positions(rows, ids, vocabulary)).to(device)
