"""A remote tier from the options of a cache, or of a host tier of an engine with its own memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.outside import OutsideSpec
from kvtier.cpu_offload.tier_memory import HostSide, TierMemory
from kvtier.keys import KeyChain
from kvtier.pools.block_pool import BlockPools
from kvtier.remote.block_store import BlockStore
from kvtier.remote.names import namespace, of_worker, outside_namespace
from kvtier.remote.objects import ObjectPlan
from kvtier.remote.relay import RelayedStore, RelayedWire, StoreWorker
from kvtier.remote.tier import RemoteTier
from kvtier.remote.uri import PATIENCE, SpillWhen, open_store, parse_uri
from kvtier.remote.wire import Wire
from kvtier.spec import CacheSpec


def open_remote(
    uri: str | BlockStore,
    chain: KeyChain,
    secret: bytes,
    spec: CacheSpec,
    host: BlockPools,
    memory: TierMemory,
    connector: Connector,
    deadline_s: float,
) -> RemoteTier:
    """A tier over the store at ``uri``, behind these host pools. Raises ``ConfigError``."""
    assert connector.engine is not None
    plan = ObjectPlan(spec)
    name = namespace(chain, spec, secret, plan.signature)
    store, wire = _open(uri, memory, name, secret)
    return _tier(RemoteTier(store, wire, plan, host, connector.engine.now, deadline_s, *_ways(uri)), store, connector)


def store_namespace(chain: KeyChain, spec: CacheSpec, secret: bytes) -> str:
    """The namespace of ``open_remote``'s objects, as ``kvtier store ls`` shows it."""
    return namespace(chain, spec, secret, ObjectPlan(spec).signature).hex()


def open_outside(
    uri: str | BlockStore,
    model_id: str,
    secret: bytes,
    spec: OutsideSpec,
    host: BlockPools,
    memory: HostSide,
    connector: Connector,
    deadline_s: float,
) -> RemoteTier:
    """For an engine with memory and keys of its own, in one process. Raises ``ConfigError``."""
    assert connector.engine is not None
    plan = ObjectPlan(spec)
    name = outside_namespace(model_id, spec, secret, plan.signature)
    store, wire = _open(uri, memory, name, secret)
    return _tier(RemoteTier(store, wire, plan, host, connector.engine.now, deadline_s, *_ways(uri)), store, connector)


def open_relayed(
    uri: str | BlockStore,
    model_id: str,
    secret: bytes,
    spec: OutsideSpec,
    host: BlockPools,
    connector: Connector,
    deadline_s: float,
    workers: int,
) -> tuple[RemoteTier, RelayedStore]:
    """For the scheduler of such an engine, whose bytes lie in ``workers`` other processes. Raises ``ConfigError``."""
    assert connector.engine is not None
    plan = ObjectPlan(spec)
    name = outside_namespace(model_id, spec, secret, plan.signature)
    sizes = np.array([workers * group.block_bytes for group in spec.groups], np.int64)
    own = open_store(uri) if isinstance(uri, str) else uri
    store = RelayedStore(own, connector.engine.now)
    wire = RelayedWire(sizes, [of_worker(name, rank, workers) for rank in range(workers)])
    remote = RemoteTier(store, wire, plan, host, connector.engine.now, deadline_s, *_ways(uri))
    return _tier(remote, own, connector), store


def open_worker(
    uri: str | BlockStore, secret: bytes, memory: HostSide, rank: int, on_news: Callable[[], None]
) -> StoreWorker:
    """For one of these processes, number ``rank``. Raises ``ConfigError``."""
    store = open_store(uri) if isinstance(uri, str) else uri
    try:
        worker = StoreWorker(store, memory, rank, _digest_secret(uri, secret))
    except BaseException:
        store.close(0.0)
        raise
    store.on_news = on_news
    return worker


def _open(uri: str | BlockStore, memory: HostSide, name: bytes, secret: bytes) -> tuple[BlockStore, Wire]:
    store = uri if not isinstance(uri, str) else open_store(uri)
    wire = Wire(memory, name, _digest_secret(uri, secret))
    try:
        wire.register(store)
    except BaseException:
        store.close(0.0)
        raise
    return store, wire


def _digest_secret(uri: str | BlockStore, secret: bytes) -> bytes | None:
    """What keys a digest in each object, if the URI asks for one."""
    return secret if isinstance(uri, str) and parse_uri(uri).digest != "none" else None


def _ways(uri: str | BlockStore) -> tuple[SpillWhen, float]:
    """When texts are spilled, and how long requests wait for answers."""
    if not isinstance(uri, str):
        return SpillWhen.LANDING, PATIENCE
    parsed = parse_uri(uri)
    return parsed.spill, parsed.patience


def _tier(remote: RemoteTier, store: BlockStore, connector: Connector) -> RemoteTier:
    remote.on_end = connector.ledger.note_end
    store.on_news = connector.wake
    return remote
