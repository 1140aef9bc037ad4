"""The worker's side: makes the copies that a step's orders ask for.

Owns       which request waits for which load.
Promises   a load is told to vLLM once: finished, or finished and failed. While there is nothing to compute, a step
           waits for a copy's end for a moment, instead of spinning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.integrations.vllm.geometry import device_memory
from kvtier.integrations.vllm.messages import StepOrders, WorkerReport
from kvtier.machine.errors import MemoryUnavailable

if TYPE_CHECKING:
    from kvtier.cpu_offload.shared_memory import SharedMemory
    from kvtier.host_tier.orders import Report
    from kvtier.host_tier.plan import HostPlan
    from kvtier.integrations.vllm.settings import Settings

IDLE_WAIT_S = 0.004
"""An empty step with copies under way waits so long: no request that arrives waits longer for it."""


def shared_by_ranks(plan: HostPlan) -> SharedMemory:
    """The host memory of all ranks, which all call this at once. Raises ``MemoryUnavailable``."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group

    from kvtier.cpu_offload.shared_memory import SharedMemory, SharedName

    rank = get_tensor_model_parallel_rank()
    if rank == 0:
        made: SharedMemory | None = None
        try:
            made = SharedMemory.make(plan.shared_bytes, plan.sharers)
        finally:  # the others wait for it
            get_tp_group().broadcast_object(None if made is None else tuple(made.name), src=0)
        return made
    told = get_tp_group().broadcast_object(None, src=0)
    if told is None:
        raise MemoryUnavailable("rank 0 could not make the host memory that all ranks share; its log says why")
    return SharedMemory.open(SharedName(*told), rank, plan.sharers)


class WorkerSide:
    """The host tier in one worker, from ``register_kv_caches`` on."""

    def __init__(self, plan: HostPlan, config: Any, caches: dict[str, Any], settings: Settings) -> None:
        from kvtier.host_tier.worker import HostTierWorker

        memory: Any = device_memory(config, caches)
        if memory.device.type == "cpu":
            memory = memory.numpy()
        shared = shared_by_ranks(plan) if plan.sharers > 1 else None
        self.worker = HostTierWorker(plan, memory, settings.deadline_s, settings.copy_engine, shared)
        self._waiting: dict[int, str] = {}
        self._void: set[int] = set()
        self._report: WorkerReport | None = None
        self._facts: dict[int, str] = {}  # not reported yet

    def use_remote(self, settings: Settings, rank: int, facts: str) -> None:
        """Opens the remote tier; ``facts`` go to the scheduler with the first report. Raises ``ConfigError``."""
        assert settings.remote_uri is not None
        self.worker.use_remote(settings.remote_uri, settings.secret(), rank)
        self._facts = {rank: facts}

    def begin(self, step: StepOrders) -> None:
        """Begins the step's copies, before anything of the step is written."""
        self._void |= step.void
        self.worker.begin(step.orders)

    def load(self, step: StepOrders) -> None:
        """Starts the step's loads."""
        self._waiting |= step.loads
        self.worker.load(step.orders)

    def results(self, step: StepOrders) -> tuple[set[str], set[str]]:
        """Requests with loads that have ended, and those of them that have failed."""
        if step.is_idle:
            self.worker.wait(IDLE_WAIT_S)
        ended = self.worker.poll()
        self._report = self._told(ended.report)
        failed = {self._waiting.pop(ticket) for ticket in (*ended.failed, *(self._void & set(ended.loaded)))}
        loaded = {self._waiting.pop(ticket) for ticket in set(ended.loaded) - self._void}
        self._void -= {*ended.failed, *ended.loaded}
        return loaded | failed, failed

    def _told(self, report: Report) -> WorkerReport | None:
        facts, self._facts = self._facts, {}
        return WorkerReport(report, facts) if report or facts else None

    def take_report(self) -> WorkerReport | None:
        """The report of the last ``results``."""
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        """Ends all copies."""
        self.worker.close()
