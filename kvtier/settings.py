"""The combined meaning of a cache's options.

Owns       the order in which they are checked.
Promises   an option that cannot work, and a size without room for one block of every group, raises a typed error here.
           Nothing is allocated, so a caller can check its options before it loads a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.audit.run import AuditLevel, level_from_environment
from kvtier.cpu_offload.engines import EngineFactory
from kvtier.cpu_offload.engines.by_name import MakesEngine, engine_factory
from kvtier.device import resolve_device
from kvtier.journal import num_events
from kvtier.options import check_choices, check_identity, check_spec, seconds
from kvtier.pools.tier import Tier, device_tier, host_tier
from kvtier.remote.block_store import Backend
from kvtier.remote.check import check_remote
from kvtier.spec import CacheSpec


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


def read_settings(
    *,
    spec: CacheSpec,
    device: str,
    device_bytes: str | int | None,
    host_bytes: str | int | None,
    device_blocks: Mapping[str, int] | None,
    host_blocks: Mapping[str, int] | None,
    store: str,
    verify: str,
    on_load_error: str,
    deadline_s: float,
    model_id: str,
    key_secret: bytes | None,
    copy_engine: MakesEngine | str | None,
    journal_events: int,
    remote_uri: str | Backend | None,
) -> Settings:
    """Checks the arguments of ``KVCache``. Raises ``ConfigError``, ``DeviceUnavailable`` and ``MemoryUnavailable``."""
    check_spec(spec)
    check_choices(store=store, verify=verify, on_load_error=on_load_error)
    limit = seconds(deadline_s, "deadline_s")
    check_identity(model_id, key_secret)
    num_events(journal_events)
    level, place = level_from_environment(), resolve_device(device)
    on_device = device_tier(spec, place, device_bytes, device_blocks)
    on_host = host_tier(spec, place, host_bytes, host_blocks)
    if remote_uri is not None:
        check_remote(remote_uri, on_host is not None, place, model_id, key_secret, store)
    return Settings(place, on_device, on_host, limit, engine_factory(copy_engine, place, on_host is not None), level)
