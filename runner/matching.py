"""Texts that follow their grammars, token by token.

Promises   after a text is complete only EOS may come. A grammar that fails, or takes too long, ends its own request.
Does not   compile grammars (``structured.py``), or import xgrammar: they bring it along.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.errors import GrammarFailed
from runner.grammar_child import said

SLOW_S = 0.5
"""CPU time that one token of one request may take its grammar. Usual ones take less than a millisecond."""


class Grammar:
    """A compiled grammar; any number of requests may use it."""

    def __init__(self, xgrammar: Any, compiled: Any, vocab_size: int) -> None:
        self._xgrammar, self._compiled, self._vocab_size = xgrammar, compiled, vocab_size
        self.nbytes = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        """For a new request."""
        return Matcher(self._xgrammar, self._xgrammar.GrammarMatcher(self._compiled), self._vocab_size)


class Matcher:
    """The progress of one request's text. ``error``: why no further token can be chosen, if there is a reason."""

    def __init__(self, xgrammar: Any, inner: Any, vocab_size: int) -> None:
        self.xgrammar, self.inner = xgrammar, inner
        self.words = -(-vocab_size // 32)
        """Of 32 bits, one a token."""
        self.error: GrammarFailed | None = None

    def take(self, token: int) -> None:
        """The next token. Raises nothing."""
        if self.error is not None:
            return
        start = time.thread_time()
        try:
            if self.inner.is_terminated():
                self.error = GrammarFailed("the text is complete, and yet it was given a further token")
            elif not self.inner.accept_token(int(token)):
                self.error = GrammarFailed(f"the grammar does not allow token {token}, which was chosen")
        except RuntimeError as problem:
            self.error = GrammarFailed(f"the grammar failed: {said(problem)}")
        self.charge(time.thread_time() - start)

    def charge(self, seconds: float) -> None:
        """One token has taken this much CPU time."""
        if self.error is None and seconds > SLOW_S:
            self.error = GrammarFailed(f"the grammar took {seconds:.1f} s for one token; make it less ambiguous")

    @property
    def is_open(self) -> bool:
        """Whether there is a next token to choose."""
        return self.error is None and not self.inner.is_terminated()


def fill(matchers: Sequence[Matcher], allowed: Tensor) -> None:
    """Sets allowed int32 [m, words], bit i of a row being token i; zeros for a matcher with nothing to choose."""
    live = [row for row, matcher in enumerate(matchers) if matcher.is_open]
    if len(live) < len(matchers):
        allowed.zero_()
    if not live:
        return
    batch = matchers[0].xgrammar.BatchGrammarMatcher()
    start = time.perf_counter()
    try:
        batch.batch_fill_next_token_bitmask([matchers[row].inner for row in live], allowed, live)
        if time.perf_counter() - start <= SLOW_S:
            return
    except RuntimeError:
        pass
    for row in live:  # which of them it was
        _fill_one(matchers[row], allowed, row)


def _fill_one(matcher: Matcher, allowed: Tensor, row: int) -> None:
    start = time.thread_time()
    try:
        matcher.inner.fill_next_token_bitmask(allowed, row)
    except RuntimeError as problem:
        matcher.error = GrammarFailed(f"the grammar failed: {said(problem)}")
    matcher.charge(time.thread_time() - start)
    if matcher.error is not None:
        allowed[row] = 0


class Masks:
    """Tokens forbidden by the grammars of requests that are sampled together."""

    def __init__(
        self,
        matchers: Sequence[Matcher],
        min_tokens: Sequence[int],
        stop_ids: Sequence[Sequence[int]],
        vocabulary: int,
    ) -> None:
        self._matchers, self._vocabulary = tuple(matchers), vocabulary
        self._allowed = torch.empty(len(matchers), -(-vocabulary // 32), dtype=torch.int32)
        self._min_tokens = np.array(min_tokens, np.uint64)
        self._is_stop = None
        if any(min_tokens):
            is_stop = np.zeros((len(matchers), 32 * self._allowed.shape[1]), bool)
            for row, ids in enumerate(stop_ids):
                is_stop[row, [token for token in ids if token < vocabulary]] = True
            self._is_stop = np.packbits(is_stop, axis=1, bitorder="little").view(np.int32)

    def forbidden(self, drawn: npt.NDArray[np.uint64]) -> Tensor:
        """Of the next token of requests that have taken uint64 [m] tokens: bool [m, vocab] on the host.

        Tokens that end a text are forbidden before ``min_tokens``, unless nothing else is left.
        """
        fill(self._matchers, self._allowed)
        allowed = self._allowed.numpy()
        if self._is_stop is not None and (early := drawn < self._min_tokens).any():
            others = allowed & ~self._is_stop
            allowed = np.where((early & others.any(axis=1))[:, None], others, allowed)
        bits = np.unpackbits((~allowed).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocabulary]).view(torch.bool)
