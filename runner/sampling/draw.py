"""The choice of a batch's next tokens, all rows at once.

Owns       a batch's sampling parameters, as arrays that last while the same requests are sampled together.
Promises   a row's token depends on its own logits and state, bit by bit. It depends neither on the rows beside it, nor
           on its place among them, nor on a step that failed. A row that cannot be sampled harms no other row.
Does not   sort the vocabulary, or loop over rows or tokens.

``top_p`` draws from all tokens, and draws anew among likelier tokens if the token lies outside the nucleus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.attention.kernels import words
from runner.errors import NonFiniteLogits, NoTokenAllowed, RunnerError
from runner.sampling.logits import Edits
from runner.sampling.logprobs import Logprobs, logprobs
from runner.sampling.params import GREEDY_BELOW, SamplingParams
from runner.sampling.state import SamplingState
from runner.sampling.weights import CHUNK, UNIT, by_chunks, chunk_masses, largest, rows_at_once, weigh

__all__ = ["Chosen", "Sampler", "SamplingState"]

Uniforms = Callable[[int], Tensor]
"""Attempt -> a number in [0, 1) for each row, float64 [rows, 1]."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The next token of each row.

    ``ids`` int64 [n], and ``sound`` bool [n]: whether it can be taken; an id is 0 if not. ``logprobs``: of the rows
    that asked for them, None if none did.
    """

    ids: Tensor
    sound: Tensor
    logprobs: Logprobs | None
    _logits: Tensor
    _states: tuple[SamplingState, ...]

    def on_host(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """``ids`` and ``sound``, once they are known; brought over together."""
        marked = words.fetched(self.ids.where(self.sound, -1)).numpy()
        return np.maximum(marked, 0), marked >= 0

    def why(self, row: int, dtype: object) -> RunnerError:
        """The reason that a row is not sound; before the logits are written anew. ``dtype``: the model's."""
        error = self._states[row].error
        if error is not None:
            return error
        if self._logits[row].max().isfinite():
            return NoTokenAllowed("the options of this request leave no token that could come next")
        return NonFiniteLogits(dtype)


class Sampler:
    """Chooses the next tokens of one batch after another."""

    def __init__(self) -> None:
        self._batch: SamplingBatch | None = None

    def choose(self, logits: Tensor, states: Sequence[SamplingState]) -> Chosen:
        """The next token of each row, and whether there is one.

        logits float32 [n, vocab] with n >= 1, one state a row -> on the logits' device. Logits and states stay as they
        are. A token at -inf is never drawn. A row with a NaN, with +inf or with nothing but -inf is not sound.
        """
        if self._batch is None or not self._batch.serves(logits, states):
            self._batch = SamplingBatch(states, logits.shape[1], logits.device)
        return self._batch.choose(logits)


class SamplingBatch:
    """The parameters of requests that are sampled together."""

    def __init__(self, states: Sequence[SamplingState], vocabulary: int, device: torch.device) -> None:
        self._states = tuple(states)
        self._vocabulary, self._device = vocabulary, device
        self._seeds = np.array([state.seed for state in states], np.uint64)
        alike: dict[_Way, list[int]] = {}
        for row, state in enumerate(states):
            way = _way(state.params, vocabulary)
            if way is not None:
                alike.setdefault(way, []).append(row)
        slab = rows_at_once(vocabulary, device)
        self._groups = [
            (way, _Rows(rows[i : i + slab], self._states, device))
            for way, rows in alike.items()
            for i in range(0, len(rows), slab)
        ]
        self._edits = Edits.of(states, vocabulary, device)
        asked = [(row, k) for row, state in enumerate(states) if (k := state.params.logprobs) is not None]
        self._most_logprobs = max((k for _, k in asked), default=0)
        self._asked = torch.tensor([row for row, _ in asked], device=device) if asked else None

    def serves(self, logits: Tensor, states: Sequence[SamplingState]) -> bool:
        """Whether the arrays are of these requests, in this order."""
        return (
            len(states) == len(self._states)
            and all(a is b for a, b in zip(states, self._states, strict=True))
            and (self._vocabulary, self._device) == (logits.shape[1], logits.device)
        )

    def choose(self, given: Tensor) -> Chosen:
        """Chooses a token for each row, as ``Sampler.choose`` does."""
        drawn = np.array([state.drawn for state in self._states], np.uint64)
        logits = given if self._edits is None else self._edits.applied(given, drawn)
        ids = logits.argmax(dim=-1, keepdim=True)
        best = logits.gather(1, ids)  # a NaN counts as the largest, then +inf; -inf is here only if all are
        sound = best.isfinite()
        for way, group in self._groups:
            uniforms = partial(_uniforms, self._seeds[group.rows], drawn[group.rows], self._device)
            at = group.index
            ids[at] = way(logits[at], best[at], sound[at], group, uniforms)
        ids, sound = ids.where(sound, 0)[:, 0], sound[:, 0]
        told = None if self._asked is None else logprobs(given, ids, self._most_logprobs, self._asked)
        return Chosen(ids, sound, told, given, self._states)


