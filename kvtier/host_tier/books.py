"""The books of a host tier: what it holds, and what is copied where.

Owns       the host blocks' content and holds, and every transfer.
Promises   a hit is there for every group, up to one boundary. A load is reported as loaded only once it has landed,
           verified if asked for. A store holds no device block: the next writer of its source is ordered after it
           (``overwrite``). A copy that fails or is late is a miss. Shortage is never an error: a block without room is
           not stored. All calls except ``wake`` come from one thread.
Does not   know requests, steps or device occupancy: a ``HostText`` follows one token sequence of the engine. It has no
           bytes: ``HostBytes`` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.audit.counters import check_counters
from kvtier.audit.pools import Tier as AuditedTier, Violation, audit_pools, audit_structure
from kvtier.audit.remote import RemoteMoves
from kvtier.audit.run import AuditLevel, level_from_environment
from kvtier.audit.transfers import Copies, audit_quarantine, host_owners
from kvtier.coordinator.door import RemoteDoor
from kvtier.coordinator.keeping import Keeping
from kvtier.coordinator.match import Matcher
from kvtier.coordinator.seek import ComputeSeconds
from kvtier.cpu_offload.books import TransferCounts
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.device_side import OutsideDevice
from kvtier.cpu_offload.engines import CopyEngine
from kvtier.cpu_offload.failures import CopyNews
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.geometry.layout import Layout
from kvtier.geometry.options import wait_seconds
from kvtier.gpu_pool.row_state import geometry_of
from kvtier.host_tier.parts import HostParts, Rows
from kvtier.host_tier.plan import HostPlan
from kvtier.host_tier.text import HostText
from kvtier.machine.journal import Journal
from kvtier.machine.stats import LatencyStats, PoolStats, RemoteStats, TransferStats
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools, Col, Ids, fence_of
from kvtier.pools.checked import CheckedPools
from kvtier.pools.pool_stats import pool_stats
from kvtier.remote.counts import RemoteCounts
from kvtier.remote.tier import RemoteTier

KeyArray = npt.NDArray[np.uint64]


class Ended(NamedTuple):
    """Loads, by ticket, that have ended since the last ``poll``."""

    loaded: tuple[int, ...]
    """Tickets of loads whose blocks have their content."""
    failed: dict[int, str]
    """The problem of each failed load, by ticket: the engine computes these blocks."""
    released: tuple[int, ...]
    """No copy writes to their device blocks any more. A late load, which was given up, comes here last."""


@dataclass(frozen=True)
class HostTierStats:
    """A snapshot."""

    host: dict[str, PoolStats]
    transfers: TransferStats
    host_bytes: int
    load_latency: LatencyStats
    store_latency: LatencyStats
    stores_hang: bool
    remote: RemoteStats | None = None
    """Statistics of the remote tier; None without one."""


class HostBooks:
    """Books of the tier in ``plan``. ``engine`` copies whole blocks; a copy is given up after ``deadline_s``."""

    def __init__(self, plan: HostPlan, engine: CopyEngine, deadline_s: float) -> None:
        self.spec = plan.spec
        self._verifies = plan.verifies
        self._arena = Arena(None, plan.layout, "cpu")
        self._pools = (CheckedPools if level_from_environment() is AuditLevel.FULL else BlockPools)(plan.layout)
        sizes = plan.fragments.block_bytes
        device_side = OutsideDevice(plan.fragments.num_blocks, plan.fragments.shares_with)
        news = CopyNews(Journal(0), plan.spec.names)
        self._connector = Connector(device_side, None, self._pools, engine, sizes, deadline_s, news)
        self._deadline_s = deadline_s
        nothing = BlockPools(Layout.fixed(sizes.tolist(), [1] * len(self.spec.groups)))  # the engine's content
        self._parts = HostParts(
            spec=self.spec,
            arrays=Rows(geometry_of(self.spec.groups, self.spec.hash_tokens)),
            device=device_side,
            connector=self._connector,
            stores=StorePolicy(self._connector, device_side, self._pools),
            matcher=Matcher(nothing, self._pools),
            door=RemoteDoor(self._connector, nothing, lambda text: text.found),
            pools=self._pools,
            keeping=Keeping(self.spec.groups, self.spec.hit_tokens, self.spec.hash_tokens),
        )

    @property
    def pools(self) -> BlockPools:
        """The host blocks."""
        return self._pools

    @property
    def verifies(self) -> bool:
        """Whether each load is checked."""
        return self._verifies

    @property
    def counts(self) -> TransferCounts:
        """Counters of transfers, as they stand."""
        return self._connector.counts

    @property
    def remote(self) -> RemoteTier | None:
        """The remote behind the tier; None without one."""
        return self._parts.door.remote

    @property
    def remote_counts(self) -> RemoteCounts | None:
        """Counters of the remote behind the tier, as they stand; None without one."""
        return None if self.remote is None else self.remote.counts

    @property
    def hit_tokens(self) -> int:
        """A hit is a multiple of it."""
        return self.spec.hit_tokens

    @property
    def hash_tokens(self) -> int:
        """Tokens per key."""
        return self.spec.hash_tokens

    def text(self, keys: KeyArray, with_remote: bool = True, are_distinct: bool = False) -> HostText:
        """Follows a token sequence of these keys. ``with_remote``: whether the remote may have it, if there is one.

        ``are_distinct``: the keys are links of a cryptographic chain, so that no two are equal; else that is looked at.
        """
        self._parts.check_open()
        return HostText(self._parts, keys, with_remote, are_distinct)

    def estimate_compute(self, seconds: ComputeSeconds) -> None:
        """``seconds(start, end)``: how long tokens of a prompt take to compute; None, or an error: nobody knows.

        What takes longer to fetch from the remote is computed. Raises ``ConfigError`` for what is no function.
        """
        self._parts.door.estimate(seconds)

    def flush_remote(self) -> None:
        """Spills everything that still waits for eviction (``spill=eviction``). Call it before the process ends.

        From the thread of ``poll``, with which the engine goes on until ``has_work`` is False; then it may ``close``.
        """
        self._parts.check_open()
        self._parts.door.flush()

    def overwrite(self, groups: Ids, blocks: Ids) -> None:
        """The engine is about to write device blocks, int32 [n] each: the writes come after the stores that read them.

        On engines without streams, waits until these stores have ended or are overdue.
        """
        self._parts.overwrite(groups, blocks)

    def poll(self) -> Ended:
        """Submits planned stores, and reports ended loads; never waits."""
        self._parts.check_open()
        self._pools.tick()
        self._parts.door.poll()
        self._connector.submit_planned()
        failures, loaded, failed, released = self._connector.take_failed_loads(), [], {}, []
        for ticket, told in list(self._parts.loads.items()):
            if not told and ticket in failures:
                failed[ticket] = failures[ticket]
            elif not told and not self._connector.ledger.is_live(ticket):
                loaded.append(ticket)
            elif not told:
                continue
            if self._connector.ledger.is_known(ticket):
                self._parts.loads[ticket] = True
            else:
                del self._parts.loads[ticket]
                released.append(ticket)
        return Ended(tuple(loaded), failed, tuple(released))

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a copy ends, the remote has news, or ``wake`` is called; ``timeout_s`` seconds at most."""
        self._parts.check_open()
        self._connector.wait(min(wait_seconds(timeout_s), self._parts.door.due_s(self._parts.asking)))

    def wake(self) -> None:
        """Ends a ``wait``; from any thread."""
        self._connector.wake()

    @property
    def has_work(self) -> bool:
        """Whether copies are under way that are not overdue, or ends of loads are still to be reported.

        Moves to and from the remote count, too. The release of a load that was given up does not count. False after
        ``close``.
        """
        return not self._parts.is_closed and (self._parts.door.num_copies > 0 or not all(self._parts.loads.values()))

    def reset(self) -> None:
        """Forgets all content, for instance because the weights have changed; loads under way fail.

        Open texts find and store nothing any more: their content is of the time before. The remote tier is left
        alone from then on: its content has the same names as before.
        """
        self._parts.check_open()
        self._connector.reset()
        self._parts.door.reset()

    def stats(self) -> HostTierStats:
        """A snapshot; from any thread."""
        counts, latencies = self._connector.counts, self._connector.latencies
        verified = counts.loaded_blocks if self._verifies else 0
        return HostTierStats(
            host=pool_stats(self._pools, self.spec.groups),
            transfers=TransferStats(live=self._connector.ledger.num_live, verified_blocks=verified, **vars(counts)),
            host_bytes=self._arena.num_bytes,
            load_latency=latencies[Direction.LOAD].stats(),
            store_latency=latencies[Direction.STORE].stats(),
            stores_hang=self._connector.stores_hang,
            remote=None if (remote := self._parts.door.remote) is None else remote.stats(),
        )

    def audit(self) -> list[Violation]:
        """Every invariant of the tier's books that the present state breaks; empty when sound."""
        tier = AuditedTier("host", self.spec.names, self._pools)
        found = list(audit_structure(tier))
        if found:
            return found
        transfers = list(self._connector.ledger.live())
        copies = Copies.of_all(transfers, self._connector.ledger.epoch)
        held = [tier.entries(hit.groups, hit.hosts) for hit in self._parts.held.values()]
        remote = RemoteMoves(tier, self._parts.door.remote)
        found += check_counters(tier, self._arena)
        owners = np.concatenate([host_owners(tier, copies, remote.owners), *held])
        found += audit_pools(tier, owners, list(self.stats().host.values()))
        found += audit_quarantine(tier, self._connector.books, copies, remote.overdue)
        found += remote.audit()
        found += self._audit_fences(transfers)
        return found

    def _audit_fences(self, transfers: Sequence[Transfer]) -> list[Violation]:
        expected = np.zeros_like(self._parts.device.arrays.blocks["fence"])
        for t in transfers:
            if t.direction is Direction.STORE and not t.ordered and t.state is not TransferState.EXPIRED:
                expected[self._parts.device.arrays.meta[t.groups, Col.BASE] + t.device] = fence_of(t.ticket)
        wrong = int((expected != self._parts.device.arrays.blocks["fence"]).sum())
        return [Violation("I17", f"fences of {wrong} device blocks are not the live stores'")] if wrong else []
