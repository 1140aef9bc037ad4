"""The facade: one KV cache of two tiers, as an engine holds it.

Owns       the arenas, the pools, the copy engine; builds everything else from the options.
Promises   an option that cannot work raises a typed error before anything is allocated; ``close`` is idempotent and
           bounded. Keeps I22, I23, I28.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvtier.audit.run import AuditLevel, Checks, Violation, audit
from kvtier.cache.settings import Options
from kvtier.cache.warmup import warm_up
from kvtier.coordinator.coordinator import Coordinator
from kvtier.coordinator.core import Core
from kvtier.coordinator.reports import Reports
from kvtier.coordinator.tracked import Wait
from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.engines import CopyEngine, EngineFactory
from kvtier.cpu_offload.engines.by_name import MakesEngine
from kvtier.cpu_offload.failures import CopyNews
from kvtier.cpu_offload.memory_guard import MemoryGuard
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction
from kvtier.geometry import capacity
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.kinds import Kind
from kvtier.geometry.options import refuse
from kvtier.geometry.spec import CacheSpec, GroupSpec
from kvtier.machine.device import check_device_memory
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import integer, shown
from kvtier.machine.journal import Journal
from kvtier.machine.stats import CacheStats, PoolStats, TransferStats
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools
from kvtier.pools.pool_stats import pool_stats
from kvtier.remote.backends.contract import Backend
from kvtier.remote.opening import open_remote, remote_namespace

if TYPE_CHECKING:
    import torch


class KVCache:
    """Pools of every group in device memory and, with ``host_bytes`` or ``host_blocks``, in host memory.

    ``device``            "cpu", "cuda:N", or "meta" (bookkeeping without tensors, for planning and simulation).
    ``device_bytes``      one arena, shared by the groups' pools: an int or text such as "8GiB".
    ``device_blocks``     instead of bytes: usable blocks per group, null blocks not counted. ``host_blocks`` likewise.
    ``store``             "eager": store a block once it is full; "lazy": before it is evicted; "off".
    ``verify``            "full": a checksum per stored block, checked after each load before the block is used.
    ``on_load_error``     after a failed load: "recompute" its content, or "fail" the request with "load_error".
    ``deadline_s``        seconds after which a copy is given up and its blocks are quarantined.
    ``model_id``          part of every key: caches of different models or versions never share.
    ``key_secret``        bytes that key the hash, one at least; random per process unless given.
    ``copy_engine``       "threads", "simulated", "null", on a GPU "cuda", or a function from ``TierMemory`` to a copy
                          engine; default: the engine that suits the device.
    ``remote_uri``         a remote tier, such as "file:///var/kv", "s3://bucket/prefix" or
                          "mooncake://host:port", or a ``Backend``; it needs ``model_id`` and ``key_secret``. Caches
                          with the same two, groups and remote tier share their blocks.
    ``journal_events``    how many of the newest events ``journal`` keeps, for ``explain``; about 500 bytes each.

    Raises ``ConfigError`` and ``MemoryUnavailable``.
    """

    def __init__(
        self,
        spec: CacheSpec,
        device: str = "cpu",
        device_bytes: str | int | None = None,
        host_bytes: str | int | None = 0,
        device_blocks: Mapping[str, int] | None = None,
        host_blocks: Mapping[str, int] | None = None,
        store: str = "eager",
        verify: str = "off",
        on_load_error: str = "recompute",
        deadline_s: float = 30.0,
        model_id: str = "",
        key_secret: bytes | None = None,
        copy_engine: MakesEngine | str | None = None,
        journal_events: int = 0,
        remote_uri: str | Backend | None = None,
        **unknown: Any,
    ) -> None:
        refuse("KVCache", unknown)
        options = Options(device, device_bytes, host_bytes, device_blocks, host_blocks, store, verify, on_load_error,
                          deadline_s, model_id, key_secret, copy_engine, journal_events, remote_uri)  # fmt: skip
        settings = options.read(spec)
        self.journal = Journal(journal_events)
        """The newest events of requests and copies, for ``explain``; none unless ``journal_events`` is given."""
        self.checks = Checks(settings.audit_level)
        """The checks after every schedule, commit and cancel; from ``KVTIER_AUDIT`` when the cache is built."""
        self.spec = spec
        self.device = settings.device
        self.on_load_error = on_load_error
        self.verify = verify
        self._device_tier, self._host_tier = settings.device_tier, settings.host_tier
        self.warmup_s = warm_up().seconds
        arenas = self._arena, self._host_arena
        self._guard = MemoryGuard(settings.make_engine, [arena for arena in arenas if arena is not None])
        settings.check_room()
        check_device_memory(self.device, self._arena.num_bytes, self._device_tier.setting)
        try:
            self._allocate(settings.make_engine)
            engine = self._make_engine(verify == "full")
            with self._device_tier.room():
                chain = KeyChain(spec, model_id, key_secret)
                self._open_books(engine, settings.deadline_s, chain, store)
                if remote_uri is not None and key_secret is not None:
                    self._open_backend(remote_uri, chain, key_secret, settings.deadline_s)
            self._views = self._views_of_layers() if self.device != "meta" else {}
        except BaseException:
            self._guard.give_up()
            raise
        self.core = Core(spec, self._coordinator, self._host, arenas, on_load_error, self.checks)
        """The parts of the cache, for its driver: a ``Scheduler``, a ``CacheManager``."""

    @property
    def _arena(self) -> Arena:
        return self._device_tier.arena

    @property
    def _host_arena(self) -> Arena | None:
        return self._host_tier.arena if self._host_tier is not None else None

    @property
    def _pools(self) -> BlockPools:
        return self._device_tier.pools

    @property
    def _host(self) -> BlockPools | None:
        return self._host_tier.pools if self._host_tier is not None else None

    def _allocate(self, make_engine: EngineFactory) -> None:
        """Allocates both tiers' memory, then their books.

        The copy engine may bring the host tier's memory (pinned, near its device).
        """
        self._device_tier.allocate()
        if self._host_tier is not None:
            self._host_tier.allocate(make_engine.host_memory)
        checked = self.checks.level == AuditLevel.FULL
        self._device_tier.open_books(checked)
        if self._host_tier is not None:
            self._host_tier.open_books(checked)

    def _make_engine(self, verifies: bool) -> CopyEngine | None:
        if self._host_tier is None:
            return None
        with self._host_tier.room():
            memory = self._memory = TierMemory(self._arena, self._host_tier.arena, verifies)
        return self._guard.build_engine(self, memory)

    def _open_books(self, engine: CopyEngine | None, deadline_s: float, chain: KeyChain, store: str) -> None:
        news = CopyNews(self.journal, self.spec.names)
        pools = self._pools, self._pools, self._host
        self._connector = Connector(*pools, engine, self._arena.block_bytes, deadline_s, news)
        move = self._arena.move if engine is None else engine.move
        books = self._pools, self._host, self._connector
        self._coordinator = Coordinator(self.spec, *books, chain, store, move, self.journal)

    def _open_backend(self, uri: str | Backend, chain: KeyChain, secret: bytes, deadline_s: float) -> None:
        assert self._host is not None and self._host_arena is not None and self._connector.engine is not None
        self.remote_namespace = remote_namespace(chain, self.spec, secret)
        remote = open_remote(uri, chain, secret, self.spec, self._host, self._memory, self._connector, deadline_s)
        self._guard.also(self, remote.close)
        self._coordinator.door.open(remote)

    # --- for the engine ---------------------------------------------------------------------------

    def kv(self, group: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of layer ``layer`` of the group (its index there), as strided views of the arena.

        Each [usable + 1, block_tokens, num_kv_heads, head_dim]; a block id indexes dim 0. Write new tokens by slot
        mapping, read through block tables; block 0 is the null block and is never written. V has a head_dim of 0 in a
        group that keeps K alone. If tokens share entries, dim 1 has ``block_entries``, written by ``entries()``.
        """
        k, v = self._view("kv", group, layer, "keeps states: ask state(group, layer)")
        return k, v

    def state(self, group: str, layer: int) -> tuple[torch.Tensor, ...]:
        """The parts of layer ``layer`` of a group of states (its index there), as strided views of the arena.

        Each [usable + 2, *part.shape], in the order of ``RecurrentState.parts``; a block id indexes dim 0.
        ``Step.group(name).states()`` says which block to read and which to write: never block 0; the last takes what
        rows that pad a step leave.
        """
        return self._view("state", group, layer, "keeps keys and values: ask kv(group, layer)")

    def _view(self, role: str, group: str, layer: int, instead: str) -> tuple[torch.Tensor, ...]:
        self.check_open()
        at = layer if type(layer) is int else integer(layer)
        views = self._views.get((role, group, at)) if type(group) is str else None
        if views is not None:
            return views
        g = self.spec.index(group)
        if _role(self.spec.groups[g]) != role:
            raise ConfigError(f"group {group!r} {instead}")
        if at is None or not 0 <= at < self.spec.groups[g].num_layers:
            raise ConfigError(f"group {group!r} has layers 0..{self.spec.groups[g].num_layers - 1}, not {shown(layer)}")
        return self._arena.views(g)[at]  # of a cache without bytes, on "meta", they are made when they are asked for

    def _views_of_layers(self) -> dict[tuple[str, str, int | None], tuple[torch.Tensor, ...]]:
        """By role, group and layer."""
        return {
            (_role(group), group.name, layer): views
            for g, group in enumerate(self.spec.groups)
            for layer, views in enumerate(self._arena.views(g))
        }

    # --- looking in -------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """A snapshot of both tiers; may come from any thread, and after ``close``."""
        counts, latencies, tally = self._connector.counts, self._connector.latencies, self._coordinator.counts
        verifies = self.verify == "full"
        driver = self.core.driver
        reports = driver.reports if driver else Reports(self._coordinator.tiers)
        return CacheStats(
            device=self._pool_stats(self._pools),
            host=self._pool_stats(self._host) if self._host is not None else {},
            transfers=TransferStats(
                live=self._connector.ledger.num_live,
                verified_blocks=counts.loaded_blocks if verifies else 0,
                **vars(counts),
            ),
            device_bytes=self._arena.num_bytes,
            host_bytes=self._host_arena.num_bytes if self._host_arena is not None else 0,
            device_capacity_tokens=self._device_capacity_tokens,
            host_capacity_tokens=self._host_capacity_tokens,
            prompt_tokens=dict(reports.prompt_tokens),
            requests={
                "waiting": len(driver.roster.waiting) + driver.num_arrived if driver else 0,
                "running": len(driver.roster.running) if driver else 0,
                "finished": reports.num_finished,
                "preemptions": reports.num_preemptions,
            },
            waiting=driver.roster.count_waiting(driver.num_arrived) if driver else {wait.value: 0 for wait in Wait},
            waits=dict(tally.waits),
            finished=dict(tally.finished),
            prefix_tokens=self._prefix_tokens(),
            ends=self._coordinator.retention.keeping.boundaries.stats(),
            shortages={who: dict(of) for who, of in tally.shortages.items()},
            sent_back=dict(tally.sent_back),
            preempted_for=dict(tally.preempted_for),
            step_sizes=tuple(tally.step_sizes),
            computed_tokens=tally.computed_tokens,
            generated_tokens=tally.generated_tokens,
            cancelled_steps=tally.cancelled_steps,
            load_latency=latencies[Direction.LOAD].stats(),
            store_latency=latencies[Direction.STORE].stats(),
            stores_hang=self._connector.stores_hang,
            link=None if self._connector.engine is None else self._connector.engine.link_stats(),
            remote=None if (remote := self._coordinator.door.remote) is None else remote.stats(),
            warmup_s=self.warmup_s,
        )

    def _prefix_tokens(self) -> dict[str, int]:
        found = self._coordinator.counts.prefix_tokens._asdict()
        return {name: n for name, n in found.items() if name in ("queried", *self._coordinator.tiers)}

    def _pool_stats(self, pools: BlockPools) -> dict[str, PoolStats]:
        return pool_stats(pools, self.spec.groups)

    @cached_property
    def _device_capacity_tokens(self) -> int:
        return self._capacity_tokens(self._pools)

    @cached_property
    def _host_capacity_tokens(self) -> int:
        return self._capacity_tokens(self._host) if self._host is not None else 0

    def _capacity_tokens(self, pools: BlockPools) -> int:
        """The longest context that fits alone. For a model that forgets all but its windows: the tokens that its
        pools hold."""
        groups = self.spec.groups
        of = [g for g, group in enumerate(groups) if group.attention.kind is Kind.FULL] or range(len(groups))
        most = min(int(pools.usable[g]) * groups[g].block_tokens for g in of)
        bounded = pools is self._pools or pools.shared  # a host tier holds no windows of running requests
        longest = capacity.longest(pools.layout, self.spec) if bounded else None
        return most if longest is None else min(most, longest)

    def audit(self) -> list[Violation]:
        """Every invariant that the present state breaks; empty when sound. Changes nothing.

        Call it from the scheduling thread, between two of its calls; an engine with its own thread has ``LLM.audit``.
        """
        self.check_open()
        return audit(self.core)

    @property
    def copy_engine(self) -> Any:
        """The object that moves bytes between the tiers, as the option ``copy_engine`` made it; None without a host
        tier."""
        return self._connector.engine

    @property
    def has_remote(self) -> bool:
        """Whether there is a remote tier."""
        return self._coordinator.door.remote is not None

    def flush_remote(self) -> None:
        """Spills everything that still waits for eviction (``spill=eviction``). Call it before the process ends.

        It is a call of the scheduling thread; go on with ``schedule`` or ``poll`` until ``has_work`` is False.
        """
        self._coordinator.door.flush()

    def estimate_compute(self, seconds: Callable[[int, int], float | None]) -> None:
        """``seconds(start, end)``: how long tokens of a prompt take to compute; None, or an error: nobody knows.

        What takes longer to fetch from the remote is computed. Raises ``ConfigError`` for what is no function.
        """
        self._coordinator.door.estimate(seconds)

    def quiesce(self, timeout_s: float) -> bool:
        """Waits until no copy is under way on the device, as graph captures demand; False if the time is over."""
        return self._connector.engine is None or self._connector.engine.quiesce(timeout_s)

    @property
    def arenas(self) -> tuple[Arena, Arena | None]:
        """The memory of device and host; for auditing and for engines that simulate a device."""
        return self._arena, self._host_arena

    # --- life -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all cached content in both tiers, for instance because the weights have changed.

        Content cached or under way before is never found again. Running requests keep their own blocks. Requests whose
        prefix is being loaded recompute it. Call it from the scheduling thread.
        """
        self.core.reset()

    def reset_prefix_cache(self) -> bool:
        """``reset`` under the name that engines know; True.

        It never fails because of running requests. They go on with the blocks that they hold. No other request finds
        these blocks any more, nor the blocks that they still compute. Waiting requests compute their prompts; so does a
        request that is preempted afterwards. Blocks that failed their checksum are in use again. Call it from the
        scheduling thread, between two steps: raises ``StepError`` while a step is neither committed nor cancelled.
        """
        self.core.reset_prefix_cache()
        return True

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.core.is_closed

    def check_open(self) -> None:
        """Raises ``CacheClosed`` after ``close``."""
        self.core.check_open()

    def close(self) -> None:
        """Ends all copies (bounded) and gives the memory back, unless a copy that does not end may still write there.

        Calling it again does nothing, unless memory could not be given back: then it looks again, for a moment. May
        come from any thread, but not from a signal handler: let the handler set a flag, and call ``close`` in a
        ``finally``.
        """
        self.core.is_closed = True
        self._connector.wake()  # ends a sleep in ``wait``
        if self._guard.close():
            self._views = {}

    def __enter__(self) -> KVCache:
        self.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _role(group: GroupSpec) -> str:
    """What its layers keep."""
    return "state" if group.attention.kind is Kind.STATE else "kv"
