"""Serving without a model: requests over pools that keep books and move no bytes, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtier import CacheSpec, KVCache, Request, Scheduler, Step
from kvtier.geometry.kinds import Kind
from kvtier.geometry.sizing import split_bytes

CHUNK = 8192


@dataclass(frozen=True)
class Held:
    """Bytes of the device arena at the end of a ``schedule``."""

    total: int
    reachable: int
    """Of tokens that a query of this step, or the next token, can see, and of those that the step computes."""
    owned: int
    """Of blocks that running requests hold."""
    padding: int
    """That no pool can use: null blocks, what is left beside the slabs, and between blocks."""


class Books:
    """A cache of ``num_bytes`` on the meta device and its scheduler; ``static`` gives each group a pool of its own."""

    def __init__(self, spec: CacheSpec, num_bytes: int, static: bool = False, max_running: int = 2048) -> None:
        self.spec = spec
        blocks = split_bytes(spec, num_bytes, "device_bytes") if static else None
        device = (
            {"device_blocks": dict(zip(spec.names, blocks, strict=True))} if blocks else {"device_bytes": num_bytes}
        )
        self.cache = KVCache(spec, device="meta", key_secret=b"capacity", **device)
        self.scheduler = Scheduler(self.cache, CHUNK, max_running)
        self.num_bytes = num_bytes
        self._rng = np.random.default_rng(0)
        self._number = 0

    def add(self, num_tokens: int, new_tokens: int) -> None:
        """A request like no other."""
        self._number += 1
        tokens = self._rng.integers(0, 100_000, num_tokens).astype(np.int32)
        self.scheduler.add(Request(f"{self._number}", tokens, new_tokens))

    def steps(self) -> Iterator[Step]:
        """Step after step, each before it is committed; sampled tokens do not matter."""
        while self.scheduler.has_work():
            step = self.scheduler.schedule()
            yield step
            self.scheduler.commit(step, np.zeros(len(step.sample_rows), np.int64))

    def held(self) -> Held:
        """What running requests hold now."""
        coordinator = self.cache.core.coordinator
        t, layout = coordinator.tables.arrays, self.cache.arenas[0].layout
        rows = np.flatnonzero(t.phase > 0)
        reachable = owned = 0
        for g, group in enumerate(self.spec.groups):
            start, end = t.computed[rows], t.hi[g, rows].astype(np.int64) * group.block_tokens
            span, kind = group.attention.span_tokens, group.attention.kind
            first = np.zeros_like(start)
            if kind is Kind.WINDOW:
                first = np.maximum(start - span + 1, 0)
            elif kind is Kind.CHUNK:
                first = start - start % span
            last = np.minimum(end, np.maximum(t.total[rows], start + 1))
            reachable += int(np.maximum(last - first, 0).sum()) * group.token_bytes
            owned += int((t.hi[g, rows] - t.lo[g, rows]).sum()) * group.block_bytes
        padding = self.num_bytes - layout.num_bytes + int(layout.origins.max() + layout.strides.min())
        between = float((1 - layout.block_bytes / layout.strides).max())
        return Held(self.num_bytes, reachable, owned, padding + int(between * owned))

    def __enter__(self) -> Books:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()
