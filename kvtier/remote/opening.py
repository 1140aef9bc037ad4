"""A remote tier from a cache's options."""

from __future__ import annotations

from kvtier.cpu_offload.connector import Connector
from kvtier.keys import KeyChain
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools
from kvtier.remote.block_store import BlockStore
from kvtier.remote.names import namespace
from kvtier.remote.objects import ObjectPlan
from kvtier.remote.tier import RemoteTier
from kvtier.remote.uri import open_store
from kvtier.remote.wire import Wire
from kvtier.spec import CacheSpec


def open_remote(
    uri: str | BlockStore,
    chain: KeyChain,
    secret: bytes,
    spec: CacheSpec,
    host: BlockPools,
    arena: Arena,
    connector: Connector,
    deadline_s: float,
) -> RemoteTier:
    """A tier over the store at ``uri``, behind these host pools. Raises ``ConfigError``."""
    assert connector.engine is not None
    store = open_store(uri) if isinstance(uri, str) else uri
    wire = Wire(arena, namespace(chain, spec, secret), None)
    wire.register(store)
    remote = RemoteTier(store, wire, ObjectPlan(spec), host, connector.engine.now, deadline_s)
    remote.on_end = connector.ledger.note_end
    store.on_news = connector.wake
    return remote
