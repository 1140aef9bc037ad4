"""vLLM's real scheduler with a connector's scheduler side, and workers that only say that all copies have gone well.

Nothing is computed and no byte is copied, so a machine without a GPU can measure any connector's bookkeeping, with any
number of blocks. Each call to the connector is timed, in CPU time of the thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.vllm import shapes

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "get_external_cache_hit_sources",
    "take_events",
    "get_kv_connector_stats",
)
"""A connector's calls that a scheduler makes while requests come, run and go."""

SAID = 7
"""The token that every request generates."""

KVTIER, SIMPLE, OFFLOADING = "kvtier", "SimpleCPUOffloadConnector", "OffloadingConnector"
CONNECTORS: dict[str, Callable[[int], dict[str, Any]]] = {
    KVTIER: lambda host_bytes: {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.integrations.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_memory": host_bytes},
    },
    SIMPLE: lambda host_bytes: {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
    },
    OFFLOADING: lambda host_bytes: {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
    },
}
"""By name, its ``KVTransferConfig`` for a host memory."""


class Simulated:
    """A scheduler for a ``shape``, with ``num_blocks`` device blocks."""

    def __init__(
        self,
        connector: str,
        shape: shapes.Shape | shapes.DeepSeekV4Flash,
        num_blocks: int,
        host_bytes: int,
        most_requests: int = 8,
        chunk_tokens: int = 8192,
    ) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.structured_output import StructuredOutputManager

        transfer = {"kv_role": "kv_both", **CONNECTORS[connector](host_bytes)}
        config = shapes.engine_config(num_blocks, most_requests, chunk_tokens, transfer, shape)
        hash_of = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_of)
        self._hasher = kv_cache_utils.get_request_block_hasher(shape.hash_tokens, hash_of)
        self.cache_config = shapes.cache_config(config, shape)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=self.cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=shape.block_tokens,
            hash_block_size=shape.hash_tokens,
            log_stats=True,
        )
        self.worker = WORKERS[connector]()
        self._spent: Counter[str] = Counter()
        self.hit_tokens = 0
        """That the connector has offered last."""
        self.found: dict[str, int] = {}
        """By request, the tokens that it had when it first ran."""
        self.connector = self.scheduler.connector
        for name in CALLS:
            if hasattr(self.connector, name):
                setattr(self.connector, name, self._timed(name, getattr(self.connector, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.thread_time_ns()
            found = call(*arguments, **named)
            self._spent[name] += time.thread_time_ns() - begun
            if name == "get_num_new_matched_tokens":
                self.hit_tokens = found[0] or 0
            return found

        return timed

    def take_times(self) -> dict[str, float]:
        """Microseconds that the connector has taken since the last call, by its call."""
        times = {name: ns / 1000 for name, ns in self._spent.items()}
        self._spent.clear()
        return times

    def add(self, name: str, tokens: Sequence[int], text_tokens: int) -> Any:
        """A request that generates ``text_tokens`` tokens."""
        request = self._request(name, tokens, text_tokens)
        self.scheduler.add_request(request)
        return request

    def _request(self, name: str, tokens: Sequence[int], text_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=text_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def offered(self, name: str, tokens: Sequence[int]) -> int:
        """Tokens of such a prompt that the connector would bring; the request goes away again."""
        request = self._request(name, tokens, 1)
        if hasattr(self.connector, "on_new_request"):
            self.connector.on_new_request(request)
        found, _ = self.connector.get_num_new_matched_tokens(request, 0)
        self.connector.request_finished_all_groups(request, tuple([] for _ in self.cache_config.kv_cache_groups))
        return int(found or 0)

    def step(self) -> None:
        """One step of the engine."""
        output = self.scheduler.schedule()
        self.found |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self.scheduler.update_from_output(output, self._ran(output))

    def _ran(self, output: Any) -> Any:
        """What the model runner says of it."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        ended, meta = self.worker.run(output.kv_connector_metadata)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[SAID] if r.num_computed_tokens >= r.num_tokens else [] for r in requests],
            kv_connector_output=KVConnectorOutput(finished_recving=ended or None, kv_connector_worker_meta=meta),
        )

    def finish(self, most_steps: int = 100_000) -> None:
        """Steps until all requests have ended and all copies have been reported."""
        for _ in range(most_steps):
            if not self.scheduler.has_requests() and not self.connector.has_pending_push_work():
                return
            self.step()
        raise RuntimeError("the scheduler does not come to an end")

    def forget_device(self) -> None:
        """vLLM's own prefix cache is empty; the host tier keeps its content."""
        if not self.scheduler.kv_cache_manager.reset_prefix_cache():
            raise RuntimeError("device blocks are still held")


class _KvtierWorker:
    def run(self, orders: Any) -> tuple[set[str], Any]:
        from kvtier.host_tier.orders import End, Report
        from kvtier.integrations.vllm.messages import WorkerReport

        report = Report()
        for copy in orders.orders.copies:
            report.add(copy.ticket, End())
        return set(orders.loads.values()), WorkerReport(report) if report.ends else None


class _SimpleWorker:
    def run(self, orders: Any) -> tuple[set[str], Any]:
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        stored = {orders.store_event: 1} if orders.store_event >= 0 else {}
        loaded = set(orders.load_event_to_reqs.get(orders.load_event, ()))
        return loaded, SimpleCPUOffloadWorkerMetadata(stored) if stored else None


class _OffloadingWorker:
    def run(self, orders: Any) -> tuple[set[str], Any]:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

        jobs = [*orders.load_jobs, *orders.store_jobs]
        loaded = {job.req_id for job in orders.load_jobs.values()}
        return loaded, OffloadingWorkerMetadata(dict.fromkeys(jobs, 1)) if jobs else None


WORKERS: dict[str, Callable[[], Any]] = {
    KVTIER: _KvtierWorker,
    SIMPLE: _SimpleWorker,
    OFFLOADING: _OffloadingWorker,
}
