"""What vLLM's log and its Prometheus endpoint say of the host tier.

Owns       the counters' names and meanings.
Promises   counters are sums of what has happened since they were last given out; none is given out twice.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "stored_blocks": "Blocks stored in the host tier.",
    "stored_bytes": "Bytes stored in the host tier.",
    "loaded_blocks": "Blocks loaded from the host tier.",
    "loaded_bytes": "Bytes loaded from the host tier.",
    "verified_blocks": "Loaded blocks whose checksum was checked and right.",
    "damaged_blocks": "Loaded blocks whose bytes were not the stored bytes; their tokens were computed.",
    "failed_loads": "Loads that failed or were late; their tokens were computed.",
    "failed_stores": "Stores that failed.",
    "late_copies": "Copies that were given up at their deadline.",
    "dropped_blocks": "Blocks that were not stored: no room in the host tier, or stores hung.",
    "waits_for_stores": "Times that a request waited a step because stores still wrote its hit.",
    "waits_given_up": "Times that a request waited for such stores in vain, and did without its hit.",
    "waits_for_remote": "Steps that a request waited for, while the remote tier was asked for it, or brought it.",
    "remote_looks": "Questions to the remote tier for requests' prefixes.",
    "remote_late_looks": "Of them, questions that a request has waited for in vain.",
    "remote_spilled_objects": "Objects that reached the remote tier; an object is a few blocks.",
    "remote_spilled_bytes": "Bytes that reached the remote tier, of all ranks.",
    "remote_fetched_objects": "Objects that came from the remote tier into the host tier, verified.",
    "remote_fetched_bytes": "Bytes that came from the remote tier, of all ranks.",
    "remote_missed_objects": "Objects that had gone before they were read.",
    "remote_damaged_objects": "Objects that were not what they should be; they are deleted.",
    "remote_failed_fetches": "Objects whose read went wrong.",
    "remote_failed_spills": "Objects whose write went wrong.",
    "remote_refused_objects": "Objects that the remote tier did not take: it is full, or read-only.",
    "remote_expired": "Spills and fetches that were given up at their deadline.",
    "remote_dropped_texts": "Texts that were not stored: too much waited, or the remote tier failed.",
    "remote_dropped_objects": "Objects that were not stored, since the host tier had not all of their blocks.",
    "remote_no_room": "Fetches left out, since the host tier had no room.",
    "remote_not_worth": "Fetches left out, since computing is estimated to be faster.",
}
GAUGES = {
    "quarantined_blocks": "Host blocks out of use, since their bytes have changed or a late copy may still touch them.",
    "cached_blocks": "Host blocks that can be found.",
    "stores_hang": "1 while nothing is stored since the link hangs.",
    "remote_is_on": "1 while there is a remote tier; 0 after a reset.",
    "remote_breaker_open": "1 while the remote tier is left alone but for a try a second, since calls failed in a row.",
    "remote_live": "Spills and fetches under way.",
}


class KvtierStats(KVConnectorStats):  # type: ignore[misc,unused-ignore]
    """``data``: counters since the last report, and gauges, by name."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value if name in COUNTERS else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvtier {name.replace('_', ' ')}": value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not self.data


class KvtierPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc,unused-ignore]
    """``vllm:kvtier_...``, one time series an engine."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, types, labels, values)
        self._metrics = dict[tuple[str, int], Any]()
        for made, names in ((self._counter_cls, COUNTERS), (self._gauge_cls, GAUGES)):
            for name, text in names.items():
                metric = made(name=f"vllm:kvtier_{name}", documentation=text, labelnames=labels)
                for engine, of in values.items():
                    self._metrics[name, engine] = metric.labels(*of)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get((name, engine_idx))
            if metric is not None and name in COUNTERS:
                metric.inc(value)
            elif metric is not None:
                metric.set(value)
