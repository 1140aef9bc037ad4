"""kvtier's connector, except that each load brings noise: a control for ``kvtier verify --engine vllm``."""

from __future__ import annotations

from typing import Any

import torch

from kvtier.integrations.vllm.connector import KvtierConnector


class NoisyConnector(KvtierConnector):
    """Overwrites what a load has brought before vLLM hears of its end; no checksum can see it then."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._caches = kv_caches
        self._targets: dict[str, torch.Tensor] = {}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        for copy in step.orders.copies:
            if copy.is_load:
                self._targets[step.loads[copy.ticket]] = torch.from_numpy(copy.device.astype("int64"))
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving or ():
            for cache in self._caches.values():
                blocks = self._targets[request]
                cache[blocks] = torch.randn_like(cache[blocks])
        return results
