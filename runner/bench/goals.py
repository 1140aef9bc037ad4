"""Service level objectives: limits that an answer must keep to count as good.

Two spellings: vLLM's ``--goodput ttft:200 tpot:50``, and ``--slo ttft_ms=200,itl_ms=50``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvtier.machine.errors import ConfigError
from runner.bench.record import Record

METRICS = ("ttft", "tpot", "itl", "e2el")
ITL_SHARE = 99.0
"""``itl`` holds if this percentile of an answer's own gaps keeps the limit."""


@dataclass(frozen=True)
class Goals:
    """Limits in milliseconds by metric; none: each whole answer is good."""

    limits_ms: tuple[tuple[str, float], ...] = ()

    def met_by(self, record: Record) -> bool:
        """Whether the answer is whole and within every limit."""
        return record.is_ok and all(value_ms(record, name) <= limit for name, limit in self.limits_ms)


def value_ms(record: Record, metric: str) -> float:
    """One answer's ``metric``. An answer of one token has neither gaps nor time per token: 0."""
    if metric == "ttft":
        return record.ttft_s * 1e3
    if metric == "tpot":
        return (record.tpot_s or 0.0) * 1e3
    if metric == "e2el":
        return (record.end_s - record.sent_s) * 1e3
    gaps = np.diff(record.times)
    return float(np.percentile(gaps, ITL_SHARE)) * 1e3 if len(gaps) else 0.0


def goals_of(goodput: Iterable[str], slo: str | None) -> Goals:
    """Reads both spellings; raises ``ConfigError`` for one that is neither."""
    found: dict[str, float] = {}
    pairs = [(text, *text.partition(":")) for text in goodput]
    pairs += [(text, *text.strip().partition("=")) for text in (slo or "").split(",") if text.strip()]
    for text, name, _, value in pairs:
        name = name.strip().removesuffix("_ms")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in METRICS or not 0 < limit < float("inf"):
            raise ConfigError(
                f"{text!r} is no service level objective; say --goodput ttft:200 tpot:50, or --slo "
                f"ttft_ms=200,itl_ms=50 (milliseconds; metrics: {', '.join(METRICS)})"
            )
        found[name] = limit
    return Goals(tuple(found.items()))
