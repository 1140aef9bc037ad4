"""The remote tier, from vLLM's side: when it is opened, and what is worth a fetch.

Owns       what the workers have told of themselves; the remote until the books have it; how long prompts take.
Promises   the remote is used only once every worker has told what its blocks depend on: their names begin with that.
           Whatever cannot work is refused when it is made.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier.integrations.vllm.identity import check_engine, model_id, weights_of

if TYPE_CHECKING:
    from kvtier.host_tier.scheduler import HostTierScheduler
    from kvtier.integrations.vllm.geometry import Geometry
    from kvtier.integrations.vllm.settings import Settings
    from kvtier.machine.stats import RemoteStats

Tokens = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""How many tokens each text of a step computes, and up to which."""

logger = logging.getLogger("vllm.kvtier")

MOST_STEPS = 8
"""That are under way at once; vLLM has two."""
FACTS_S = 5.0
"""The workers' first reports are waited for so long; then steps go on without the remote."""


class RemoteSide:
    """``config`` and ``cache`` are vLLM's ``VllmConfig`` and ``KVCacheConfig``. Raises ``ConfigError``."""

    def __init__(
        self, books: HostTierScheduler, config: Any, cache: Any, geometry: Geometry, settings: Settings
    ) -> None:
        from kvtier.integrations.vllm.stats import COUNTERS
        from kvtier.remote.backends.uri import open_backend
        from kvtier.remote.pace import Pace

        assert settings.remote_uri is not None
        self._books = books
        hashes = check_engine(config)
        self._workers = config.parallel_config.world_size
        self._secret = settings.secret()
        self._backend = open_backend(settings.remote_uri)
        try:
            weights = weights_of(config, settings.model_id)  # last: it may read all of them
        except BaseException:
            self._backend.close(0.0)
            raise
        self._of_model = config, cache, geometry, weights, hashes
        self._facts = dict[int, str]()
        self._asked_s = float("inf")  # when the first step, or request, was due
        self._is_late = self._is_off = False
        self._counters = [(name, name.removeprefix("remote_")) for name in COUNTERS if name.startswith("remote_")]
        self._clock = time.monotonic
        self._pace = Pace()
        self._steps: deque[tuple[float, Tokens | None]] = deque(maxlen=MOST_STEPS)  # and when they were planned
        self._ended_s = 0.0  # when the last one ended
        self.is_open = False
        """Whether the books have the remote."""

    def take_facts(self, facts: Mapping[int, str]) -> None:
        """What workers have told, by rank; the last one opens the remote."""
        self._facts |= facts
        if self.is_open or self._is_off or len(self._facts) < self._workers:
            return
        name = model_id(*self._of_model, self._facts)
        self._books.use_remote(self._backend, name, self._secret)
        self._books.estimate_compute(self._pace.seconds)
        self.is_open = True
        logger.info("kvtier: a remote is behind the host tier; the model is %s", name)

    def reset(self) -> None:
        """Content from before is outdated, and so is the name of the weights: a remote not yet open stays closed."""
        self._is_off = True

    def is_opening(self) -> bool:
        """Whether a step, even an empty one, and requests that wait for it, may open the remote."""
        if self.is_open or self._is_off or self._is_late:
            return False
        now = self._clock()
        self._asked_s = min(self._asked_s, now)
        if now - self._asked_s >= FACTS_S:
            self._is_late = True
            logger.warning("kvtier: a worker has told nothing of itself; until it does there is no remote tier")
        return not self._is_late

    def step_begins(self, output: Any) -> None:
        """vLLM has planned a step (``SchedulerOutput``): how long it takes tells what computing a prompt costs."""
        scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        tokens: Tokens | None = None
        if output.total_num_scheduled_tokens > len(scheduled):  # else it only decodes
            before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            before |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            lengths = np.array([*scheduled.values()], np.int64)
            tokens = lengths, np.array([before[name] for name in scheduled], np.int64) + lengths
        self._steps.append((self._clock(), tokens))

    def step_ends(self) -> None:
        """The oldest step under way has ended."""
        now = self._clock()
        if self._steps:
            planned_s, tokens = self._steps.popleft()
            if tokens is not None:
                self._pace.note(*tokens, now - max(planned_s, self._ended_s))
        self._ended_s = now

    def counters(self) -> dict[str, int]:
        """The counts so far, by the names in ``stats``."""
        counts = self._books.remote_counts
        return {} if counts is None else {name: getattr(counts, own) for name, own in self._counters}

    def close(self) -> None:
        """Ends the remote if the books do not have it."""
        if not self.is_open:
            self._backend.close(0.0)


def gauges_of(stats: RemoteStats | None) -> dict[str, int]:
    """The gauges, by the names in ``stats``."""
    if stats is None:
        return {}
    return {
        "remote_is_on": int(stats.is_on),
        "remote_breaker_open": int(stats.breaker_open),
        "remote_live": stats.live,
    }
