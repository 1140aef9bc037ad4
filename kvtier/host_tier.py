"""A host tier for an engine that owns its device memory, its block ids, its keys and its scheduler.

Owns       host memory, what is in it, and the copies between it and the engine's memory.
Promises   what is found is there for every group, up to one boundary; a load has landed, verified if that is asked for,
           before it is reported as such; a store holds no device block: who writes its source next is ordered after it
           (``overwrite``). A copy that fails or is late is a miss. Shortage is never an error: what has no room is not
           stored. All calls but ``wake`` come from one thread.
Does not   know requests, steps or device occupancy: a ``HostText`` follows one token sequence of the engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier._integers import integer, shown
from kvtier.audit.pools import Tier as AuditedTier
from kvtier.audit.pools import Violation, audit_pools, audit_structure, check_counters
from kvtier.audit.transfers import Copies, audit_quarantine, host_owners
from kvtier.coordinator.match import Matcher
from kvtier.coordinator.retention import Wanted
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.device_side import OutsideDevice
from kvtier.cpu_offload.engines.by_name import MakesEngine, build_engine, engine_factory
from kvtier.cpu_offload.fragments import Fragment, FragmentEngine, Fragments
from kvtier.cpu_offload.store_policy import StorePolicy
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer, TransferState
from kvtier.errors import CacheClosed, ConfigError, InvalidRequest, MemoryUnavailable, StepError
from kvtier.gpu_pool.row_state import Geo, geometry_of
from kvtier.kept import KEPT
from kvtier.layout import Layout
from kvtier.options import check_choices, seconds
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools, Col, Ids, fence_of
from kvtier.pools.pool_stats import pool_stats
from kvtier.sizing import parse_bytes
from kvtier.spec import Attention, Kind
from kvtier.stats import LatencyStats, PoolStats, TransferStats

if TYPE_CHECKING:
    import torch

Int64s = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]

CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class OutsideGroup:
    """Layers with one attention kind, as the engine lays their blocks out.

    Block b of ``num_blocks``, from 0 on, holds K and V of ``block_tokens`` consecutive tokens of these layers: its
    ``fragments``, of which fragment f lies at ``offset + b * stride`` of the engine's memory, one a layer for instance.
    """

    name: str
    attention: Attention
    block_tokens: int
    num_blocks: int
    fragments: tuple[Fragment, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of all fragments of a block."""
        return sum(fragment.num_bytes for fragment in self.fragments)


class OutsideSpec:
    """All groups of an engine."""

    def __init__(self, groups: Sequence[OutsideGroup]) -> None:
        """Raises ``ConfigError`` for groups without a name of their own or blocks without tokens."""
        self.groups = tuple(groups)
        self.names = tuple(group.name for group in groups)
        if not groups or len(set(self.names)) < len(groups):
            raise ConfigError(f"a host tier needs groups with names of their own, got {shown(self.names)}")
        for group in groups:
            sizes = integer(group.block_tokens), integer(group.num_blocks)
            if any(size is None or size < 1 for size in sizes):
                raise ConfigError(f"group {group.name!r}: block_tokens and num_blocks must be positive integers")
            if group.attention.kind is Kind.CHUNK and group.attention.span_tokens % group.block_tokens:
                raise ConfigError(f"group {group.name!r}: a block must not straddle two chunks")
        self.hash_tokens = math.gcd(*(group.block_tokens for group in groups))
        """Tokens per key: the gcd of the groups' block_tokens."""
        self.hit_tokens = math.lcm(*(group.block_tokens for group in groups))
        """What a hit is a multiple of: the lcm of the groups' block_tokens."""


@dataclass(frozen=True)
class HostHit:
    """What the tier has of a text from token ``start`` to ``end``: block ``hosts[k]`` of group ``groups[k]`` is that
    group's logical block ``at[k]``; int32 [n], int32 [n], int64 [n]. It is held until it is loaded or dropped.
    """

    start: int
    end: int
    groups: Ids
    at: Int64s
    hosts: Ids
    is_pending: bool = False
    """A store is still writing some of it: ask again later, or do without."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a load brings."""
        return self.end - self.start


class Ended(NamedTuple):
    """Loads, by ticket, that have come to an end since the last ``poll``."""

    loaded: tuple[int, ...]
    """Their blocks have their content."""
    failed: dict[int, str]
    """What went wrong: their blocks are to be computed."""
    released: tuple[int, ...]
    """Nothing writes to their device blocks any more. One that was given up, since it was late, comes here last."""


