"""The choice of a batch's next tokens, all rows at once.

Owns       a batch's sampling parameters, as arrays that last while the same requests are sampled together. They are cut
           from the records of all rows (``rows.py``).
Promises   a row's token depends on its own logits and state, bit by bit. It depends neither on the rows beside it, nor
           on its place among them, nor on a step that failed. A row that cannot be sampled harms no other row.
Does not   sort the vocabulary, or loop over rows or tokens.

``top_p`` draws from all tokens, and draws anew among likelier tokens if the token lies outside the nucleus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.attention.kernels import words
from kvtier.attention.workers import over_rows
from runner.errors import NonFiniteLogits, NoTokenAllowed, RunnerError
from runner.sampling.logits import Edits
from runner.sampling.logprobs import Logprobs, logprobs
from runner.sampling.rows import Rows, SamplingRows
from runner.sampling.state import SamplingState
from runner.sampling.weights import CHUNK, UNIT, by_chunks, chunk_masses, largest, rows_at_once, weigh

__all__ = ["Chosen", "Sampler", "SamplingState"]

Uniforms = Callable[[int], Tensor]
"""Attempt -> a number in [0, 1) for each row, float64 [rows, 1]."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The next token of each of n requests.

    ``marked`` int64 [n]: its id, -1 if there is none that can be taken. ``logprobs``: of the requests that asked for
    them, None if none did.
    """

    marked: Tensor
    logprobs: Logprobs | None
    _logits: Tensor
    _state: Callable[[int], SamplingState]

    @property
    def ids(self) -> Tensor:
        """int64 [n]; 0 if it is not sound."""
        return self.marked.clamp(min=0)

    @property
    def sound(self) -> Tensor:
        """bool [n]: whether it can be taken."""
        return self.marked >= 0

    def on_host(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """``ids`` and ``sound``, once they are known; brought over together."""
        marked = words.fetched(self.marked).numpy()
        return np.maximum(marked, 0), marked >= 0

    def why(self, place: int, dtype: object) -> RunnerError:
        """The reason that a token is not sound; before the logits are written anew. ``dtype``: the model's."""
        error = self._state(place).error
        if error is not None:
            return error
        if self._logits[place].max().isfinite():
            return NoTokenAllowed("the options of this request leave no token that could come next")
        return NonFiniteLogits(dtype)


class Sampler:
    """Chooses the next tokens of one batch after another, for requests in ``num_rows`` rows."""

    def __init__(self, num_rows: int) -> None:
        self.rows = SamplingRows(num_rows)
        self._batch: SamplingBatch | None = None

    def choose(self, logits: Tensor, rows: Rows, drawn: npt.NDArray[np.uint64]) -> Chosen:
        """The next token of the request in each row, and whether there is one.

        logits float32 [n, vocab] with n >= 1, rows int [n], and the tokens that each request has taken so far, uint64
        [n] -> on the logits' device. Logits and states stay as they are. A token at -inf is never drawn. Logits with a
        NaN, with +inf or with nothing but -inf are not sound.
        """
        if self._batch is None or not self._batch.serves(logits, rows):
            self._batch = SamplingBatch(self.rows, rows, logits.shape[1], logits.device)
        return self._batch.choose(logits, drawn)


class SamplingBatch:
    """The parameters of requests that are sampled together."""

    def __init__(self, given: SamplingRows, rows: Rows, vocabulary: int, device: torch.device) -> None:
        self._given, self._rows = given, rows
        self._vocabulary, self._device = vocabulary, device
        records = given.records[rows]
        self._entered, self._seeds = given.entered, records["seed"]
        self._rows_bytes = rows.tobytes()
        slab = rows_at_once(vocabulary, device)
        self._groups = [
            (way, _Drawn(places[i : i + slab], records, device))
            for way, places in _ways(records, vocabulary)
            for i in range(0, len(places), slab)
        ]
        edited = {place: self._state(place) for place in np.flatnonzero(records["is_edited"]).tolist()}
        self._edits = Edits.of(edited, len(rows), vocabulary, device) if edited else None
        asked = np.flatnonzero(records["tells"])
        self._most_logprobs = int(records["logprobs"].max())
        self._asked = torch.from_numpy(asked).to(device) if len(asked) else None

    def serves(self, logits: Tensor, rows: Rows) -> bool:
        """Whether the arrays are of the requests in these rows, in this order."""
        are_same = self._given.entered == self._entered and rows.tobytes() == self._rows_bytes
        return are_same and (self._vocabulary, self._device) == (logits.shape[1], logits.device)

    def choose(self, given: Tensor, drawn: npt.NDArray[np.uint64]) -> Chosen:
        """Chooses a token for each request, as ``Sampler.choose`` does."""
        logits = given if self._edits is None else self._edits.applied(given, drawn)
        if logits.is_cpu and not self._groups:
            ids, best = _likeliest(logits)
            marked = torch.from_numpy(np.where(np.isfinite(best), ids, -1))
        else:
            marked = self._marked(logits, drawn)
        told = None
        if self._asked is not None:
            told = logprobs(given, marked.clamp(min=0), self._most_logprobs, self._asked)
        return Chosen(marked, told, given, self._state)

    def _marked(self, logits: Tensor, drawn: npt.NDArray[np.uint64]) -> Tensor:
        """``Chosen.marked`` of requests some of which are drawn."""
        ids, best, sound = _best(logits)  # a NaN counts as the largest, then +inf; -inf is here only if all are
        for way, group in self._groups:
            uniforms = partial(_uniforms, self._seeds[group.places], drawn[group.places], self._device)
            at = group.index
            ids[at] = way(logits[at], best[at], sound[at], group, uniforms)
        return ids.where(sound, -1)[:, 0]

    def _state(self, place: int) -> SamplingState:
        return self._given.state(self._rows[place])


