"""The facade: one KV cache of two tiers, as an engine holds it.

Owns       the arenas, the pools, the copy engine; builds everything else from the options.
Promises   an option that cannot work raises a typed error before anything is allocated; ``close`` is idempotent and
           bounded. Keeps I22, I23, I28.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtier import capacity
from kvtier._audit_step import audit_step
from kvtier._integers import integer, shown
from kvtier.audit import AuditLevel, Violation, audit, check_counts, level_from_environment
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.reports import Reports
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.engines import PROTOCOL, CopyEngine
from kvtier.cpu_offload.engines.cuda_link import CudaLink
from kvtier.cpu_offload.engines.null import NullEngine
from kvtier.cpu_offload.engines.simulated import SimulatedEngine
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.device import check_device_memory, resolve_device
from kvtier.errors import CacheClosed, ConfigError, InvariantBroken, MemoryUnavailable, StepError
from kvtier.gpu_pool.arena import Arena
from kvtier.gpu_pool.block_pool import BlockPools, Col
from kvtier.keys import KeyChain
from kvtier.layout import Layout
from kvtier.sizing import fixed_blocks, layout_of, parse_bytes
from kvtier.spec import CacheSpec, GroupSpec, Kind
from kvtier.stats import CacheStats, PoolStats, TransferStats
from kvtier.warmup import warm_up

if TYPE_CHECKING:
    import torch

    from kvtier.coordinator.scheduler import Scheduler

CLOSE_TIMEOUT_S = 30.0
LAST_S = 1.0
"""What a cache that nobody closed waits for the end of its copies; idle threads end at once."""
MOST_SECONDS = 2**62

EngineFactory = Callable[[TierMemory], CopyEngine]

ENGINES: dict[str, EngineFactory] = {"threads": ThreadsEngine, "simulated": SimulatedEngine, "null": NullEngine}
"""Copy engines by name, for arenas that the CPU can address; see ``kvtier.cpu_offload.engines``."""
CUDA = "cuda"
"""The engine's name on a GPU."""


