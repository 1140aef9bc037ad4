"""What tests look at, or damage, inside kvtier: the only place that knows the names of its private parts.

``of`` is a ``KVCache``, or the ``Scheduler`` or ``CacheManager`` that drives one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier import KVCache

if TYPE_CHECKING:
    from kvtier import CacheManager, Scheduler
    from kvtier.coordinator.coordinator import Coordinator
    from kvtier.coordinator.core import Core
    from kvtier.coordinator.match import Matcher
    from kvtier.cpu_offload.connector import Connector
    from kvtier.pools.arena import Arena
    from kvtier.pools.block_pool import BlockPools

    Whole = KVCache | Scheduler | CacheManager


# --- a cache --------------------------------------------------------------------------------------


def core(of: Whole) -> Core:
    """The parts of the cache."""
    return of.core if isinstance(of, KVCache) else of._core


def pools(of: Whole) -> BlockPools:
    """The pools of the device."""
    return core(of).coordinator.pools


def host(of: Whole) -> BlockPools | None:
    """The pools of the host tier, if there is one."""
    return core(of).host


def coordinator(of: Whole) -> Coordinator:
    """Who admits requests and lets them go."""
    return core(of).coordinator


def matcher(of: Whole) -> Matcher:
    """Who finds what both tiers have of a prompt."""
    return core(of).coordinator._matcher


def connector(of: Whole) -> Connector:
    """Who owns the transfers."""
    return core(of).coordinator.connector


def arena(of: Whole) -> Arena:
    """The memory of the device."""
    return core(of).arenas[0]


def host_arena(of: Whole) -> Arena | None:
    """The memory of the host tier, if there is one."""
    return core(of).arenas[1]
