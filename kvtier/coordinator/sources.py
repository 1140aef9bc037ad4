"""Where the tokens of a hit come from: the device, the host tier, or a remote tier.

Promises   each token of a hit has one source. It is the slowest of its blocks' sources, over all groups.
Does not   change anything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.coordinator.match import Match
from kvtier.coordinator.tracked import Tracked
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.journal import Admitted, Gap
from kvtier.pools.block_pool import Ids

TIERS = ("device", "host", "remote")


class Loads(NamedTuple):
    """Blocks to load, parallel arrays: group, host block, logical block of the row."""

    groups: Ids
    hosts: Ids
    at: npt.NDArray[np.int64]


def split(match: Match) -> tuple[tuple[Ids, Ids], Loads]:
    """A hit's device blocks as (groups, blocks), and the blocks to load."""
    there = match.device > 0
    absent = ~there
    loads = Loads(match.groups[absent], match.host[absent], match.at[absent])
    return (match.groups[there], match.device[there]), loads


class Sources:
    """Tells the tiers of hits in a cache with these groups."""

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._units = np.array([g.block_tokens // spec.hash_tokens for g in spec.groups], np.int64)
        self._block_bytes = np.array([g.block_bytes for g in spec.groups], np.int64)

    def by_tier(self, match: Match, loads: Loads, seq: Tracked | None) -> tuple[int, int, int]:
        """Tokens of the hit served by (device, host, store); a token that any group has to load counts as host.

        If a block of it was fetched for ``seq``, it counts as store.
        """
        if len(loads.at) == 0:
            return match.num_tokens, 0, 0
        unit, fetched = self._spec.hash_tokens, self._fetched(seq, loads)
        loaded = int(self._loaded_units(match, loads).sum()) * unit
        store = int(self._loaded_units(match, fetched).sum()) * unit if len(fetched.at) else 0
        return match.num_tokens - loaded, loaded - store, store

    def admitted(self, seq: Tracked, match: Match, loads: Loads, gaps: tuple[Gap, ...]) -> Admitted:
        """What is told of a request that was admitted with this hit."""
        unit, fetched = self._spec.hash_tokens, self._fetched(seq, loads)
        by_unit = self._loaded_units(match, loads).astype(np.int8) + self._loaded_units(match, fetched)
        ends = [*(np.flatnonzero(by_unit[1:] != by_unit[:-1]) + 1).tolist(), len(by_unit)] if len(by_unit) else []
        to_load = np.bincount(loads.groups, minlength=len(self._units))
        there, absent = (
            {name: int(n) for name, n in zip(self._spec.names, blocks, strict=True) if n}
            for blocks in (match.counts - to_load, to_load)
        )
        return Admitted(
            known_tokens=len(seq.tokens),
            hit_tokens=match.num_tokens,
            full_tokens=match.full_tokens,
            limited_by=match.limited_by,
            missing_from=match.missing_from,
            sources=tuple((end * unit, TIERS[by_unit[end - 1]]) for end in ends),
            device=there,
            host=absent,
            load_bytes=int((to_load * self._block_bytes).sum()),
            ticket=seq.ticket,
            gaps=gaps,
        )

    def _fetched(self, seq: Tracked | None, loads: Loads) -> Loads:
        """The loads of blocks that came from the remote for ``seq``."""
        came = np.zeros(len(loads.at), bool)
        if seq is not None and seq.seek is not None and len(seq.seek.fetched):
            came = np.isin(seq.keys[(loads.at + 1) * self._units[loads.groups] - 1][:, 0], seq.seek.fetched[:, 0])
        return Loads(loads.groups[came], loads.hosts[came], loads.at[came])

    def _loaded_units(self, match: Match, loads: Loads) -> npt.NDArray[np.bool_]:
        """bool [n], the hit's units of hash_tokens tokens of which any group has to load a block."""
        loaded = np.zeros(match.num_tokens // self._spec.hash_tokens, bool)
        for g, units in enumerate(self._units):
            at = loads.at[loads.groups == g]
            for i in range(units):
                loaded[at * units + i] = True
        return loaded
