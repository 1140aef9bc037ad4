"""One request's course, for ``Metrics``: when its tokens came, and how it ended.

Promises   every request that was taken ends once, even if its caller leaves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtier import InvalidRequest, RequestTooLarge
from runner.engine.answers import Answer, Answers
from runner.errors import EngineDead, Overloaded
from runner.sampling.params import SamplingParams

if TYPE_CHECKING:
    from runner.metrics.metrics import Metrics, Refusal

_WHY: dict[type[Exception], Refusal] = {
    RequestTooLarge: "too_large",
    InvalidRequest: "invalid",
    Overloaded: "overloaded",
    EngineDead: "engine_dead",
}


@contextmanager
def refusals(metrics: Metrics | None) -> Iterator[None]:
    """Counts errors raised in it."""
    try:
        yield
    except tuple(_WHY) as problem:
        if metrics is not None:
            metrics.on_refusal(next(why for kind, why in _WHY.items() if isinstance(problem, kind)))
        raise


class Timing:
    """One request's."""

    def __init__(self, metrics: Metrics, answers: Answers, params: SamplingParams) -> None:
        self._metrics, self._answers = metrics, answers
        self._seen = [(0, 0.0)] * len(answers.answers)
        metrics.on_arrival(answers.num_prompt_tokens, params.max_tokens, params.n)

    def on_tokens(self, fresh: Sequence[Answer]) -> None:
        """Answers have something new."""
        now = time.perf_counter()
        for answer in fresh:
            count, last_s = self._seen[answer.index]
            new = answer.num_tokens - count
            if not count and new:
                first_s = answer.stream.first_token_s or now
                self._metrics.on_first_token(first_s - self._answers.arrived_s)
                new, last_s = new - 1, first_s
            if new:
                self._metrics.on_tokens(new, now - last_s)
            self._seen[answer.index] = answer.num_tokens, now

    def on_end(self) -> None:
        """Nothing more comes, or the caller waits for it no more."""
        answers = self._answers
        reports = [answer.stream.end.report for answer in answers.answers if answer.stream.end is not None]
        queued = [report.queue_s for report in reports if report.queue_s is not None]
        first = [s for answer in answers.answers if (s := answer.stream.first_token_s) is not None]
        self._metrics.on_finish(
            answers.num_prompt_tokens,
            [(answer.finish_reason or "abort", answer.num_tokens) for answer in answers.answers],
            time.perf_counter() - answers.arrived_s,
            min(first) - answers.arrived_s if first else None,
            min(queued, default=None),
        )
