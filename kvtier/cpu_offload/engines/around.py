"""An engine around another engine: it passes every call on.

Owns       nothing.
Promises   an object with the seven methods of the protocol, or more, works as a ``CopyEngine``.
Does not   check its argument: ``by_name.build_engine`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.cpu_offload.engines import CopyEngine, Outcome
from kvtier.cpu_offload.tier_memory import Ids, TierMemory
from kvtier.cpu_offload.transfer import Transfer

OPTIONAL = ("move", "quiesce", "link_stats")


class EngineAround(CopyEngine):
    """Around ``engine``, which need not inherit from ``CopyEngine``: a missing method of ``OPTIONAL`` gets its
    default."""

    def __init__(self, engine: Any, memory: TierMemory) -> None:
        super().__init__(memory)
        self.engine = engine
        for name in OPTIONAL:
            if callable(own := getattr(engine, name, None)):
                setattr(self, name, own)

    def submit(self, transfer: Transfer) -> None:
        self.engine.submit(transfer)

    def poll(self) -> Sequence[Outcome]:
        outcomes: Sequence[Outcome] = self.engine.poll()
        return outcomes

    def wipe(self, groups: Ids, blocks: Ids) -> None:
        own = getattr(self.engine, "wipe", None) or super().wipe
        own(groups, blocks)

    def order_after(self, tickets: Sequence[int], timeout_s: float) -> bool:
        return bool(self.engine.order_after(tickets, timeout_s))

    def wait(self, timeout_s: float) -> bool:
        return bool(self.engine.wait(timeout_s))

    def wake(self) -> None:
        self.engine.wake()

    def now(self) -> float:
        return float(self.engine.now())

    def close(self, timeout_s: float) -> bool:
        return bool(self.engine.close(timeout_s))
