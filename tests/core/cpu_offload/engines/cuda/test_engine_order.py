"""The CUDA copy engine's orders: writers after stores, loads beside stores, who waits and who wakes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from patience import FOREVER_S, PATIENCE_S

from core.cpu_offload.engines.test_engines import LOAD, STORE, drain
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime
from kvtier.machine.wakeup import Wakeup


@pytest.mark.parametrize("threads", [True, False])
def test_a_writer_that_is_ordered_after_a_store_does_not_change_what_is_stored(make_rig, threads):
    rig = make_rig(threads=threads, piece_bytes=1 << 20)
    for k in range(30):
        before = rig.tiers.block(rig.tiers.device, 0, 2).copy()
        transfer = rig.tiers.transfer(STORE, (0, 2, 2))
        rig.engine.submit(transfer)
        assert rig.engine.order_after([transfer.ticket], PATIENCE_S)
        rig.tiers.block(rig.tiers.device, 0, 2)[:] = k
        drain(rig.engine, 1)
        assert np.array_equal(rig.tiers.block(rig.tiers.host, 0, 2), before)


def test_order_after_waits_for_a_store_that_its_thread_has_not_submitted_yet(make_rig, monkeypatch):
    rig, gate = make_rig(), threading.Event()
    copy = CudaRuntime.copy
    monkeypatch.setattr(CudaRuntime, "copy", lambda *a: (gate.wait(FOREVER_S), copy(*a))[1])
    before = rig.tiers.block(rig.tiers.device, 0, 2).copy()
    transfer = rig.tiers.transfer(STORE, (0, 2, 2))
    rig.engine.submit(transfer)
    assert rig.engine.order_after([transfer.ticket], 0.02) is False, "nothing is recorded that could be waited for"
    threading.Timer(0.05, gate.set).start()
    assert rig.engine.order_after([transfer.ticket], PATIENCE_S) is True
    rig.tiers.block(rig.tiers.device, 0, 2)[:] = 0
    drain(rig.engine, 1)
    assert np.array_equal(rig.tiers.block(rig.tiers.host, 0, 2), before)


def test_a_load_is_submitted_while_a_store_is_still_being_submitted(make_rig, monkeypatch):
    rig, gate = make_rig(), threading.Event()
    copy = CudaRuntime.copy

    def slow(self, stream, memory, transfer):
        if transfer.direction is STORE:
            gate.wait(FOREVER_S)
        return copy(self, stream, memory, transfer)

    monkeypatch.setattr(CudaRuntime, "copy", slow)
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    rig.engine.submit(rig.tiers.transfer(LOAD, (0, 3, 3)))
    assert [o.ticket for o in drain(rig.engine, 1)] == [2]
    gate.set()
    drain(rig.engine, 1)


def test_submit_returns_while_the_driver_call_runs(make_rig, monkeypatch):
    rig, begun, gate = make_rig(), threading.Event(), threading.Event()
    send = CudaRuntime.send
    monkeypatch.setattr(CudaRuntime, "send", lambda *a: (begun.set(), gate.wait(FOREVER_S), send(*a))[2])
    rig.engine.submit(rig.tiers.transfer(LOAD, (0, 1, 1)))
    assert begun.wait(PATIENCE_S)
    assert list(rig.engine.poll()) == []
    gate.set()
    drain(rig.engine, 1)


def test_wait_is_ended_by_wake(make_rig):
    rig = make_rig()
    threading.Timer(0.05, rig.engine.wake).start()
    assert rig.engine.wait(FOREVER_S) is False


def test_wait_pauses_ever_longer_between_two_looks(make_rig, monkeypatch):
    """On a clock that only pauses move: no busy loop, and an end is found within half a millisecond."""
    runtime, clock, pauses = make_rig().runtime, [0.0], list[float]()

    class Woken(Wakeup):
        def wait(self, timeout_s: float) -> bool:
            pauses.append(timeout_s)
            clock[0] += timeout_s
            return False

    monkeypatch.setattr(runtime, "_woken", Woken())
    monkeypatch.setattr(runtime, "now", lambda: clock[0])
    assert runtime.sleep(list, 0.01) is False
    assert pauses[:5] == [50e-6, 100e-6, 200e-6, 400e-6, 500e-6]
    assert max(pauses) == 500e-6
    assert sum(pauses) == pytest.approx(0.01)