class _Drawn:
    """Requests that are drawn in the same way, with their parameters as columns [m, 1]."""

    def __init__(self, places: npt.NDArray[np.int64], records: npt.NDArray[Any], device: torch.device) -> None:
        """``places``: theirs in the batch, int64 [m]; ``records`` [n]: of the whole batch."""
        mine = records[places]

        def column(name: str) -> Tensor:
            return torch.from_numpy(mine[name].copy()[:, None]).to(device)

        self.places = places
        self.index = slice(None) if len(places) == len(records) else torch.from_numpy(places).to(device)
        self.temperature, self.top_p, self.top_k = column("temperature"), column("top_p"), column("top_k")
        self.min_p = column("min_p") if mine["min_p"].any() else None
        self.most = int(mine["top_k"].max())


def _best(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit of each row [n, 1]: its id int64, itself, and whether it is finite."""
    if logits.is_cpu:
        ids, best = (torch.from_numpy(x)[:, None] for x in _likeliest(logits))
    else:
        ids = logits.argmax(dim=-1, keepdim=True)
        best = logits.gather(1, ids)
    return ids, best, best.abs() < torch.inf


def _likeliest(logits: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The ids and largest logits of ``_best``, [n] each, of logits on a CPU. numpy takes a seventh of torch's time."""
    given, found = logits.detach().numpy(), np.empty(len(logits), np.int64)

    def compute(begin: int, end: int) -> bool:
        given[begin:end].argmax(-1, out=found[begin:end])
        return True

    over_rows(compute, len(given), given.size)
    return found, given[np.arange(len(given)), found]


_Way = Callable[[Tensor, Tensor, Tensor, _Drawn, Uniforms], Tensor]
"""logits float32 [m, vocab], the largest of each row [m, 1], whether it is sound bool [m, 1] -> ids int64 [m, 1]."""


def _ways(records: npt.NDArray[Any], vocabulary: int) -> Iterator[tuple[_Way, npt.NDArray[np.int64]]]:
    """Ways to draw, and the places of the records that are drawn so; none if the largest logit is the only choice."""
    drawn = ~records["is_greedy"]
    is_cut = (records["top_k"] > 0) & (records["top_k"] < vocabulary)
    is_nucleus = ~is_cut & (records["top_p"] < 1)
    for way, is_so in ((_among_best, is_cut), (_in_nucleus, is_nucleus), (_from_all, ~is_cut & ~is_nucleus)):
        places = np.flatnonzero(drawn & is_so)
        if len(places):
            yield way, places


def _from_all(logits: Tensor, best: Tensor, sound: Tensor, given: _Drawn, uniforms: Uniforms) -> Tensor:
    weights = by_chunks(_weights(logits, best, given), 0.0)
    return _locate(weights, chunk_masses(weights), uniforms(0))


def _among_best(logits: Tensor, best: Tensor, sound: Tensor, given: _Drawn, uniforms: Uniforms) -> Tensor:
    """Draws from the best ``top_k``, or from the part of them in the ``top_p`` nucleus."""
    values, ids = largest(logits, given.most)
    weights = (_weights(values, best, given) * UNIT).long()
    weights.masked_fill_(torch.arange(given.most, device=ids.device) >= given.top_k, 0)
    upto = weights.cumsum(dim=-1)
    weights.masked_fill_((upto - weights >= given.top_p * upto[:, -1:]) & (given.top_p < 1), 0)
    return ids.gather(1, _pick(weights, uniforms(0))[0])


def _in_nucleus(logits: Tensor, best: Tensor, sound: Tensor, given: _Drawn, uniforms: Uniforms) -> Tensor:
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


def _weights(logits: Tensor, best: Tensor, given: _Drawn) -> Tensor:
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
