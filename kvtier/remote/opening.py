"""A remote tier from a cache's options."""

from __future__ import annotations

from kvtier.cpu_offload.connector import Connector
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.keys import KeyChain
from kvtier.pools.block_pool import BlockPools
from kvtier.remote.block_store import BlockStore
from kvtier.remote.names import namespace
from kvtier.remote.objects import ObjectPlan
from kvtier.remote.spills import SpillWhen
from kvtier.remote.tier import RemoteTier
from kvtier.remote.uri import open_store, parse_uri
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
    parsed = parse_uri(uri) if isinstance(uri, str) else None
    store = uri if not isinstance(uri, str) else open_store(uri)
    wire = Wire(memory, name, secret if parsed is not None and parsed.digest != "none" else None)
    try:
        wire.register(store)
    except BaseException:
        store.close(0.0)
        raise
    when = SpillWhen.LANDING if parsed is None else parsed.spill
    remote = RemoteTier(store, wire, plan, host, connector.engine.now, deadline_s, when)
    remote.on_end = connector.ledger.note_end
    store.on_news = connector.wake
    return remote
