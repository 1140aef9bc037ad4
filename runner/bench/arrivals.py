"""When requests arrive: offsets in seconds from the start of a run.

Promises   offsets rise from 0, and depend on the arguments alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier.machine.errors import ConfigError

Offsets = NDArray[np.float64]


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Random numbers for one purpose, which no other purpose's use of its own changes."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *purpose.encode()])))


def offsets(count: int, rate: float, burstiness: float, seed: int) -> Offsets:
    """``count`` arrivals, ``rate`` a second on average; an infinite rate is all at once.

    Gaps are gamma-distributed with shape ``burstiness``: 1 is a Poisson process, less comes in bursts, more is
    steadier, and infinity is a clock's tick. They are not scaled afterwards: a short run's own rate differs
    from ``rate``, as that of a Poisson process does. Raises ``ConfigError`` for gaps that are not finite.
    """
    if rate == float("inf") or count <= 1:
        return np.zeros(count)
    with np.errstate(all="ignore"):
        mean_s = np.float64(1) / rate
        if burstiness == float("inf"):
            gaps = np.full(count - 1, mean_s)
        else:
            gaps = stream(seed, "arrivals").gamma(burstiness, np.float64(1) / (rate * burstiness), count - 1)
        found = np.concatenate([[0.0], np.cumsum(gaps)])
    if not np.isfinite(found).all():
        raise ConfigError(f"--request-rate {rate:g} with --burstiness {burstiness:g} makes gaps that are not finite")
    return found