class KVCache:
    """Pools of every group in device memory and, with ``host_bytes`` or ``host_blocks``, in host memory.

    ``device``            "cpu", "cuda:N", or "meta" (bookkeeping without tensors, for planning and simulation).
    ``device_bytes``      one arena, shared by the groups' pools: an int or text such as "8GiB".
    ``device_blocks``     instead of bytes: usable blocks per group, null blocks not counted. ``host_blocks`` likewise.
    ``store``             "eager": store a block once it is full; "lazy": before it is evicted; "off".
    ``verify``            "full": a checksum per stored block, checked after each load before the block is used.
    ``on_load_error``     "recompute" what could not be loaded, or "fail" the request with "load_error".
    ``deadline_s``        seconds after which a copy is given up and its blocks are quarantined.
    ``model_id``          part of every key: caches of different models or versions never share.
    ``key_secret``        bytes that key the hash, one at least; random per process unless given.
    ``copy_engine``       "threads", "simulated", "null", on a GPU "cuda", or a function from ``TierMemory`` to a copy
                          engine; default: what suits the device.

    Raises ``ConfigError`` and ``MemoryUnavailable``.
    """

    def __init__(
        self,
        spec: CacheSpec,
        device: str = "cpu",
        device_bytes: str | int | None = None,
        host_bytes: str | int = 0,
        device_blocks: Mapping[str, int] | None = None,
        host_blocks: Mapping[str, int] | None = None,
        store: str = "eager",
        verify: str = "off",
        on_load_error: str = "recompute",
        deadline_s: float = 30.0,
        model_id: str = "",
        key_secret: bytes | None = None,
        copy_engine: EngineFactory | str | None = None,
    ) -> None:
        if not isinstance(spec, CacheSpec):
            raise ConfigError(f"spec must be a CacheSpec, got {type(spec).__name__}")
        _choice("store", store, ("eager", "lazy", "off"))
        _choice("verify", verify, ("off", "full"))
        _choice("on_load_error", on_load_error, ("recompute", "fail"))
        whole = integer(deadline_s)
        deadline_s = deadline_s if whole is None else whole
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not deadline_s > 0:
            raise ConfigError(f"deadline_s must be a positive number of seconds, got {shown(deadline_s)}")
        if isinstance(deadline_s, int) and deadline_s > MOST_SECONDS:
            raise ConfigError(f"deadline_s is more than {MOST_SECONDS} seconds; float('inf') means no deadline")
        if not isinstance(model_id, str):
            raise ConfigError(f"model_id must be a string, got {model_id!r}")
        if key_secret is not None and (not isinstance(key_secret, bytes) or not key_secret):
            raise ConfigError("key_secret must be bytes, one at least (16 random ones are best), or None")
        self.audit_level = level_from_environment()
        """What is checked after every schedule, commit and cancel; from ``KVTIER_AUDIT`` when the cache is built."""
        self.spec = spec
        self.device = resolve_device(device)
        self.on_load_error = on_load_error
        layout = self._device_layout(device_bytes, device_blocks)
        host_layout = self._host_layout(host_bytes, host_blocks)
        make_engine = _engine_factory(copy_engine, self.device, host_layout is not None)
        self.warmup_s = warm_up()
        self._arena = Arena(spec, layout, self.device)
        self._host_arena: Arena | None = None
        self._last: weakref.finalize[..., KVCache] | None = None
        device_setting = "device_blocks" if device_blocks is not None else "device_bytes"
        host_setting = "host_blocks" if host_blocks is not None else "host_bytes"
        self._arena.check(device_setting)
        check_device_memory(self.device, self._arena.num_bytes, device_setting)
        if host_layout is not None:
            self._host_arena = Arena(spec, host_layout, "meta" if self.device == "meta" else "cpu")
            self._host_arena.check(host_setting, self._arena.num_bytes if self.device == "cpu" else 0)
        try:
            self._arena.allocate(device_setting)
            if self._host_arena is not None:
                self._allocate_host(self._host_arena, host_setting, make_engine)
            with _room_for_books(device_setting, layout):
                pools = BlockPools(layout)
            with _room_for_books(host_setting, host_layout):
                host = None if host_layout is None else BlockPools(host_layout)
            engine = None
            if self._host_arena is not None:
                with _room_for_books(host_setting, host_layout):
                    memory = TierMemory(self._arena, self._host_arena, verify == "full")
                engine = self._make_engine(make_engine, memory)
            self._pools, self._host = pools, host
            with _room_for_books(device_setting, layout):
                self._connector = Connector(pools, host, engine, self._arena.block_bytes, deadline_s)
                chain = KeyChain(spec, model_id, key_secret)
                move = getattr(engine, "move", self._arena.move)  # an engine that simulates a device does it there
                self._coordinator = Coordinator(spec, pools, host, self._connector, chain, store, move)
            self._views = [self._arena.views(g) for g in range(len(spec.groups))] if self.device != "meta" else []
        except BaseException:
            self._give_up()
            raise
        self._scheduler: Scheduler | None = None
        self._closed = False

    def _make_engine(self, make_engine: EngineFactory, memory: TierMemory) -> CopyEngine:
        engine = make_engine(memory)
        missing = [name for name in PROTOCOL if not callable(getattr(engine, name, None))]
        if missing:
            raise ConfigError(f"copy_engine made a {type(engine).__name__}, which has no {', '.join(missing)}")
        # A cache that nobody closed must not leave its engine's threads behind, nor free what a copy still writes.
        self._last = weakref.finalize(self, _stop, engine, memory)
        return engine

    def _give_up(self) -> None:
        """Gives back what a cache that cannot be made has taken so far."""
        if self._last is not None:
            self._last()
        self._arena.free()
        if self._host_arena is not None:
            self._host_arena.free()

    def _allocate_host(self, arena: Arena, setting: str, make_engine: EngineFactory) -> None:
        """The host tier's memory: the engine's own if it brings some (pinned, near its device)."""
        own = getattr(make_engine, "host_memory", None)
        if own is None:
            arena.allocate(setting)
            return
        arena.use(own(arena.num_bytes, setting, arena.layout.seams))

    def _device_layout(self, num_bytes: str | int | None, blocks: Mapping[str, int] | None) -> Layout:
        if (num_bytes is None) == (blocks is None):
            raise ConfigError("give either device_bytes or device_blocks")
        if blocks is not None:
            return self._fixed(blocks, "device_blocks")
        assert num_bytes is not None
        return layout_of(self.spec, parse_bytes(num_bytes, "device_bytes"), "device_bytes")

    def _fixed(self, blocks: Mapping[str, int], setting: str) -> Layout:
        return Layout.fixed([group.block_bytes for group in self.spec.groups], fixed_blocks(self.spec, blocks, setting))

    def _host_layout(self, num_bytes: str | int, blocks: Mapping[str, int] | None) -> Layout | None:
        size = parse_bytes(num_bytes, "host_bytes")
        if blocks is not None:
            if size:
                raise ConfigError("give either host_bytes or host_blocks, not both")
            return self._fixed(blocks, "host_blocks")
        return layout_of(self.spec, size, "host_bytes") if size else None

    # --- for the engine ---------------------------------------------------------------------------

    def kv(self, group: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of layer ``layer`` of the group (its index there), as strided views of the arena.

        Each [usable + 1, block_tokens, num_kv_heads, head_dim]; a block id indexes dim 0. Write new tokens by slot
        mapping, read through block tables; block 0 is the null block and is never written.
        """
        self.check_open()
        g = self.spec.index(group)
        at = integer(layer)
        if at is None or not 0 <= at < self.spec.groups[g].num_layers:
            raise ConfigError(f"group {group!r} has layers 0..{self.spec.groups[g].num_layers - 1}, not {shown(layer)}")
        if not self._views:
            return self._arena.views(g)[at]
        return self._views[g][at]

    def attach_scheduler(self, scheduler: Scheduler, max_running: int) -> Coordinator:
        """Gives the coordinator to the scheduler that drives this cache; ``StepError`` while another one does."""
        self.check_open()
        if self._scheduler is not None and self._scheduler.has_work():
            raise StepError("this cache is driven by a scheduler that still has work")
        try:
            self._coordinator.use_tables(max_running)
        except MemoryError as problem:
            raise MemoryUnavailable(
                f"the block tables of {max_running:,} requests do not fit into memory ({problem}); lower max_running"
            ) from problem
        self._scheduler = scheduler
        return self._coordinator

    # --- looking in -------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """A snapshot of both tiers; may come from any thread."""
        counts = self._connector.counts
        scheduler = self._scheduler
        reports = scheduler.reports if scheduler else Reports()
        return CacheStats(
            device=self._pool_stats(self._pools),
            host=self._pool_stats(self._host) if self._host is not None else {},
            transfers=TransferStats(live=self._connector.num_live, **vars(counts)),
            device_bytes=self._arena.num_bytes,
            host_bytes=self._host_arena.num_bytes if self._host_arena is not None else 0,
            device_capacity_tokens=self._capacity_tokens(self._pools),
            host_capacity_tokens=self._capacity_tokens(self._host) if self._host is not None else 0,
            prompt_tokens=dict(scheduler.reports.prompt_tokens)
            if scheduler
            else {"device": 0, "host": 0, "computed": 0},
            requests={
                "waiting": scheduler.num_waiting if scheduler else 0,
                "running": scheduler.num_running if scheduler else 0,
                "finished": reports.num_finished,
                "preemptions": reports.num_preemptions,
            },
            link=getattr(self._connector.engine, "link_stats", lambda: None)(),
            warmup_s=self.warmup_s,
        )

    def _pool_stats(self, pools: BlockPools) -> dict[str, PoolStats]:
        return {
            group.name: self._group_stats(pools, pools.arrays.meta[g].tolist(), group)
            for g, group in enumerate(self.spec.groups)
        }

    @staticmethod
    def _group_stats(pools: BlockPools, meta: list[int], group: GroupSpec) -> PoolStats:
        """From one group's row of ``meta``. Another thread may be changing it: each number may be of another moment,
        but together they never come to more than there is."""
        usable = left = meta[Col.ROWS] - 1
        parts = []
        lent = usable - (meta[Col.SLABS] + pools.num_unused) * meta[Col.PER_SLAB]
        for n in (meta[Col.HELD], meta[Col.QUARANTINED], meta[Col.FENCED], meta[Col.CACHED], lent):
            parts.append(min(max(n, 0), left))
            left -= parts[-1]
        held, quarantined, fenced, cached, lent = parts
        return PoolStats(
            usable=usable,
            empty=left,
            cached=cached,
            fenced=fenced,
            held=held,
            quarantined=quarantined,
            lent=lent,
            peak_held=meta[Col.PEAK_HELD],
            evicted=meta[Col.EVICTED],
            block_bytes=group.block_bytes,
            block_tokens=group.block_tokens,
        )

    def _capacity_tokens(self, pools: BlockPools) -> int:
        """The longest context that fits alone; of a model that forgets all but its windows, that of its pools."""
        groups = self.spec.groups
        of = [g for g, group in enumerate(groups) if group.attention.kind is Kind.FULL] or range(len(groups))
        most = min(int(pools.usable[g]) * groups[g].block_tokens for g in of)
        longest = capacity.longest(pools.layout, self.spec) if pools.shared else None
        return most if longest is None else min(most, longest)

    def audit(self) -> list[Violation]:
        """Every invariant that the present state breaks; empty when sound. Changes nothing.

        Call it from the scheduling thread, between two of its calls.
        """
        self.check_open()
        return audit(self)

    def check_invariants(self, moment: str) -> None:
        """What ``KVTIER_AUDIT`` asks for, after ``moment``; raises ``InvariantBroken`` if something is wrong."""
        if self.audit_level is AuditLevel.OFF:
            return
        found = self.audit() if self.audit_level is AuditLevel.FULL else check_counts(self)
        if found:
            raise InvariantBroken(moment, found)

    def check_step(self) -> None:
        """With ``KVTIER_AUDIT=2``, before a step ends: the arrays that the engine was given for its forward."""
        if self.audit_level is AuditLevel.FULL and self._scheduler is not None and self._scheduler.step is not None:
            found = list(audit_step(self._coordinator, self._scheduler, self._scheduler.step))
            if found:
                raise InvariantBroken("the forward", found)

    @property
    def parts(self) -> tuple[Coordinator, BlockPools | None, Scheduler | None]:
        """The coordinator, the host pools and the scheduler; for auditing."""
        return self._coordinator, self._host, self._scheduler

    @property
    def copy_engine(self) -> CopyEngine | None:
        """What moves bytes between the tiers; None without a host tier."""
        return self._connector.engine

    @property
    def arenas(self) -> tuple[Arena, Arena | None]:
        """The memory of device and host; for auditing and for engines that simulate a device."""
        return self._arena, self._host_arena if self._host is not None else None

    # --- life -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all cached content in both tiers, for instance because the weights have changed.

        Nothing cached or under way before is ever found again; requests that run keep their own blocks, requests whose
        prefix is being loaded recompute. Call it from the scheduling thread.
        """
        self.check_open()
        self._coordinator.reset()
        if self._scheduler is not None:
            self._scheduler.on_reset()

    def check_driver(self, scheduler: Scheduler) -> None:
        """Raises ``StepError`` if another scheduler has taken this cache over, ``CacheClosed`` after ``close``."""
        self.check_open()
        if self._scheduler is not scheduler:
            raise StepError("this cache is driven by another scheduler, which was made later")

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raises ``CacheClosed`` after ``close``."""
        if self._closed:
            raise CacheClosed("the cache is closed")

    def close(self) -> None:
        """Ends all copies (bounded) and gives the memory back. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._connector.close(CLOSE_TIMEOUT_S):
            self._views = []
            self._arena.free()
            if self._host_arena is not None:
                self._host_arena.free()

    def __enter__(self) -> KVCache:
        self.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_STILL_WRITTEN: list[TierMemory] = []
"""Memory of caches that are gone while copies in it had not ended: kept for good, since something may write there."""


def _stop(engine: CopyEngine, memory: TierMemory) -> None:
    """The last of a cache: stops its engine, and keeps the memory if that does not stop."""
    if not engine.close(LAST_S):
        _STILL_WRITTEN.append(memory)


@contextmanager
def _room_for_books(setting: str, layout: Layout | None) -> Iterator[None]:
    """Turns a bare ``MemoryError`` while the books of a tier's blocks are set up into one that names the setting."""
    try:
        yield
    except MemoryUnavailable:
        raise
    except MemoryError as problem:
        assert layout is not None
        raise MemoryUnavailable(
            f"{setting}: {layout.num_bytes:,} bytes are {int(layout.rows.sum()):,} blocks, whose bookkeeping does not "
            f"fit into memory ({problem or 'out of memory'}); lower {setting} or raise block_tokens"
        ) from problem


def _engine_factory(engine: EngineFactory | str | None, device: str, needed: bool) -> EngineFactory:
    """The copy engine by name, or the one that suits the device: the meta device has no bytes to move."""
    if callable(engine):
        return engine
    on_cuda = device.startswith("cuda")
    name = ("null" if device == "meta" else CUDA if on_cuda else "threads") if engine is None else engine
    if isinstance(name, str) and name == CUDA and on_cuda:
        return CudaLink(int(device.partition(":")[2])) if needed else NullEngine
    if not isinstance(name, str) or name not in ENGINES or (on_cuda and needed and name != "null"):
        names = (CUDA, "null") if on_cuda else ENGINES
        raise ConfigError(
            f"copy_engine must be one of {', '.join(map(repr, names))} or a factory on {device}, got {engine!r}"
        )
    return ENGINES[name]


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
