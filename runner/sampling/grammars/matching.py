"""Texts that follow their grammars, token by token.

Promises   after a text is complete only EOS may come. A grammar that fails, or takes too long, ends its own request.
           Grammars take a share of the steps that they have in common with other requests, and no more.
Does not   compile grammars (``structured.py``), or import xgrammar: they bring it along.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.errors import GrammarFailed
from runner.sampling.grammars.child import said

USUAL_S = 0.0002
"""CPU time that a usual grammar takes for a token, at most."""

SLOW_S = 0.5
"""CPU time that one step may take the grammar of a request that has the step for itself."""

CROWDED_S = 0.1
"""CPU time that one step may take a grammar while other requests run."""

STEP_S = 0.005
"""CPU time that all grammars of a step may take on average, if that is more than ``SHARE``."""

SHARE = 1 / 3
"""Share of the time from step to step that all grammars may take on average."""

STEPS = 8
"""Steps that an average is over: a grammar may have a slow token now and then."""


class Meter:
    """CPU time that one request's grammar takes, of all its answers together."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """Mean of the last steps."""
        self.error: GrammarFailed | None = None
        self.most_s = SLOW_S
        """The most time that one step may take."""
        self._spent_s = 0.0
        self.last_s: float | None = None
        """When the last step was."""

    def charge(self, seconds: float) -> None:
        """A part of this step's work has taken this much."""
        self._spent_s += seconds
        if self.error is None and self._spent_s > self.most_s:
            took = f"{self._spent_s:.1f} s for one token of its answers"
            self.error = GrammarFailed(f"the grammar took {took}; make it less ambiguous")

    def end_step(self, now_s: float) -> None:
        """The step's work is done."""
        self.mean_s += (self._spent_s - self.mean_s) / STEPS
        self._spent_s, self.last_s = 0.0, now_s

    def refuse(self) -> None:
        """Ends the request with ``GrammarFailed``: it costs more than other requests can bear."""
        self.error = GrammarFailed(
            f"the grammar took {1000 * self.mean_s:.0f} ms a token of its answers, which keeps other requests waiting; "
            "make it less ambiguous, or ask for fewer answers (n)"
        )


def hold_to_share(meters: Collection[Meter], others: int, now_s: float) -> None:
    """Ends a step's work on grammars, and the costliest ones if they take too much.

    ``meters``: of all requests with a grammar; ``others``: rows of requests without one; ``now_s``: by a steady clock.
    A request that has the step for itself may take its time.
    """
    since = min((now_s - meter.last_s for meter in meters if meter.last_s is not None), default=0.0)
    for meter in meters:
        meter.end_step(now_s)
    going_on = [meter for meter in meters if meter.error is None]
    total, most = sum(meter.mean_s for meter in going_on), max(STEP_S, SHARE * since)
    for meter in sorted(going_on, key=lambda meter: meter.mean_s, reverse=True):
        if total <= most or len(meters) + others == 1:
            return
        meter.refuse()
        total -= meter.mean_s


class Grammar:
    """A compiled grammar; any number of requests may use it."""

    def __init__(self, xgrammar: Any, compiled: Any, vocab_size: int) -> None:
        self._xgrammar, self._compiled, self._vocab_size = xgrammar, compiled, vocab_size
        self.nbytes = int(compiled.memory_size_bytes)

    def matcher(self, meter: Meter | None = None) -> Matcher:
        """A matcher for a new text. ``meter``: of its request, if that has several."""
        inner = self._xgrammar.GrammarMatcher(self._compiled)
        return Matcher(self._xgrammar, inner, self._vocab_size, Meter() if meter is None else meter)


