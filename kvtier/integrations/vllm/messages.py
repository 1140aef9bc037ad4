"""What goes from vLLM's scheduler to its workers in each step, and back.

Plain data: both are pickled. An engine step has one ``StepOrders``, and one ``WorkerReport`` from each worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from kvtier.host_tier.orders import Orders, Report


@dataclass
class StepOrders(KVConnectorMetadata):
    """``loads``: the request of each load, by ticket. ``is_idle``: the step computes nothing.

    ``void``: loads under way, by ticket, with content that a reset has outdated: they count as failed.
    """

    orders: Orders
    loads: dict[int, str] = field(default_factory=dict)
    void: frozenset[int] = frozenset()
    is_idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The report of one worker, or of several together."""

    report: Report
    facts: dict[int, str] = field(default_factory=dict)
    """What names in the remote tier depend on, by rank (``identity.facts_of``): in the first report of each worker."""

    def aggregate(self, other: Any) -> WorkerReport:
        return WorkerReport(self.report.merge(other.report), self.facts | other.facts)
