"""How long a step waited for stores that did end: the time of those that never do is bounded, of these the link's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from kvtier.cpu_offload.engines import CopyEngine


@contextmanager
def recorded_waits(engine: CopyEngine | None, good_s: list[float]) -> Iterator[None]:
    """Appends the seconds, on the engine's clock, of each wait after which the stores had moved."""
    if engine is None:
        yield
        return
    order_after = engine.order_after

    def timed(tickets: Sequence[int], timeout_s: float) -> bool:
        begun_s = engine.now()
        moved = order_after(tickets, timeout_s)
        if moved:
            good_s.append(engine.now() - begun_s)
        return moved

    with patch.object(engine, "order_after", timed):
        yield