class Matcher:
    """The progress of one text."""

    def __init__(self, xgrammar: Any, inner: Any, vocab_size: int, meter: Meter) -> None:
        self.xgrammar, self.inner, self.meter = xgrammar, inner, meter
        self.words = -(-vocab_size // 32)
        """Words of 32 bits, one bit a token."""
        self._error: GrammarFailed | None = None

    @property
    def error(self) -> GrammarFailed | None:
        """Why no further token can be chosen, if there is a reason."""
        return self._error or self.meter.error

    def fail(self, why: str) -> None:
        """No further token can be chosen."""
        self._error = GrammarFailed(why)

    def take(self, token: int) -> None:
        """The next token. Raises nothing."""
        if self.error is not None:
            return
        start = time.thread_time()
        try:
            if self.inner.is_terminated():
                self.fail("the text is complete, and yet it was given a further token")
            elif not self.inner.accept_token(int(token)):
                self.fail(f"the grammar does not allow token {token}, which was chosen")
        except RuntimeError as problem:
            self.fail(f"the grammar failed: {said(problem)}")
        self.meter.charge(time.thread_time() - start)

    @property
    def is_open(self) -> bool:
        """Whether there is a next token to choose."""
        return self.error is None and not self.inner.is_terminated()


def fill(matchers: Sequence[Matcher], allowed: Tensor, is_metered: bool = False) -> bool:
    """Sets allowed int32 [m, words], bit i of a row being token i; zeros for a matcher with nothing to choose.

    Returns whether that was slow. ``is_metered``: one after another, each charged what it takes; else all at once, and
    only if that is slow once more so.
    """
    live = [row for row, matcher in enumerate(matchers) if matcher.is_open]
    if len(live) < len(matchers):
        allowed.zero_()
    if not live:
        return False
    usual_s = max(STEP_S, USUAL_S * len(live))
    if not is_metered:
        batch = matchers[0].xgrammar.BatchGrammarMatcher()
        start = time.perf_counter()
        try:
            batch.batch_fill_next_token_bitmask([matchers[row].inner for row in live], allowed, live)
            if time.perf_counter() - start <= usual_s:
                return False
        except RuntimeError:
            pass
    return sum(_fill_one(matchers[row], allowed, row) for row in live) > usual_s


def _fill_one(matcher: Matcher, allowed: Tensor, row: int) -> float:
    """Fills one row, as ``fill`` does; nothing is left to choose for it if its request has taken too long."""
    start, took_s = time.thread_time(), 0.0
    if matcher.error is None:
        try:
            matcher.inner.fill_next_token_bitmask(allowed, row)
        except RuntimeError as problem:
            matcher.fail(f"the grammar failed: {said(problem)}")
        took_s = time.thread_time() - start
        matcher.meter.charge(took_s)
    if matcher.error is not None:
        allowed[row] = 0
    return took_s


class Masks:
    """Tokens forbidden by the grammars of requests that are sampled together."""

    def __init__(
        self,
        matchers: Sequence[Matcher],
        others: int,
        min_tokens: Sequence[int],
        stop_ids: Sequence[Sequence[int]],
        vocabulary: int,
    ) -> None:
        """``others``: rows that are sampled with these and have no grammar."""
        self._matchers, self._others, self._vocabulary = tuple(matchers), others, vocabulary
        self._meters = dict.fromkeys(matcher.meter for matcher in matchers)
        for meter in self._meters:
            meter.most_s = CROWDED_S if len(self._meters) + others > 1 else SLOW_S
        self._is_metered = True
        self._allowed = torch.empty(len(matchers), -(-vocabulary // 32), dtype=torch.int32)
        self._min_tokens = np.array(min_tokens, np.uint64)
        self._is_stop = None
        if any(min_tokens):
            is_stop = np.zeros((len(matchers), 32 * self._allowed.shape[1]), bool)
            for row, ids in enumerate(stop_ids):
                is_stop[row, [token for token in ids if token < vocabulary]] = True
            self._is_stop = np.packbits(is_stop, axis=1, bitorder="little").view(np.int32)

    def forbidden(self, drawn: npt.NDArray[np.uint64]) -> Tensor:
        """Tokens that may not come next, after uint64 [m] tokens of each request: bool [m, vocab] on the host.

        Tokens that end a text are forbidden before ``min_tokens``, unless nothing else is left.
        """
        self._is_metered = fill(self._matchers, self._allowed, self._is_metered)
        hold_to_share(self._meters, self._others, time.perf_counter())
        allowed = self._allowed.numpy()
        if self._is_stop is not None and (early := drawn < self._min_tokens).any():
            others = allowed & ~self._is_stop
            allowed = np.where((early & others.any(axis=1))[:, None], others, allowed)
        bits = np.unpackbits((~allowed).view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocabulary]).view(torch.bool)