class _Rows:
    """Rows that are drawn in the same way, with their parameters as columns [m, 1]."""

    def __init__(self, rows: list[int], states: Sequence[SamplingState], device: torch.device) -> None:
        params = [states[row].params for row in rows]
        hottest = torch.finfo(torch.float32).max
        temperature = torch.tensor([[min(float(p.temperature), hottest)] for p in params], dtype=torch.float32)
        self.rows = np.array(rows)
        self.index = slice(None) if len(rows) == len(states) else torch.tensor(rows, device=device)
        self.temperature = temperature.to(device)
        self.top_p = torch.tensor([[float(p.top_p)] for p in params], dtype=torch.float64, device=device)
        self.min_p = None
        if any(p.min_p > 0 for p in params):
            self.min_p = torch.tensor([[float(p.min_p)] for p in params], dtype=torch.float32, device=device)
        self.most = max(p.top_k for p in params)
        self.top_k = torch.tensor([[min(p.top_k, 2**62)] for p in params], device=device)


_Way = Callable[[Tensor, Tensor, Tensor, _Rows, Uniforms], Tensor]
"""logits float32 [m, vocab], the largest of each row [m, 1], whether it is sound bool [m, 1] -> ids int64 [m, 1]."""


def _way(params: SamplingParams, vocabulary: int) -> _Way | None:
    """How to draw from its row; None if the largest logit is the only choice."""
    if params.temperature < GREEDY_BELOW or params.top_k == 1:
        return None
    if 0 < params.top_k < vocabulary:
        return _among_best
    return _in_nucleus if params.top_p < 1 else _from_all


def _from_all(logits: Tensor, best: Tensor, sound: Tensor, given: _Rows, uniforms: Uniforms) -> Tensor:
    weights = by_chunks(_weights(logits, best, given), 0.0)
    return _locate(weights, chunk_masses(weights), uniforms(0))


def _among_best(logits: Tensor, best: Tensor, sound: Tensor, given: _Rows, uniforms: Uniforms) -> Tensor:
    """Draws from the best ``top_k``, or from the part of them in the ``top_p`` nucleus."""
    values, ids = largest(logits, given.most)
    weights = (_weights(values, best, given) * UNIT).long()
    weights.masked_fill_(torch.arange(given.most, device=ids.device) >= given.top_k, 0)
    upto = weights.cumsum(dim=-1)
    weights.masked_fill_((upto - weights >= given.top_p * upto[:, -1:]) & (given.top_p < 1), 0)
    return ids.gather(1, _pick(weights, uniforms(0))[0])


def _in_nucleus(logits: Tensor, best: Tensor, sound: Tensor, given: _Rows, uniforms: Uniforms) -> Tensor:
    """Draws from all, and anew if the token lies outside the nucleus, until none does.

    Tokens stand in the order of their logits, equal ones in the order of their ids. A token is in the nucleus if all
    tokens before it together weigh less than ``top_p`` of the whole. If a token is outside, so are all later tokens. So
    the next attempt draws from the tokens before it, among which the nucleus still has its proportions.
    """
    weights = by_chunks(_weights(logits, best, given), 0.0)
    masses = chunk_masses(weights)
    limit = given.top_p * masses.sum(dim=-1, keepdim=True)
    chosen = ids = _locate(weights, masses, uniforms(0)).clamp_(max=logits.shape[1] - 1)  # any, if it is not sound
    rows = torch.arange(len(ids), device=ids.device)
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=ids.device)
    for attempt in count(1):
        edge = logits.gather(1, ids)
        before = (logits == edge) & (tokens < ids.int())
        before |= logits > edge
        weights[:, : logits.shape[1]] *= before
        masses = chunk_masses(weights)
        outside = ((masses.sum(dim=-1, keepdim=True) >= limit) & sound)[:, 0].nonzero()[:, 0]
        if not len(outside):
            break
        rows, logits, weights, limit, sound = (x[outside] for x in (rows, logits, weights, limit, sound))
        ids = _locate(weights, masses[outside], uniforms(attempt)[rows])
        chosen[rows] = ids
    return chosen


def _weights(logits: Tensor, best: Tensor, given: _Rows) -> Tensor:
    weights = weigh(logits, best, given.temperature)
    return weights if given.min_p is None else weights.masked_fill_(weights < given.min_p, 0.0)


def _locate(weights: Tensor, masses: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row by its weight, ids int64 [m, 1]: a chunk by its mass, then a token within it."""
    chunks = masses.shape[1]
    chunk, rest = _pick(masses, uniform)
    inside = weights.view(len(weights), CHUNK, chunks).gather(2, chunk[:, None].expand(-1, CHUNK, 1))[:, :, 0]
    inside = (inside / inside.amax(dim=-1, keepdim=True) * UNIT).long()
    return _pick(inside, rest)[0] * chunks + chunk


def _pick(masses: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """An entry of each row by its mass: int64 [m, k], float64 [m, 1] in [0, 1) -> its index int64 [m, 1].

    Also returns the rest of the uniform number, again in [0, 1). A row that is not sound gets some index.
    """
    upto = masses.cumsum(dim=-1)
    total = upto[:, -1:]
    target = torch.minimum((uniform * total).long(), total - 1)
    index = torch.searchsorted(upto, target, right=True).clamp_(max=masses.shape[1] - 1)
    mass = masses.gather(1, index)
    return index, (target - upto.gather(1, index) + mass).double() / mass.double()


def _uniforms(
    seeds: npt.NDArray[np.uint64], drawn: npt.NDArray[np.uint64], device: torch.device, attempt: int
) -> Tensor:
    """A number in [0, 1) for each seed, number of tokens drawn, and attempt at the next one: float64 [m, 1]."""
    bits = _mix(_mix(_mix(seeds) + _GOLDEN * (drawn + _ONE)) + _GOLDEN * (np.full_like(drawn, attempt) + _ONE))
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)[:, None].to(device)


_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's: neighbouring numbers come out unrelated."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