@dataclass(frozen=True)
class HostTierStats:
    """A snapshot."""

    host: dict[str, PoolStats]
    transfers: TransferStats
    host_bytes: int
    load_latency: LatencyStats
    store_latency: LatencyStats
    stores_hang: bool


class _Rows(NamedTuple):
    """The groups as a search goes through them."""

    geometry: Int64s


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
        self.arrays = _Rows(geometry_of(self.spec.groups, self.spec.hash_tokens))
        size = memory.size if isinstance(memory, np.ndarray) else memory.numel()
        num_blocks = [group.num_blocks for group in groups]
        fragments = Fragments([group.fragments for group in groups], num_blocks, size)
        layout = _layout(fragments.block_bytes.tolist(), parse_bytes(host_memory, "host_memory"))
        device = "cpu" if isinstance(memory, np.ndarray) else str(memory.device)
        make_engine = engine_factory(copy_engine, device, needed=True)
        self._verifies = verify == "full"
        self._arena = Arena(None, layout, "cpu")
        self._arena.check("host_memory")
        host = make_engine.host_memory(layout.num_bytes, "host_memory", layout.seams)
        if host is None:
            self._arena.allocate("host_memory")
        else:
            self._arena.use(host)
        self._pools = BlockPools(layout)
        bytes_of = TierMemory(fragments.on_device(memory), fragments.on_host(self._arena.bytes, layout), self._verifies)
        engine = FragmentEngine(build_engine(make_engine, bytes_of), fragments)
        self._device = OutsideDevice(np.array(num_blocks, np.int64))
        self._connector = Connector(self._device, self._pools, engine, fragments.block_bytes, limit)
        self._stores = StorePolicy(self._connector, self._device, self._pools)
        self._matcher = Matcher(
            BlockPools(Layout.fixed(fragments.block_bytes.tolist(), [1] * len(groups))), self._pools
        )
        self._wanted = Wanted()
        self._loads: dict[int, bool] = {}  # ticket: whether its end was reported, and only its release is to come
        self._held: dict[int, HostHit] = {}
        self._closed = False

    @property
    def hit_tokens(self) -> int:
        """What a hit is a multiple of."""
        return self.spec.hit_tokens

    @property
    def hash_tokens(self) -> int:
        """Tokens per key."""
        return self.spec.hash_tokens

    def text(self, keys: KeyArray) -> HostText:
        """Follows a token sequence of these keys."""
        self._check_open()
        return HostText(self, keys)

    def overwrite(self, groups: Ids, blocks: Ids) -> None:
        """The engine is about to write device blocks, int32 [n] each: it comes after the stores that read them.

        Waits, on engines without streams, until these have ended or are overdue.
        """
        self._check_open()
        self._connector.order_writers(self._device.fences(groups, blocks))

    def poll(self) -> Ended:
        """Submits what is to be stored, and says which loads have ended; never waits."""
        self._check_open()
        self._pools.tick()
        self._connector.poll()
        self._connector.submit_planned()
        failures, loaded, failed, released = self._connector.take_failed_loads(), [], {}, []
        for ticket, told in list(self._loads.items()):
            if not told and ticket in failures:
                failed[ticket] = failures[ticket]
            elif not told and not self._connector.is_live(ticket):
                loaded.append(ticket)
            elif not told:
                continue
            if self._connector.is_known(ticket):
                self._loads[ticket] = True
            else:
                del self._loads[ticket]
                released.append(ticket)
        return Ended(tuple(loaded), failed, tuple(released))

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a copy ends or ``wake`` is called, at most ``timeout_s`` seconds."""
        self._check_open()
        self._connector.wait(timeout_s)

    def wake(self) -> None:
        """Ends a ``wait``; from any thread."""
        self._connector.wake()

    @property
    def has_work(self) -> bool:
        """Whether copies are under way that are not overdue, or ends of loads are to be reported."""
        return self._connector.num_progressing > 0 or any(not told for told in self._loads.values())

    def reset(self) -> None:
        """Forgets all content; loads under way will have failed."""
        self._check_open()
        self._connector.reset()

    def stats(self) -> HostTierStats:
        """A snapshot; from any thread."""
        counts, latencies = self._connector.counts, self._connector.latencies
        verified = counts.loaded_blocks if self._verifies else 0
        return HostTierStats(
            host=pool_stats(self._pools, self.spec.groups),
            transfers=TransferStats(live=self._connector.num_live, verified_blocks=verified, **vars(counts)),
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
        transfers = list(self._connector.live())
        copies = Copies.of_all(transfers, self._connector.epoch)
        held = [tier.entries(hit.groups, hit.hosts) for hit in self._held.values()]
        found += check_counters(tier, self._arena)
        owners = np.concatenate([host_owners(tier, copies), *held])
        found += audit_pools(tier, owners, list(self.stats().host.values()))
        found += audit_quarantine(tier, self._connector.books, copies)
        found += self._audit_fences(transfers)
        return found

    def _audit_fences(self, transfers: Sequence[Transfer]) -> list[Violation]:
        expected = np.zeros_like(self._device.arrays.blocks["fence"])
        for t in transfers:
            if t.direction is Direction.STORE and not t.ordered and t.state is not TransferState.EXPIRED:
                expected[self._device.arrays.meta[t.groups, Col.BASE] + t.device] = fence_of(t.ticket)
        wrong = int((expected != self._device.arrays.blocks["fence"]).sum())
        return [Violation("I17", f"fences of {wrong} device blocks are not the live stores'")] if wrong else []

    def close(self) -> None:
        """Ends all copies, in 30 s at most, and gives the host memory back, unless a copy may still write there."""
        if self._closed:
            return
        self._closed = True
        self._connector.wake()
        if self._connector.close(CLOSE_TIMEOUT_S):
            self._arena.free()
        else:
            KEPT.append(self)

    def __enter__(self) -> HostTier:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosed("the host tier is closed")


class HostText:
    """A token sequence of the engine. ``keys``, uint64 [n, 2]: key i names the tokens up to (i + 1) * hash_tokens."""

    def __init__(self, tier: HostTier, keys: KeyArray) -> None:
        self._tier = tier
        self._keys = _checked(keys)
        self._hit: HostHit | None = None
        self._stored = 0  # tokens up to which the full groups' blocks were planned
        self._branches: set[int] = set()  # boundaries where others part from it
        self._passing: set[int] = set()  # boundaries whose windows nobody else is known to want

    def extend(self, keys: KeyArray) -> None:
        """More keys, at the end."""
        self._keys = np.concatenate([self._keys, _checked(keys)])

    # --- what is there ----------------------------------------------------------------------------

    def match(self, start: int, num_tokens: int) -> HostHit:
        """The longest hit beyond ``start``, before which the device has all; at least one of ``num_tokens`` is left.

        It is held, in place of what was held before. A ``start`` that is not a multiple of hit_tokens has none.
        """
        tier, unit = self._tier, self._tier.hit_tokens
        tier._check_open()
        self.drop()
        num_tokens = min(num_tokens, len(self._keys) * tier.hash_tokens + 1)
        nothing = HostHit(start, start, np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32))
        if start % unit or start >= num_tokens:
            return nothing
        found = tier._matcher.match(tier, self._keys, num_tokens, start=start)
        if found.full_tokens > found.num_tokens:
            self._branches.add(found.full_tokens)
        if found.num_tokens <= start:
            return nothing
        hit = HostHit(start, found.num_tokens, found.groups, found.at, found.host, found.pending)
        if not hit.is_pending:
            self._hold(hit)
        return hit

    def _hold(self, hit: HostHit) -> None:
        self._hit = self._tier._held[id(self)] = hit
        self._tier._connector.pin_host(hit.groups, hit.hosts)

    def drop(self) -> None:
        """Ends the hold."""
        if self._hit is not None:
            hit, self._hit = self._hit, None
            del self._tier._held[id(self)]
            self._tier._connector.unpin_host(hit.groups, hit.hosts)

    def load(self, blocks: Ids) -> int:
        """Starts to load what is held into device blocks, int32 [n], one for each of the hit's; returns the ticket.

        The engine keeps these blocks, and reads none of them, until ``HostTier.poll`` tells what has become of it.
        """
        tier, hit = self._tier, self._hit
        tier._check_open()
        if hit is None:
            raise StepError("nothing is held: match first")
        if len(blocks) != len(hit.hosts):
            raise InvalidRequest(f"the hit is {len(hit.hosts)} blocks; got {len(blocks)} to load them into")
        blocks = np.ascontiguousarray(blocks, np.int32)
        self._check_blocks(hit.groups, blocks)
        tier.overwrite(hit.groups, blocks)
        keys = self._names(hit.groups, hit.at)
        ticket = tier._connector.load(hit.groups, hit.hosts, blocks, keys, np.zeros(len(blocks), bool))
        tier._loads[ticket] = False
        self.drop()
        if tier._wanted.record(self._key(hit.end)):
            self._passing.add(hit.end)
        return ticket

    # --- what is given ----------------------------------------------------------------------------

    def computed(self, tables: Sequence[Ids], end: int, is_end: bool = False) -> None:
        """The engine has computed the tokens up to ``end``: plans the stores of what others may ask for.

        ``tables[g]``: device blocks of group g by logical block, int32; negative ones are not there any more. Full
        groups store their full blocks; window and chunk groups those that a hit at a boundary needs: where others have
        parted, and, with ``is_end`` (of the prompt, of the text), the last ones. What the tier has already counts as
        used again. The next ``poll`` submits the stores.
        """
        tier = self._tier
        tier._check_open()
        known = min(end, len(self._keys) * tier.hash_tokens)
        boundaries = {b for b in self._branches if self._stored < b <= known}
        for boundary in boundaries:
            tier._wanted.record(self._key(boundary))
        ends = {n // tier.hit_tokens * tier.hit_tokens for n in (known, max(0, end - 1))} - {0} if is_end else set()
        self._branches -= boundaries
        groups, at = self._worth(boundaries | {b for b in ends if b <= known}, known)
        blocks = np.array(
            [tables[g][j] if j < len(tables[g]) else -1 for g, j in zip(groups, at, strict=True)], np.int32
        )
        there = blocks >= 0
        groups, at, blocks = groups[there], at[there], blocks[there]
        self._check_blocks(groups, blocks)
        self._stored = max(self._stored, known)
        tier._stores.touch_or_store(groups, blocks, self._names(groups, at), np.zeros(len(at), bool))
        if ends:
            self._cool(ends)

    def _worth(self, boundaries: Collection[int], known: int) -> tuple[Ids, Int64s]:
        """(groups, logical blocks) of what is to be stored, each once."""
        ranges = []
        for g, group in enumerate(self._tier.spec.groups):
            bt = group.block_tokens
            if group.attention.kind is Kind.FULL:
                ranges.append((g, np.arange(self._stored // bt, known // bt)))
                continue
            see = group.attention.first_visible
            wanted = [np.arange(see(b) // bt, b // bt) for b in boundaries]
            ranges.append((g, np.unique(np.concatenate(wanted)) if wanted else np.empty(0, np.int64)))
        groups = np.repeat(np.array([g for g, _ in ranges], np.int32), [len(at) for _, at in ranges])
        return groups, np.concatenate([at for _, at in ranges]).astype(np.int64)

    def _cool(self, ends: Collection[int]) -> None:
        """What windows needed at boundaries that only this text is known to want, and moves on from, goes first."""
        tier, last = self._tier, min(ends)
        for boundary in [b for b in self._passing if b < last]:
            self._passing.discard(boundary)
            for g, group in enumerate(tier.spec.groups):
                bt, see = group.block_tokens, group.attention.first_visible
                at = np.arange(see(boundary) // bt, min(boundary, see(last)) // bt)
                if group.attention.kind is not Kind.FULL and len(at):
                    groups = np.full(len(at), g, np.int32)
                    tier._stores.touch(groups, self._names(groups, at), cold=True)
        self._passing |= {b for b in ends if self._key(b) not in tier._wanted}

    def close(self) -> None:
        """The engine follows it no more. What is stored stays; loads go on."""
        self.drop()

    def _names(self, groups: Ids, at: Int64s) -> KeyArray:
        units = self._tier.arrays.geometry[groups, Geo.UNITS]
        return np.ascontiguousarray(self._keys[(at + 1) * units - 1])

    def _key(self, boundary: int) -> KeyArray:
        key: KeyArray = self._keys[boundary // self._tier.hash_tokens - 1]
        return key

    def _check_blocks(self, groups: Ids, blocks: Ids) -> None:
        most = np.array([group.num_blocks for group in self._tier.spec.groups])
        if np.any((blocks < 0) | (blocks >= most[groups])):
            raise InvalidRequest("a device block is not one of its group's num_blocks")


def _layout(sizes: list[int], num_bytes: int) -> Layout:
    """Pools that share slabs; of their own if there is one group, or too little memory for slabs."""
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


def _checked(keys: KeyArray) -> KeyArray:
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64 or keys.ndim != 2 or keys.shape[1] != 2:
        raise InvalidRequest("keys must be uint64 [n, 2]")
    return keys
