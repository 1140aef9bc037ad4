"""Arrivals against the distributions that they are said to have."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.machine.errors import ConfigError
from runner.bench.arrivals import offsets

MANY = 20_000


def gaps(rate: float, burstiness: float, seed: int = 1) -> np.ndarray:
    return np.diff(offsets(MANY + 1, rate, burstiness, seed))


def test_a_poisson_process_has_exponential_gaps() -> None:
    found = np.sort(gaps(4.0, 1.0)) * 4.0
    expected = 1 - np.exp(-found)
    distance = np.abs(expected - np.arange(1, MANY + 1) / MANY).max()
    assert distance < 1.63 / np.sqrt(MANY)  # Kolmogorov-Smirnov, 1 %
    counts = np.bincount(offsets(MANY, 4.0, 1.0, 2).astype(int))[:-1]
    assert counts.mean() == pytest.approx(4.0, rel=0.03)
    assert counts.var() == pytest.approx(4.0, rel=0.06)  # a Poisson count's variance is its mean


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_changes_the_spread_of_gaps_and_not_the_rate(burstiness: float) -> None:
    found = gaps(10.0, burstiness)
    assert found.mean() == pytest.approx(0.1, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_at_the_ends_of_the_range() -> None:
    assert offsets(5, float("inf"), 1.0, 0).tolist() == [0.0] * 5
    assert offsets(5, 2.0, float("inf"), 0).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert offsets(1, 2.0, 1.0, 0).tolist() == [0.0] and offsets(0, 2.0, 1.0, 0).tolist() == []


def test_the_seed_decides_and_nothing_else_does() -> None:
    assert offsets(50, 3.0, 1.0, 7).tolist() == offsets(50, 3.0, 1.0, 7).tolist()
    assert offsets(50, 3.0, 1.0, 7).tolist() != offsets(50, 3.0, 1.0, 8).tolist()
    assert offsets(50, 3.0, 1.0, 7).tolist() == pytest.approx(offsets(50, 6.0, 1.0, 7) * 2)
    assert offsets(50, 3.0, 1.0, 7)[:20].tolist() == offsets(20, 3.0, 1.0, 7).tolist()


@pytest.mark.parametrize(("rate", "burstiness"), [(1e-320, 1.0), (1.0, 1e-320), (1e-320, float("inf"))])
def test_gaps_that_no_clock_has_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match="--request-rate"):
        offsets(3, rate, burstiness, 0)
