"""An engine around another engine: it passes every call on."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.tier_memory import Ids, TierMemory
from kvtier.cpu_offload.transfer import Transfer
from kvtier.machine.stats import LinkStats


class EngineAround(CopyEngine):
    """Around ``engine``."""

    def __init__(self, engine: CopyEngine, memory: TierMemory) -> None:
        super().__init__(memory)
        self.engine = engine

    def submit(self, transfer: Transfer) -> None:
        self.engine.submit(transfer)

    def poll(self) -> Sequence[Outcome]:
        return self.engine.poll()

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        return self.engine.order_after(tickets, timeout_s)

    def wait(self, timeout_s: float) -> bool:
        return self.engine.wait(timeout_s)

    def wake(self) -> None:
        self.engine.wake()

    def now(self) -> float:
        return self.engine.now()

    def close(self, timeout_s: float) -> bool:
        return self.engine.close(timeout_s)

    def move(self, g: int, sources: Ids, targets: Ids) -> None:
        self.engine.move(g, sources, targets)

    def wipe(self, groups: Ids, blocks: Ids) -> None:
        self.engine.wipe(groups, blocks)

    def quiesce(self, timeout_s: float) -> bool:
        return self.engine.quiesce(timeout_s)

    def link_stats(self) -> LinkStats | None:
        return self.engine.link_stats()
