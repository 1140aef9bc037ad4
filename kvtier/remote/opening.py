"""A remote tier from the options of a cache, or of a host tier of an engine with its own memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.tier_memory import HostSide, TierMemory
from kvtier.geometry.keys import KeyChain
from kvtier.geometry.outside import OutsideSpec
from kvtier.geometry.spec import CacheSpec
from kvtier.pools.block_pool import BlockPools
from kvtier.remote.backends.contract import Backend
from kvtier.remote.backends.uri import PATIENCE, SpillWhen, open_backend, parse_uri
from kvtier.remote.names import namespace, of_worker, outside_namespace
from kvtier.remote.objects import ObjectPlan
from kvtier.remote.relay import RelayedBackend, RelayedWire, RemoteWorker
from kvtier.remote.tier import RemoteTier
from kvtier.remote.wire import Wire


def open_remote(
    uri: str | Backend,
    chain: KeyChain,
    secret: bytes,
    spec: CacheSpec,
    host: BlockPools,
    memory: TierMemory,
    connector: Connector,
    deadline_s: float,
) -> RemoteTier:
    """A tier over the remote at ``uri``, behind these host pools. Raises ``ConfigError``."""
    plan = ObjectPlan(spec)
    name = namespace(chain, spec, secret, plan.signature)
    return _open(uri, name, plan, secret, host, memory, connector, deadline_s)


def remote_namespace(chain: KeyChain, spec: CacheSpec, secret: bytes) -> str:
    """The namespace of ``open_remote``'s objects, as ``kvtier remote ls`` shows it."""
    return namespace(chain, spec, secret, ObjectPlan(spec).signature).hex()


def open_outside(
    uri: str | Backend,
    model_id: str,
    secret: bytes,
    spec: OutsideSpec,
    host: BlockPools,
    memory: HostSide,
    connector: Connector,
    deadline_s: float,
) -> RemoteTier:
    """A tier for an engine with memory and keys of its own, in one process. Raises ``ConfigError``."""
    plan = ObjectPlan(spec)
    name = outside_namespace(model_id, spec, secret, plan.signature)
    return _open(uri, name, plan, secret, host, memory, connector, deadline_s)


def open_relayed(
    uri: str | Backend,
    model_id: str,
    secret: bytes,
    spec: OutsideSpec,
    host: BlockPools,
    connector: Connector,
    deadline_s: float,
    copies: int,
) -> tuple[RemoteTier, RelayedBackend]:
    """A tier for the scheduler of an engine whose bytes lie in other processes, in ``copies`` host memories.

    Raises ``ConfigError``.
    """
    assert connector.engine is not None
    plan = ObjectPlan(spec)
    name = outside_namespace(model_id, spec, secret, plan.signature)
    sizes = np.array([copies * group.block_bytes for group in spec.groups], np.int64)
    own = _backend(uri)
    backend = RelayedBackend(own, connector.engine.now)
    wire = RelayedWire(sizes, [of_worker(name, rank, copies) for rank in range(copies)])
    remote = RemoteTier(backend, wire, plan, host, connector.engine.now, deadline_s, *_ways(uri))
    return _tier(remote, own, connector), backend


def open_worker(
    uri: str | Backend, secret: bytes, memory: HostSide, rank: int, sharers: int, on_news: Callable[[], None]
) -> RemoteWorker:
    """The part of a remote tier in worker number ``rank``; ``sharers`` of them have one host memory.

    Raises ``ConfigError``.
    """
    backend = _backend(uri)
    try:
        worker = RemoteWorker(backend, memory, rank, sharers, _digest_secret(uri, secret))
    except BaseException:
        backend.close(0.0)
        raise
    backend.on_news = on_news
    return worker


def _open(
    uri: str | Backend,
    name: bytes,
    plan: ObjectPlan,
    secret: bytes,
    host: BlockPools,
    memory: HostSide,
    connector: Connector,
    deadline_s: float,
) -> RemoteTier:
    """A tier in this process, of objects in the namespace ``name``."""
    assert connector.engine is not None
    backend = _backend(uri)
    wire = Wire(memory, name, _digest_secret(uri, secret))
    try:
        wire.register(backend)
    except BaseException:
        backend.close(0.0)
        raise
    tier = RemoteTier(backend, wire, plan, host, connector.engine.now, deadline_s, *_ways(uri))
    return _tier(tier, backend, connector)


def _backend(uri: str | Backend) -> Backend:
    return open_backend(uri) if isinstance(uri, str) else uri


def _digest_secret(uri: str | Backend, secret: bytes) -> bytes | None:
    """The secret of the digest in each object, if the URI asks for one."""
    return secret if isinstance(uri, str) and parse_uri(uri).digest != "none" else None


def _ways(uri: str | Backend) -> tuple[SpillWhen, float]:
    """When texts are spilled, and how long requests wait for answers."""
    if not isinstance(uri, str):
        return SpillWhen.LANDING, PATIENCE
    parsed = parse_uri(uri)
    return parsed.spill, parsed.patience


def _tier(remote: RemoteTier, backend: Backend, connector: Connector) -> RemoteTier:
    remote.on_end = connector.ledger.note_end
    backend.on_news = connector.wake
    return remote
