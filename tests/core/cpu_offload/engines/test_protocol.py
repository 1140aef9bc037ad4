"""What an engine of somebody else's needs: seven methods of the base class, or a factory; the rest has defaults."""

from __future__ import annotations

import time
from collections.abc import Sequence

import inside
import numpy as np
import pytest

from core.driving import prompt
from kvtier import ConfigError, FullAttention, KVCache, SlidingWindow
from kvtier.cpu_offload import engines
from kvtier.cpu_offload.engines import CopyEngine, EngineFactory, Outcome
from kvtier.cpu_offload.engines.around import EngineAround
from kvtier.cpu_offload.engines.threads import ThreadsEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Transfer
from kvtier.machine.stats import LinkStats
from kvtier.testing import canary_spec, expected_tokens

GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 4)}
BLOCKS = {"full": 8, "win": 8}


def inherited():
    """The engine of the package's docstring."""
    example = engines.__doc__.split("copy_engine=...)``:\n")[1].split("\nAn engine that needs")[0]
    names = {"CopyEngine": CopyEngine, "Outcome": Outcome, "Transfer": Transfer, "TierMemory": TierMemory, "time": time}
    exec("if True:\n" + example, names)
    return names["Copier"]


@pytest.mark.parametrize("sizes", ["bytes", "blocks"])
@pytest.mark.parametrize("make", [inherited(), lambda memory: inherited()(memory)])
def test_an_engine_with_no_more_than_it_must_have_serves(make_serving, make, sizes):
    bytes_too = {"device_bytes": 2304, "host_bytes": "32KiB"} if sizes == "bytes" else {}
    pools = (None, None) if bytes_too else (10, 96)
    serving = make_serving(GROUPS, *pools, **bytes_too, copy_engine=make, verify="full")
    for k in range(12):
        text = prompt(k % 4, 29)
        assert serving.serve(f"{k}", text, 4).token_ids == expected_tokens(serving.spec, text, 4)
    cache = serving.cache
    assert cache.stats().transfers.loaded_blocks > 0
    assert cache.stats().link is None
    assert cache.quiesce(0.0)


def test_the_cache_shows_the_engine_that_it_was_given():
    made = []

    def make(memory):
        made.append(ThreadsEngine(memory))
        return made[-1]

    with KVCache(canary_spec(GROUPS), device_blocks=BLOCKS, host_blocks=BLOCKS, copy_engine=make) as cache:
        assert cache.copy_engine is made[0]
    with KVCache(canary_spec(GROUPS), device_blocks=BLOCKS) as cache:
        assert cache.copy_engine is None
        assert cache.quiesce(0.0)


def test_what_an_engine_has_beyond_the_seven_methods_is_used():
    class Own(ThreadsEngine):
        def __init__(self, memory: TierMemory) -> None:
            super().__init__(memory)
            self.moved: list[Sequence[int]] = []

        def move(self, g, sources, targets):
            self.moved.append(sources)

        def quiesce(self, timeout_s: float) -> bool:
            return timeout_s > 1.0

        def link_stats(self):
            return LinkStats(5.0, 6.0, 0, 0, 0, 0.0)

    with KVCache(canary_spec(GROUPS), device_blocks=BLOCKS, host_blocks=BLOCKS, copy_engine=Own) as cache:
        assert (cache.quiesce(2.0), cache.quiesce(0.5)) == (True, False)
        assert cache.stats().link.load_gbps == 6.0
        inside.connector(cache).engine.move(0, np.array([1], np.int32), np.array([2], np.int32))
        assert len(cache.copy_engine.moved) == 1


class Foreign:
    """An engine, by its methods, that does not inherit."""

    submit = poll = order_after = wait = wake = now = close = lambda self, *_: None

    def __init__(self, memory: TierMemory) -> None: ...


def test_an_engine_that_does_not_inherit_is_refused():
    with pytest.raises(ConfigError, match="made a Foreign, which does not inherit"):
        KVCache(canary_spec(GROUPS), device_blocks=BLOCKS, host_blocks=BLOCKS, copy_engine=Foreign)


def test_the_base_class_says_which_methods_are_missing():
    assert CopyEngine.__abstractmethods__ == {"submit", "poll", "order_after", "wait", "wake", "now", "close"}
    with pytest.raises(TypeError, match="abstract"):
        type("Empty", (CopyEngine,), {})(None)


class Plain(EngineFactory):
    """No more than a factory must have."""

    def __call__(self, memory: TierMemory) -> CopyEngine:
        return ThreadsEngine(memory)


class Bringing(Plain):
    """Brings the host tier's memory."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.memory: np.ndarray | None = None
        self.asked: list[str] = []

    def host_memory(self, num_bytes, setting, seams):
        self.asked.append(setting)
        self.memory = np.zeros(num_bytes, np.uint8)
        return self.memory

    def __call__(self, memory: TierMemory) -> CopyEngine:
        if self.fails:
            raise RuntimeError("no link")
        return super().__call__(memory)

    def give_back(self) -> bool:
        self.asked.append("back")
        return True


class Called:
    """A factory, by its methods, that does not inherit."""

    def __call__(self, memory: TierMemory) -> CopyEngine:
        return ThreadsEngine(memory)

    host_memory = Bringing.host_memory


def test_a_factory_that_does_not_inherit_is_refused_if_its_memory_would_be_left_out():
    with pytest.raises(ConfigError, match="has to inherit from EngineFactory"):
        KVCache(canary_spec(GROUPS), device_blocks=BLOCKS, host_blocks=BLOCKS, copy_engine=Called())


def test_a_factory_brings_host_memory_and_takes_it_back_if_there_is_no_engine():
    factory = Bringing()
    with KVCache(canary_spec(GROUPS), device_blocks=BLOCKS, host_blocks=BLOCKS, copy_engine=factory) as cache:
        assert cache.arenas[1].address == factory.memory.ctypes.data
    assert factory.asked == ["host_blocks"]
    factory = Bringing(fails=True)
    with pytest.raises(RuntimeError, match="no link"):
        KVCache(canary_spec(GROUPS), device_blocks=BLOCKS, host_blocks=BLOCKS, copy_engine=factory)
    assert factory.asked == ["host_blocks", "back"]


def test_a_factory_need_not_bring_anything():
    with KVCache(canary_spec(GROUPS), device_blocks=BLOCKS, host_blocks=BLOCKS, copy_engine=Plain()) as cache:
        assert isinstance(cache.copy_engine, ThreadsEngine)


def test_an_engine_around_another_one_does_all_as_that_does():
    class Recording(EngineAround):
        def submit(self, transfer: Transfer) -> None:
            seen.append(transfer.ticket)
            super().submit(transfer)

    seen: list[int] = []
    make = lambda memory: Recording(ThreadsEngine(memory), memory)  # noqa: E731
    with KVCache(canary_spec(GROUPS), device_blocks=BLOCKS, host_blocks=BLOCKS, copy_engine=make) as cache:
        assert type(cache.copy_engine) is Recording
        assert cache.copy_engine.now() <= time.monotonic()
