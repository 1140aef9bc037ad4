"""Changes in the findable keys of a cache: for routers that send a request to the cache with its prefix.

Owns       the reported state.
Promises   the events of all polls, one after the other, leave exactly the keys that can be found at the last poll
           (I25). Nothing is recorded between polls, so a cache without a listener pays nothing.
Does not   report content that has come and gone between two polls, or has moved to another block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtier.cache.facade import KVCache
from kvtier.coordinator.request import Request
from kvtier.geometry.keys import KeyArray
from kvtier.host_tier.books import HostBooks
from kvtier.machine.errors import ConfigError, InvalidRequest
from kvtier.pools.block_pool import BlockPools, Col
from kvtier.pools.changes import changed_keys

_KEY = np.dtype([("low", np.uint64), ("high", np.uint64)])

TierName = Literal["device", "host"]


class EventKind(Enum):
    """The change of the blocks."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, eq=False)
class KVEvent:
    """Blocks of one group that can now be found in one tier, or no longer. ``keys``: uint64 [n, 2], n at least 1."""

    kind: EventKind
    tier: TierName
    group: str
    keys: KeyArray


class _Seen:
    """A tier's findable keys as they were at the last poll, by block."""

    def __init__(self, tier: TierName, groups: tuple[str, ...], pools: BlockPools) -> None:
        self._tier: TierName = tier
        self._groups = groups
        self._arrays = pools.arrays
        self._ready = np.zeros(len(pools.arrays.blocks), bool)
        self._keys = np.zeros((len(self._ready), 2), np.uint64)
        self._since = [-1] * len(groups)
        """By group, the number of changes then."""

    def poll(self) -> Iterator[KVEvent]:
        meta, blocks, ring = self._arrays.meta, self._arrays.blocks, self._arrays.ring
        for g, group in enumerate(self._groups):
            since, now = self._since[g], int(meta[g, Col.CHANGES])
            if since == now:
                continue
            if since < 0 or now - since > meta[g, Col.LOG_MASK] + 1:
                since = -1
            gone, come = np.empty((2, int(meta[g, Col.ROWS]) if since < 0 else now - since, 2), np.uint64)
            numbers = changed_keys(meta, blocks, ring, g, since, self._ready, self._keys, gone, come)
            self._since[g] = now
            gone, come = gone[: numbers[0]].copy(), come[: numbers[1]].copy()
            if _may_have_common(gone, come):
                gone, come = gone[~_among(gone, come)], come[~_among(come, gone)]
            for kind, keys in ((EventKind.REMOVED, gone), (EventKind.STORED, come)):
                if len(keys):
                    yield KVEvent(kind, self._tier, group, keys)


class KVEvents:
    """Reports which blocks can be found in ``cache``, as changes since the last ``poll``; the first reports them all.

    A cache may have several. vLLM's KV events are a log that its block pool writes as it goes; these are a difference
    (docs/adr/0019). Keys belong to one cache. If one router reads the events of several caches, give all of them the
    same ``key_secret`` and ``model_id``.

    Raises ``ConfigError`` for an object that is no cache, ``CacheClosed`` for a closed cache, here and in ``poll``.
    """

    def __init__(self, cache: KVCache) -> None:
        if not isinstance(cache, KVCache):
            raise ConfigError(f"cache must be a kvtier.KVCache, got {type(cache).__name__}")
        cache.check_open()
        self._cache = cache
        coordinator, host = cache.core.coordinator, cache.core.host
        self._chain = coordinator.chain
        self._seen = [_Seen("device", cache.spec.names, coordinator.pools)]
        if host is not None:
            self._seen.append(_Seen("host", cache.spec.names, host))

    def poll(self) -> list[KVEvent]:
        """What has changed: two events a group and tier at most, removed keys and added keys.

        Call it from the scheduling thread, between two of its calls. A change costs some 30 to 80 ns; after very many,
        all blocks are looked at, 3 ns each.
        """
        self._cache.check_open()
        return [event for seen in self._seen for event in seen.poll()]

    def keys_of(self, request: Request) -> dict[str, KeyArray]:
        """Keys of the full blocks of the request's prompt, by group, uint64 [n, 2].

        Key i names all tokens up to the end of block i. Keys depend on the request's salt, adapter and extra keys.
        Raises ``InvalidRequest`` for an object that is no request.
        """
        if not isinstance(request, Request):
            raise InvalidRequest(f"keys_of() takes a kvtier.Request, not {type(request).__name__}")
        root = self._chain.root(request.adapter, request.cache_salt, request.extra_keys)
        keys = self._chain.extend(root, request.tokens, np.empty((0, 2), np.uint64))
        units = {g.name: g.block_tokens // self._chain.unit_tokens for g in self._cache.spec.groups}
        return {name: keys[n - 1 :: n] for name, n in units.items()}


class HostEvents:
    """``KVEvents`` of a host tier with an engine's own keys (``HostTier``, ``HostTierScheduler``)."""

    def __init__(self, books: HostBooks) -> None:
        self._books = books
        self._seen = _Seen("host", books.spec.names, books.pools)

    def poll(self) -> list[KVEvent]:
        """Two events a group at most: removed keys, added keys. Call it from the thread of the books' other calls."""
        return list(self._seen.poll())


def _may_have_common(some: KeyArray, others: KeyArray) -> bool:
    """Whether a first half of a key is on both sides; most often nothing has only moved to another block."""
    halves = np.sort(np.concatenate([some[:, 0], others[:, 0]]))
    return bool((halves[1:] == halves[:-1]).any())


def _among(keys: KeyArray, others: KeyArray) -> npt.NDArray[np.bool_]:
    """The keys that are also among ``others``, as a mask; no key is twice on a side."""
    if not len(keys) or not len(others):
        return np.zeros(len(keys), bool)
    mine, theirs = (np.ascontiguousarray(side).view(_KEY).reshape(-1) for side in (keys, others))
    return np.isin(mine, theirs, assume_unique=True)
