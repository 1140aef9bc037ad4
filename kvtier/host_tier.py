"""A host tier for an engine that owns its device memory, its block ids, its keys and its scheduler.

Owns       host memory, its content, and the copies between it and the engine's memory.
Promises   a hit is there for every group, up to one boundary. A load is reported as loaded only once it has landed,
           verified if asked for. A store holds no device block: the next writer of its source is ordered after it
           (``overwrite``). A copy that fails or is late is a miss. Shortage is never an error: a block without room is
           not stored. All calls except ``wake`` come from one thread.
Does not   know requests, steps or device occupancy: a ``HostText`` follows one token sequence of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.audit.pools import Tier as AuditedTier
from kvtier.audit.pools import Violation, audit_pools, audit_structure, check_counters
from kvtier.audit.run import AuditLevel, level_from_environment
from kvtier.audit.transfers import Copies, audit_quarantine, host_owners
from kvtier.coordinator.match import Matcher
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.device_side import OutsideDevice
from kvtier.cpu_offload.engines.by_name import MakesEngine, engine_factory
from kvtier.cpu_offload.fragments import FragmentEngine, Fragments
from kvtier.cpu_offload.memory_guard import MemoryGuard
from kvtier.cpu_offload.outside import OutsideGroup, OutsideSpec
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.errors import ConfigError, MemoryUnavailable
from kvtier.gpu_pool.row_state import geometry_of
from kvtier.host_text import HostParts, HostText, Rows
from kvtier.layout import Layout
from kvtier.options import check_choices, seconds, wait_seconds
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools, Col, Ids, fence_of
from kvtier.pools.checked import CheckedPools
from kvtier.pools.pool_stats import pool_stats
from kvtier.sizing import parse_bytes
from kvtier.stats import LatencyStats, PoolStats, TransferStats

if TYPE_CHECKING:
    import torch

Int64s = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]


class Ended(NamedTuple):
    """Loads, by ticket, that have ended since the last ``poll``."""

    loaded: tuple[int, ...]
    """Their blocks have their content."""
    failed: dict[int, str]
    """By ticket, the problem: the engine computes these blocks."""
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


class HostTier:
    """Host memory behind an engine's own device memory. See ``examples/own_memory.py``.

    ``memory``        the engine's: uint8 [bytes], a NumPy array or a torch tensor, on a CPU or a GPU.
    ``host_memory``   bytes, an int or text such as "64GiB".
    ``verify``        "full": a checksum per stored block, checked after each load before it is reported.
    ``deadline_s``    seconds after which a copy is given up.
    ``copy_engine``   as ``KVCache``'s.

    Raises ``ConfigError`` and ``MemoryUnavailable``.
    """

    def __init__(
        self,
        groups: Sequence[OutsideGroup],
        memory: npt.NDArray[np.uint8] | torch.Tensor,
        host_memory: str | int,
        verify: str = "full",
        deadline_s: float = 30.0,
        copy_engine: MakesEngine | str | None = None,
    ) -> None:
        check_choices(verify=verify)
        limit = seconds(deadline_s, "deadline_s")
        self.spec = OutsideSpec(groups)
        size = _size(memory)
        num_blocks = [group.num_blocks for group in groups]
        fragments = Fragments([group.fragments for group in groups], num_blocks, size)
        layout = _layout(fragments.block_bytes.tolist(), parse_bytes(host_memory, "host_memory"))
        device = "cpu" if isinstance(memory, np.ndarray) else str(memory.device)
        make_engine = engine_factory(copy_engine, device, needed=True)
        self._verifies = verify == "full"
        self._arena = Arena(None, layout, "cpu")
        self._arena.check("host_memory")
        self._guard = MemoryGuard(make_engine, [self._arena])
        try:
            host = make_engine.host_memory(layout.num_bytes, "host_memory", layout.seams)
            if host is None:
                self._arena.allocate("host_memory")
            else:
                self._arena.use(host)
            self._pools = (CheckedPools if level_from_environment() is AuditLevel.FULL else BlockPools)(layout)
            on_device, on_host = fragments.on_device(memory), fragments.on_host(self._arena.bytes, layout)
            engine = self._guard.build_engine(self, TierMemory(on_device, on_host, self._verifies))
            self._open_books(fragments, FragmentEngine(engine, fragments), limit)
        except BaseException:
            self._guard.give_up()
            raise

    def _open_books(self, fragments: Fragments, engine: FragmentEngine, deadline_s: float) -> None:
        device_side = OutsideDevice(fragments.num_blocks, fragments.shares_with)
        self._connector = Connector(device_side, self._pools, engine, fragments.block_bytes, deadline_s)
        nothing = BlockPools(Layout.fixed(fragments.block_bytes.tolist(), [1] * len(self.spec.groups)))
        self._parts = HostParts(
            spec=self.spec,
            arrays=Rows(geometry_of(self.spec.groups, self.spec.hash_tokens)),
            device=device_side,
            connector=self._connector,
            stores=StorePolicy(self._connector, device_side, self._pools),
            matcher=Matcher(nothing, self._pools),  # only the engine knows the device's content
        )

    @property
    def hit_tokens(self) -> int:
        """A hit is a multiple of it."""
        return self.spec.hit_tokens

    @property
    def hash_tokens(self) -> int:
        """Tokens per key."""
        return self.spec.hash_tokens

    def text(self, keys: KeyArray) -> HostText:
        """Follows a token sequence of these keys."""
        self._parts.check_open()
        return HostText(self._parts, keys)

    def overwrite(self, groups: Ids, blocks: Ids) -> None:
        """The engine is about to write device blocks, int32 [n] each: the writes come after the stores that read them.

        On engines without streams, waits until these stores have ended or are overdue.
        """
        self._parts.overwrite(groups, blocks)

    def poll(self) -> Ended:
        """Submits planned stores, and reports ended loads; never waits."""
        self._parts.check_open()
        self._pools.tick()
        self._connector.poll()
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
        """Sleeps until a copy ends or ``wake`` is called, at most ``timeout_s`` seconds."""
        self._parts.check_open()
        self._connector.wait(wait_seconds(timeout_s))

    def wake(self) -> None:
        """Ends a ``wait``; from any thread."""
        self._connector.wake()

    @property
    def has_work(self) -> bool:
        """Whether copies are under way that are not overdue, or ends of loads are still to be reported.

        The release of a load that was given up does not count. False after ``close``.
        """
        if self._parts.is_closed:
            return False
        return self._connector.ledger.num_progressing > 0 or any(not told for told in self._parts.loads.values())

    def reset(self) -> None:
        """Forgets all content, for instance because the weights have changed; loads under way fail.

        Open texts find and store nothing any more: their content is of the time before.
        """
        self._parts.check_open()
        self._connector.reset()

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
        found += check_counters(tier, self._arena)
        owners = np.concatenate([host_owners(tier, copies), *held])
        found += audit_pools(tier, owners, list(self.stats().host.values()))
        found += audit_quarantine(tier, self._connector.books, copies)
        found += self._audit_fences(transfers)
        return found

    def _audit_fences(self, transfers: Sequence[Transfer]) -> list[Violation]:
        expected = np.zeros_like(self._parts.device.arrays.blocks["fence"])
        for t in transfers:
            if t.direction is Direction.STORE and not t.ordered and t.state is not TransferState.EXPIRED:
                expected[self._parts.device.arrays.meta[t.groups, Col.BASE] + t.device] = fence_of(t.ticket)
        wrong = int((expected != self._parts.device.arrays.blocks["fence"]).sum())
        return [Violation("I17", f"fences of {wrong} device blocks are not the live stores'")] if wrong else []

    def close(self) -> None:
        """Ends all copies, in 30 s at most, and gives the host memory back, unless a copy may still write there.

        Called again, it looks again, for a moment, if memory could not be given back. From any thread.
        """
        self._parts.is_closed = True
        self._connector.wake()
        self._guard.close()

    def __enter__(self) -> HostTier:
        self._parts.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _size(memory: npt.NDArray[np.uint8] | torch.Tensor) -> int:
    """Bytes of the engine's memory. Raises ``ConfigError`` for what is none."""
    if isinstance(memory, np.ndarray):
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.carray:
            raise ConfigError("memory must be uint8 [bytes], contiguous and writable")
        return memory.size
    flat = getattr(memory, "dtype", None) is not None and hasattr(memory, "data_ptr")
    if not flat or memory.element_size() != 1 or memory.dim() != 1 or not memory.is_contiguous():
        raise ConfigError("memory must be uint8 [bytes], contiguous and writable")
    return memory.numel()


def _layout(sizes: list[int], num_bytes: int) -> Layout:
    """Pools that share slabs. Separate pools if there is one group, or too little memory for slabs."""
    layout = Layout.of_slabs(sizes, num_bytes) if len(sizes) > 1 else None
    if layout is None:
        blocks = num_bytes // sum(sizes) - 1
        if blocks < 1:
            raise MemoryUnavailable(
                f"host_memory is {num_bytes:,} bytes, but one block and the null block of every group take "
                f"{2 * sum(sizes):,}; raise host_memory"
            )
        layout = Layout.fixed(sizes, [blocks] * len(sizes))
    return layout
