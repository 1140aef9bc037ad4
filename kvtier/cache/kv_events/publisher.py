"""``KVEventPublisher``: what a cache has, told to routers as it changes.

Owns       the requests that are open, and the moment of the next look.
Promises   the scheduling thread is never kept waiting: it looks for changes every ``interval_s``, and hands them over.
           If the publisher's thread is behind it does not look: a difference loses nothing by being late. Prompts with
           a salt, an adapter or extra keys never leave the process. ``close`` is bounded.
Does not   tell of what comes and goes between two looks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvtier.cache.events import KVEvents
from kvtier.cache.facade import KVCache
from kvtier.cache.kv_events.config import KVEventsConfig
from kvtier.cache.kv_events.stored import RemoteNews
from kvtier.coordinator.request import FinishedRequest, Request
from kvtier.geometry.kinds import Kind
from kvtier.machine.errors import ConfigError
from kvtier.remote.known import MOST_KNOWN, Changes

INTERVAL_S = 0.05
SLACK_BLOCKS = 65_536
"""Blocks of texts that are kept beyond twice what both tiers hold: for prompts that wait."""


class KVEventPublisher:
    """Publishes the KV events of ``cache`` in vLLM's form.

    ``config``: a ``KVEventsConfig`` that is on, or what ``KVEventsConfig.read`` takes. Call ``add`` for each request
    that was queued, and ``step`` after each commit with what it reported. Call ``poll`` when there is nothing to do.
    ``add`` may come from any thread, the others from the scheduling thread, between two of its calls.

    Needs pyzmq and msgspec (``kvtier[events]``). Raises ``ConfigError``, also for groups that routers cannot be told
    of: without full attention, or with blocks of different sizes.
    """

    def __init__(self, cache: KVCache, config: Any, interval_s: float = INTERVAL_S) -> None:
        config = KVEventsConfig.read(config)
        if not config.is_on:
            raise ConfigError("kv_events_config publishes nothing: enable_kv_cache_events is not true")
        self._cache, self._events = cache, KVEvents(cache)
        config.check(cache.spec)
        from kvtier.cache.kv_events.claims import Claims
        from kvtier.cache.kv_events.worker import Worker

        self._remote = cache.core.coordinator.door.remote
        self._stored: Changes | None = None if self._remote is None else self._remote.listen()
        self._remote_is_used = False
        claims = Claims(cache.spec, _most_blocks(cache), None if self._remote is None else self._remote.plan)
        self._interval_s, self._due_s = interval_s, 0.0
        self._open: dict[str, Request] = {}
        self._worker = Worker(config, cache.core.coordinator.chain, claims)
        self.endpoint, self.replay_endpoint = self._worker.addresses
        """Where it listens, with the port that was free if a wildcard asked for one."""
        self._close = weakref.finalize(self, self._worker.close)
        self.poll()

    def add(self, request: Request) -> None:
        """A request was queued: the blocks of its prompt are told once they can be found."""
        if request.cache_salt is None and request.adapter is None and not request.extra_keys:
            self._open[request.request_id] = request
            self._worker.hand(request.tokens)

    def step(self, finished: Iterable[FinishedRequest]) -> None:
        """A step was committed, and these requests were reported: what they generated belongs to their texts."""
        for report in finished:
            request = self._open.pop(report.request_id, None)
            if request is not None and report.token_ids:
                self._worker.hand(np.concatenate([request.tokens, np.array(report.token_ids, np.int32)]))
        if time.monotonic() >= self._due_s:
            self.poll()

    def poll(self) -> None:
        """Looks for changes now; a closed cache has none."""
        self._due_s = time.monotonic() + self._interval_s
        if self._worker.takes_more and not self._cache.is_closed:
            self._worker.hand(self._events.poll())
            self._look_at_remote()
        elif self._worker.has_ended:
            self._stored = None  # nobody takes what comes

    def _look_at_remote(self) -> None:
        if self._remote is None or self._stored is None:
            return
        changes, is_used = self._stored.take(), self._remote.is_usable
        if changes or is_used != self._remote_is_used:
            self._remote_is_used = is_used
            self._worker.hand_of_remote(RemoteNews(changes, is_used))

    def close(self) -> None:
        """Tells listeners that nothing is there any more, and gives the addresses back. Twice does nothing."""
        self._close()


def _most_blocks(cache: KVCache) -> int:
    groups, device, host = cache.spec.groups, cache.core.coordinator.pools, cache.core.host
    g = next((g for g, group in enumerate(groups) if group.attention.kind is Kind.FULL), 0)
    room = int(device.usable[g]) + (0 if host is None else int(host.usable[g]))
    return 2 * room + SLACK_BLOCKS + (0 if cache.core.coordinator.door.remote is None else MOST_KNOWN)
