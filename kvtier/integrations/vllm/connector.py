"""``KvtierConnector``: vLLM's calls, passed on to the side that they are for.

Owns       one side, by its role: ``SchedulerSide`` in the engine core, ``WorkerSide`` in each worker.
Promises   whatever cannot work is refused when vLLM makes the connector.
Does not   decide anything: see the two sides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvtier.integrations.vllm.geometry import geometry_of, sharers_of
from kvtier.integrations.vllm.settings import Settings, check, counts_nans
from kvtier.integrations.vllm.stats import KvtierPromMetrics, KvtierStats

if TYPE_CHECKING:
    from kvtier.integrations.vllm.scheduler import SchedulerSide
    from kvtier.integrations.vllm.worker import WorkerSide

logger = logging.getLogger("vllm.kvtier")


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """kvtier's host tier as a connector of vLLM; docs/VLLM.md is for its users."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        import vllm

        from kvtier.geometry.sizing import parse_bytes
        from kvtier.host_tier.plan import HostPlan

        self._settings = check(vllm_config, vllm.__version__)
        geometry = geometry_of(kv_cache_config)
        workers = vllm_config.parallel_config.world_size
        sharers = sharers_of(kv_cache_config, workers)
        host_bytes = parse_bytes(self._settings.host_memory, "host_memory") * sharers // workers
        self._plan = HostPlan(geometry.groups, geometry.memory_bytes, host_bytes, self._settings.verify, sharers)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            from kvtier.integrations.vllm.scheduler import SchedulerSide

            events = vllm_config.kv_events_config
            self._scheduler_side = SchedulerSide(
                self._plan,
                geometry,
                self._settings,
                workers,
                zeroes_first=bool(getattr(vllm_config, "use_v2_model_runner", False)),
                with_events=events is not None and events.enable_kv_cache_events,
                counts_nans=counts_nans(),
            )
            logger.info("kvtier: %s", geometry.describe(self._plan, workers))
            if self._settings.remote_uri is not None:
                from kvtier.integrations.vllm.behind import RemoteSide

                behind = RemoteSide(self._scheduler_side.books, vllm_config, kv_cache_config, geometry, self._settings)
                self._scheduler_side.use_remote(behind)
        self._config = vllm_config

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """On a GPU, vLLM asks this before it loads weights: options that cannot work are refused here."""
        Settings.of(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Any will do. vLLM asks once the weights are there, before it measures memory and compiles. No other question
        with its config comes earlier, so a config that cannot work is refused here."""
        import vllm

        check(vllm_config, vllm.__version__)
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "a call for the scheduler's connector"
        return self._scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        assert self._worker_side is not None, "a call for a worker's connector, after register_kv_caches"
        return self._worker_side

    # --- scheduler ----------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """vLLM 0.32 asks for its ``vllm:prompt_tokens_cached_by_source``."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        is_disk = str(self._settings.remote_uri).startswith("file:")
        store = CacheHitSource.DISK if is_disk else CacheHitSource.EXTERNAL_UNSPECIFIED
        stored = min(self._scheduler.follow(request.request_id).from_remote, num_external_tokens)
        counts = {CacheHitSource.HOST: num_external_tokens - stored, store: stored}
        return {source: count for source, count in counts.items() if count}

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.written_again(getattr(connector_output, "invalid_block_ids", None) or ())
        self._scheduler.take_note(connector_output.kv_connector_worker_meta)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request, block_ids)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work

    def reset_cache(self) -> bool | None:
        self._scheduler.reset()
        return True

    def get_kv_connector_stats(self) -> KvtierStats | None:
        news = {} if self._scheduler_side is None else self._scheduler_side.news()
        return KvtierStats(news) if news else None

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.events()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        return KvtierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KvtierPromMetrics:
        return KvtierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from kvtier.integrations.vllm.worker import WorkerSide

        self._worker_side = WorkerSide(self._plan, self._kv_cache_config, kv_caches, self._settings)
        if self._settings.remote_uri is not None:
            from vllm.distributed import get_tensor_model_parallel_rank

            from kvtier.integrations.vllm.identity import facts_of

            facts = facts_of(self._config, self._kv_cache_config.num_blocks, kv_caches)
            self._worker_side.use_remote(self._settings, get_tensor_model_parallel_rank(), facts)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended, failed = self._worker.results(self._get_connector_metadata())
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_report()

    # --- both ---------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        for side in (self._scheduler_side, self._worker_side):
            if side is not None:
                side.close()
