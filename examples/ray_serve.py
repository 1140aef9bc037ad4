"""Ray Serve with a request router that knows what each replica has cached: KV events, read in 60 lines.

    pip install 'kvtier[events]' 'ray[serve]'
    python examples/ray_serve.py

Two replicas serve the bundled model. Each tells where its events are, as one of its routing stats. The router listens
to all of them, and sends a prompt to the replica with the longest prefix. If none has a part of it, Ray chooses.
A router for production weighs the load as well.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from typing import Any

try:
    import msgspec
    import ray
    import zmq
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
except ImportError as problem:
    raise SystemExit(f"this example needs {problem.name}: pip install 'kvtier[events]' 'ray[serve]'") from None

BLOCK_TOKENS = 16
Prefix = tuple[int, ...]


class Index:
    """The prefixes that one replica has, as its events say; a thread listens."""

    def __init__(self, endpoint: str) -> None:
        self.prefixes: set[Prefix] = set()
        self._named: dict[int, Prefix] = {}
        threading.Thread(target=self._listen, args=(endpoint,), daemon=True).start()

    def _listen(self, endpoint: str) -> None:
        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(endpoint)
        while True:
            _, events, _ = msgspec.msgpack.decode(socket.recv_multipart()[2])
            for event in events:
                self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                prefix = self._named.get(event["parent_block_hash"], ())
                for i, key in enumerate(event["block_hashes"]):
                    prefix += tuple(event["token_ids"][i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
                    self._named[key] = prefix
                    self.prefixes.add(prefix)
            case "BlockRemoved":
                self.prefixes -= {self._named[key] for key in event["block_hashes"] if key in self._named}
            case "AllBlocksCleared":
                self.prefixes.clear()

    def longest(self, token_ids: list[int]) -> int:
        """Tokens of the prompt that the replica has."""
        found = 0
        while tuple(token_ids[: found + BLOCK_TOKENS]) in self.prefixes and found + BLOCK_TOKENS <= len(token_ids):
            found += BLOCK_TOKENS
        return found


class PrefixRouter(RequestRouter):
    """Ranks the replica with the longest prefix first, then any two; Ray takes the shorter queue of a rank."""

    def initialize_state(self, **_: Any) -> None:
        self._indexes: dict[str, Index] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the ones to try first before the others."""
        rest = [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        if pending_request is None:
            return rest
        token_ids = pending_request.kwargs["token_ids"]
        found = {
            replica: self._index(replica).longest(token_ids) for replica in candidate_replicas if _endpoint(replica)
        }
        best = max(found.values(), default=0)
        return [[replica for replica, n in found.items() if n == best], *rest] if best else rest

    def _index(self, replica: RunningReplica) -> Index:
        endpoint = _endpoint(replica)
        if endpoint not in self._indexes:
            self._indexes[endpoint] = Index(endpoint)
        return self._indexes[endpoint]


def _endpoint(replica: RunningReplica) -> str:
    return str(replica.routing_stats.get("kv_events", ""))


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0.5},
    request_router_config=RequestRouterConfig(
        request_router_class=PrefixRouter, request_routing_stats_period_s=1, request_routing_stats_timeout_s=1
    ),
)
class Engine:
    """One replica: an ``AsyncLLM``, its events in a socket of the file system."""

    def __init__(self) -> None:
        from kvtier import AsyncLLM, needle

        self.endpoint = f"ipc://{tempfile.mkdtemp(prefix='kvtier-')}/events"
        config = {"enable_kv_cache_events": True, "endpoint": self.endpoint}
        sizes = {"device_memory": "64MiB", "host_memory": "64MiB"}
        self.llm = AsyncLLM(needle.weights_path(), "cpu", kv_events_config=config, **sizes)

    def record_routing_stats(self) -> dict[str, Any]:
        """Ray asks for it now and then, and gives it to routers."""
        return {"kv_events": self.endpoint}

    async def complete(self, token_ids: list[int]) -> tuple[str, list[int], int]:
        """Which replica answers, its tokens, and how many of the prompt's it had."""
        from kvtier import SamplingParams

        async for output in self.llm.generate(token_ids, SamplingParams(max_tokens=16, temperature=0)):
            last = output
        return self.endpoint, last.outputs[0].token_ids, sum(last.cached_tokens.values())


async def main() -> None:
    """Eight conversations of four turns."""
    from kvtier import needle

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    engines = serve.run(Engine.bind(), route_prefix=None)
    await asyncio.sleep(3)  # until the routing stats have come

    async def talk(k: int) -> tuple[int, int]:
        tokens, home, stayed, cached = needle.make_prompt(400, seed=k).token_ids, "", 0, 0
        for turn in range(4):
            engine, answer, found = await engines.complete.remote(token_ids=tokens)
            stayed, cached, home = stayed + (engine == home), cached + found, engine
            tokens = [*tokens, *answer, *range(100 + turn, 140 + turn)]
            await asyncio.sleep(0.5)
        return stayed, cached

    told = await asyncio.gather(*(talk(k) for k in range(8)))
    stayed, cached = (sum(column) for column in zip(*told, strict=True))
    print(f"{stayed} of 24 later turns went where their prefix is; {cached:,} tokens were there")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
