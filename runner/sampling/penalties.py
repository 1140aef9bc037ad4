"""Penalties on tokens that a request has seen: in its prompt, or in its own answer.

Promises   the cost of a step grows with the tokens that requests have seen, not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.sampling.params import SamplingParams
from runner.sampling.positions import positions

_FIRST_ROOM = 64


class Tally:
    """The tokens that one request has seen, and how often its answer has each."""

    def __init__(self, prompt: npt.ArrayLike = ()) -> None:
        """``prompt`` int [n]: its tokens, if they count as seen."""
        self.prompt = np.unique(np.asarray(prompt, np.int64))
        self._at: dict[int, int] = {}
        self._tokens = np.empty(_FIRST_ROOM, np.int64)
        self._counts = np.empty(_FIRST_ROOM, np.float32)
        self._is_first = np.empty(_FIRST_ROOM, bool)

    def take(self, token: int) -> None:
        """The next token of the answer."""
        at = self._at.get(token)
        if at is None:
            at = self._at[token] = len(self._at)
            if at == len(self._tokens):
                self._tokens, self._counts, self._is_first = (
                    np.concatenate([x, np.empty_like(x)]) for x in (self._tokens, self._counts, self._is_first)
                )
            place = self.prompt.searchsorted(token)
            self._tokens[at], self._counts[at] = token, 0
            self._is_first[at] = place == len(self.prompt) or self.prompt[place] != token
        self._counts[at] += 1

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The tokens of the answer, each once, int64 [t]."""
        return self._tokens[: len(self._at)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often the answer has each, float32 [t]."""
        return self._counts[: len(self._at)]

    @property
    def is_first(self) -> npt.NDArray[np.bool_]:
        """Whether the prompt lacks it, bool [t]."""
        return self._is_first[: len(self._at)]


class Penalties:
    """Penalties of requests that are sampled together."""

    def __init__(
        self, rows: Sequence[int], params: Sequence[SamplingParams], tallies: Sequence[Tally], vocabulary: int
    ) -> None:
        self._rows, self._tallies, self._vocabulary = np.array(rows), tuple(tallies), vocabulary
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        self._amounts = np.array([[getattr(p, name) for name in names] for p in params], np.float32)
        prompts = [tally.prompt[tally.prompt < vocabulary] for tally in tallies]
        self._prompt = torch.from_numpy(positions(rows, prompts, vocabulary))
        self._divisors = torch.from_numpy(np.repeat(self._amounts[:, 0], [len(one) for one in prompts]))

    def apply(self, logits: Tensor) -> None:
        """Changes logits float32 [n, vocab], contiguous, in place."""
        line, device = logits.view(-1), logits.device
        self._prompt, self._divisors = self._prompt.to(device), self._divisors.to(device)
        line[self._prompt] = _repeated(line[self._prompt], self._divisors)
        tokens = [tally.tokens for tally in self._tallies]
        lengths = [len(one) for one in tokens]
        at = torch.from_numpy(positions(self._rows.tolist(), tokens, self._vocabulary)).to(device)
        amounts = np.repeat(self._amounts, lengths, axis=0)
        amounts[~np.concatenate([tally.is_first for tally in self._tallies]), 0] = 1
        counts = np.concatenate([tally.counts for tally in self._tallies])
        divisors, off = torch.from_numpy(amounts[:, 0].copy()), torch.from_numpy(amounts[:, 1] * counts)
        values = _repeated(line[at], divisors.to(device))
        values -= off.to(device)
        values -= torch.from_numpy(amounts[:, 2].copy()).to(device)
        line[at] = values


def _repeated(values: Tensor, divisors: Tensor) -> Tensor:
    return torch.where(values > 0, values / divisors, values * divisors)
