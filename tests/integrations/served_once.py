"""Texts in an engine that keeps to vLLM's contract, and loads of them that are under way."""

from __future__ import annotations

import inside

from integrations.fake_vllm import FakeEngine
from kvtier.testing import Faults

TEXT = [n * 7 % 1000 for n in range(45)]
OTHER = [n * 11 % 1000 + 1000 for n in range(45)]


def pushed_out(**options) -> FakeEngine:
    """An engine with ``TEXT`` in its host tier alone."""
    engine = FakeEngine(("window", "full"), 50, **{"host_memory": 40_000} | options)
    engine.serve(TEXT)
    engine.settle()
    push_out(engine)
    return engine


def push_out(engine: FakeEngine) -> None:
    """The device's cache has nothing."""
    for block in engine.pool.blocks:
        engine.pool.forget(block)


def use(engine: FakeEngine, faults: Faults) -> None:
    """Copies from now on have these."""
    for one in engine.engines:
        inside.use_faults(one, faults)
