"""The combined meaning of a cache's options.

Owns       the order in which they are checked.
Promises   an option that cannot work, and a size without room for one block of every group, raises a typed error here.
           Nothing is allocated, so a caller can check its options before it loads a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.audit.run import AuditLevel, level_from_environment
from kvtier.cache.tier import Tier, device_tier, host_tier
from kvtier.cpu_offload.engines import EngineFactory
from kvtier.cpu_offload.engines.by_name import MakesEngine, engine_factory
from kvtier.geometry.options import check_choices, check_identity, check_spec, seconds
from kvtier.geometry.spec import CacheSpec
from kvtier.machine.device import resolve_device
from kvtier.machine.journal import num_events
from kvtier.remote.backends.contract import Backend
from kvtier.remote.check import check_remote


@dataclass(frozen=True)
class Settings:
    """``KVCache``'s options, read; its tiers have no memory yet."""

    device: str
    device_tier: Tier
    host_tier: Tier | None
    deadline_s: float
    make_engine: EngineFactory
    audit_level: AuditLevel

    def check_room(self) -> None:
        """Raises ``MemoryUnavailable`` for tiers that do not fit into this machine's memory; a GPU's is not asked."""
        self.device_tier.check()
        if self.host_tier is not None:
            self.host_tier.check(self.device_tier.arena.num_bytes if self.device == "cpu" else 0)


@dataclass(frozen=True)
class Options:
    """``KVCache``'s options, as they are given there."""

    device: str = "cpu"
    device_bytes: str | int | None = None
    host_bytes: str | int | None = 0
    device_blocks: Mapping[str, int] | None = None
    host_blocks: Mapping[str, int] | None = None
    store: str = "eager"
    verify: str = "off"
    on_load_error: str = "recompute"
    deadline_s: float = 30.0
    model_id: str = ""
    key_secret: bytes | None = None
    copy_engine: MakesEngine | str | None = None
    journal_events: int = 0
    remote_uri: str | Backend | None = None

    def read(self, spec: CacheSpec) -> Settings:
        """What the options mean for these groups.

        Raises ``ConfigError``, ``DeviceUnavailable`` and ``MemoryUnavailable``.
        """
        check_spec(spec)
        check_choices(store=self.store, verify=self.verify, on_load_error=self.on_load_error)
        limit = seconds(self.deadline_s, "deadline_s")
        check_identity(self.model_id, self.key_secret)
        num_events(self.journal_events)
        level, place = level_from_environment(), resolve_device(self.device)
        on_device = device_tier(spec, place, self.device_bytes, self.device_blocks)
        on_host = host_tier(spec, place, self.host_bytes, self.host_blocks)
        if self.remote_uri is not None:
            check_remote(self.remote_uri, on_host is not None, place, self.model_id, self.key_secret, self.store)
        make_engine = engine_factory(self.copy_engine, place, on_host is not None)
        return Settings(place, on_device, on_host, limit, make_engine, level)
