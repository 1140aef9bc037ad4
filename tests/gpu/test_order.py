"""The race amplifier: forwards that are late on purpose, pools that are nearly full, and a host that never waits.

With every order in place nothing is ever wrong; with any one of the device's waits removed something is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core.driving import prompt

from kvtier import ChunkedLocal, FullAttention, KVCache, Request, Scheduler, SlidingWindow
from kvtier.coordinator.scheduler import Scheduler as SchedulerClass
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.transfer import Direction
from kvtier.testing import canary_spec

from .canary import DeviceCanary

GROUPS = {"full": (FullAttention(), 16), "win": (SlidingWindow(40), 16), "chunk": (ChunkedLocal(64), 16)}
DEVICE = {"full": 90, "win": 60, "chunk": 50}
HOST = {"full": 400, "win": 150, "chunk": 150}
SPIN = 400_000
"""Cycles: some 0.2 ms, about what a step's copies take."""


def amplify(seed: int, count: int, device: str = "cuda:0", num_layers: int = 64, **options) -> int:
    """Serves ``count`` requests over a dozen stems; words that a forward saw and that were wrong."""
    spec = canary_spec(GROUPS, num_layers)
    with KVCache(spec, device=device, device_blocks=DEVICE, host_blocks=HOST, key_secret=b"races", **options) as cache:
        scheduler = Scheduler(cache, max_batched_tokens=96, max_running=12)
        canary, rng = DeviceCanary(cache, seed, SPIN), np.random.default_rng(seed)
        requests = [
            Request(f"r{i}", [*prompt(int(rng.integers(12)), int(rng.integers(20, 400))), i % 97], 1)
            for i in range(count)
        ]
        done = canary.run(scheduler, requests)
        if device != "cpu":
            torch.cuda.synchronize()
        stats = cache.stats()
        assert len(done) == count
        assert {f.finish_reason for f in done} == {"length"}
        assert stats.transfers.loaded_blocks > count
        assert stats.transfers.corrupt_blocks == 0
        assert cache.audit() == []
        return int(canary.mismatches.item())


@pytest.mark.parametrize(("store", "verify"), [("eager", "off"), ("lazy", "full")])
def test_nothing_is_ever_wrong(monkeypatch, store, verify):
    monkeypatch.setenv("KVTIER_AUDIT", "0")
    assert amplify(0, 1500, store=store, verify=verify) == 0


def without_wait(direction: Direction):
    give, idle = StreamsEngine._give, list[int]()

    def given(self, copy, mark):
        if copy.transfer.direction is direction:
            idle.extend([] if idle else [self._runtime.new_stream("idle")])
            mark = self._runtime.record(idle[0])  # an event behind nothing
        give(self, copy, mark)

    return given


def settle_at_once(self):
    for seq in self._roster.loading():
        self._coordinator.start_running(seq)


REMOVED = {  # made anew for each cache: a stream belongs to one
    "edge 1: last write -> store read": (StreamsEngine, "_give", lambda: without_wait(Direction.STORE), "eager"),
    "edge 2: last read -> load write": (StreamsEngine, "_give", lambda: without_wait(Direction.LOAD), "eager"),
    "edge 3: load write -> first read": (SchedulerClass, "_settle_loads", lambda: settle_at_once, "eager"),
    "edge 4: store read -> next writer": (StreamsEngine, "order_after", lambda: lambda *_: True, "lazy"),
}


@pytest.mark.parametrize("edge", REMOVED)
def test_with_any_one_wait_removed_something_is_wrong(monkeypatch, edge):
    owner, name, make, store = REMOVED[edge]
    monkeypatch.setenv("KVTIER_AUDIT", "0")
    for seed in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, make())
            try:
                if amplify(seed, 300, store=store) > 0:
                    return
            except Exception:
                return  # the books themselves notice some of it
    pytest.fail("nobody has noticed")
