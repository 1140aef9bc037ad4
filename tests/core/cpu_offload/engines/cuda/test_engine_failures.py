"""The CUDA copy engine when copies, streams or the device fail, and when it is closed under them."""

from __future__ import annotations

import gc
import threading
import weakref

import inside
import numpy as np
import pytest
from patience import FOREVER_S, PATIENCE_S

from core.cpu_offload.engines.cuda.rig import Rig
from core.cpu_offload.engines.test_engines import LOAD, STORE, drain
from core.fake_cuda import FakeSums
from kvtier import (
    TransferError,
)
from kvtier.cpu_offload import memory_guard
from kvtier.cpu_offload.engines.cuda import runtime as cuda_module
from kvtier.cpu_offload.engines.cuda.driver import CudaError
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime


def refuse_copies_from(rig, block):
    """Error 2 for stores of this block of group 0."""
    address = rig.tiers.block(rig.tiers.device, 0, block).ctypes.data
    rig.cuda.refuse = lambda dst, src, num_bytes, stream: 2 * (src == address)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_transfer_that_the_driver_refuses_fails_alone(make_rig, at):
    rig = make_rig(piece_bytes=1 << 20)
    refuse_copies_from(rig, (1, 3, 5)[at])
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1), (0, 3, 2), (0, 5, 3)))
    rig.engine.submit(rig.tiers.transfer(STORE, (1, 1, 1)))
    rig.engine.submit(rig.tiers.transfer(LOAD, (1, 2, 2)))
    outcomes = {o.ticket: o for o in drain(rig.engine, 3)}
    assert "CUDA error 2" in outcomes[1].error
    assert f"copy {at} of 3" in outcomes[1].error
    assert (outcomes[2].error, outcomes[3].error) == ("", "")
    assert np.array_equal(rig.tiers.block(rig.tiers.host, 1, 1), rig.tiers.block(rig.tiers.device, 1, 1))


def test_a_failure_counts_only_once_what_was_enqueued_before_it_has_ended(make_rig):
    rig = make_rig(piece_bytes=1 << 20)
    rig.cuda.held = True
    refuse_copies_from(rig, 5)
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1), (0, 3, 2), (0, 5, 3)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, STORE))
    assert list(rig.engine.poll()) == [], "two of its copies are under way and may still write"
    rig.cuda.held = False
    assert [bool(o.error) for o in drain(rig.engine, 1)] == [True]


def test_a_block_outside_its_pool_is_refused_before_a_byte_moves(make_rig):
    rig = make_rig()
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1), (0, 7, 2)))
    [outcome] = drain(rig.engine, 1)
    assert "outside its pool" in outcome.error
    assert not rig.tiers.host.bytes.any()


def test_a_lost_device_ends_everything_as_a_failure_and_close_returns(make_rig):
    rig = make_rig()
    rig.cuda.held = True
    for k in (1, 2):
        rig.engine.submit(rig.tiers.transfer(STORE, (0, k, k)))
    rig.engine.submit(rig.tiers.transfer(LOAD, (1, 1, 1)))
    rig.cuda.lost = True
    assert all("CUDA error 700" in o.error for o in drain(rig.engine, 3))
    assert rig.engine.close(PATIENCE_S)
    assert rig.cuda.registered == {}
    rig.cuda.streams.clear()
    rig.cuda.events.clear()


@pytest.mark.parametrize("ask", ["poll", "quiesce"])
@pytest.mark.parametrize("others", [0, 2])
def test_a_copy_whose_end_could_not_be_marked_is_marked_later(make_rig, monkeypatch, ask, others):
    """The driver could not record an event, once: neither the copy nor those behind it wait for their deadlines."""
    rig, refused = make_rig(), []
    record, store = rig.cuda.record, inside.streams(rig.engine)[STORE]

    def refuse_once(event, stream):
        if stream == store and not refused:
            refused.append(event)
            raise CudaError("cudaEventRecord", 2, "out of memory")
        record(event, stream)

    monkeypatch.setattr(rig.cuda, "record", refuse_once)
    for k in range(1, 2 + others):
        rig.engine.submit(rig.tiers.transfer(STORE, (1, k, k)))
    if ask == "quiesce":
        assert rig.engine.quiesce(PATIENCE_S)
    assert [o.error for o in drain(rig.engine, 1 + others)] == [""] * (1 + others)
    assert refused
    for k in range(1, 2 + others):
        blocks = [rig.tiers.block(tier, 1, k) for tier in (rig.tiers.device, rig.tiers.host)]
        assert np.array_equal(*blocks)


def test_close_is_bounded_keeps_what_is_still_written_and_can_be_called_again(make_rig):
    rig = make_rig()
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, STORE))
    assert rig.engine.close(0.05) is False
    assert rig.cuda.registered, "a copy is still running: its memory stays pinned"
    rig.cuda.held = False
    assert rig.engine.close(PATIENCE_S)
    assert rig.engine.close(PATIENCE_S)


def test_a_closed_engine_refuses_copies(make_rig):
    """Another thread may close it while the scheduling thread submits what was planned."""
    rig = make_rig()
    for _ in range(2):
        rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
        drain(rig.engine, 1)
    assert rig.engine.close(PATIENCE_S)
    with pytest.raises(TransferError, match="closed"):
        rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    assert rig.engine.poll() == []


def test_close_waits_for_a_submission_of_another_thread_no_longer_than_it_may(make_rig, monkeypatch):
    rig, closed = make_rig(), []
    record = CudaRuntime.record

    def held(runtime, stream):
        if not closed:
            closing = threading.Thread(target=lambda: closed.append(rig.engine.close(0.05)))
            closing.start()
            closing.join(PATIENCE_S)
            assert closed == [False], "it has not ended, or ended what is in use"
        return record(runtime, stream)

    monkeypatch.setattr(CudaRuntime, "record", held)
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    assert rig.engine.close(PATIENCE_S)
    assert rig.engine.poll() == []
    assert rig.engine.order_after([1], 1.0)


@pytest.mark.parametrize("ask", ["poll", "wait", "order_after", "quiesce"])
def test_close_in_the_middle_of_a_call_takes_no_event_from_under_it_and_nobody_waits_on(make_rig, ask):
    rig, inner = make_rig(), []
    rig.cuda.held = True
    transfer = rig.tiers.transfer(STORE, (0, 1, 1))
    rig.engine.submit(transfer)
    copy = inside.copy_of(rig.engine, transfer)
    assert inside.waits_until_given(rig.engine, copy)
    copy.begun_s -= 2.0  # it is not young any more: writers wait for it on the host
    is_done = rig.runtime.is_done

    def interrupted(event):
        if not inner:
            closing = threading.Thread(target=lambda: inner.append(rig.engine.close(0.05)))
            closing.start()
            closing.join(PATIENCE_S)
        return is_done(event)

    rig.runtime.is_done = interrupted
    if ask == "poll":
        assert rig.engine.poll() == []
    elif ask == "wait":
        assert rig.engine.wait(FOREVER_S) is False
    elif ask == "order_after":
        assert rig.engine.order_after([transfer.ticket], FOREVER_S) is False
    else:
        assert rig.engine.quiesce(FOREVER_S) is False
    assert inner == [False]
    rig.cuda.held = False
    assert rig.engine.close(PATIENCE_S)


def test_nobody_waits_for_a_copy_to_be_given_that_close_has_forgotten(make_rig, monkeypatch):
    rig, go = make_rig(), threading.Event()
    give = CudaRuntime.copy
    monkeypatch.setattr(CudaRuntime, "copy", lambda *a: (go.wait(FOREVER_S), give(*a))[1])
    transfers = [rig.tiers.transfer(STORE, (0, k, k)) for k in (1, 2)]
    for transfer in transfers:
        rig.engine.submit(transfer)
    submission, closed = inside.submission(rig.engine), []
    wait_for, closing = submission.wait_for, threading.Timer(0.3, lambda: closed.append(rig.engine.close(PATIENCE_S)))

    def interrupted(ready, timeout_s):
        closing.start()
        return wait_for(ready, timeout_s)

    monkeypatch.setattr(submission, "wait_for", interrupted)
    assert rig.engine.order_after([transfers[1].ticket], FOREVER_S) is False
    go.set()
    closing.join(PATIENCE_S)
    assert closed == [True]
    assert rig.engine.close(PATIENCE_S)


def test_a_closed_engine_asks_nothing_of_its_device(make_rig, monkeypatch):
    """Its events are no more."""
    rig = make_rig()
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    assert rig.engine.close(PATIENCE_S)
    for name in ("is_done", "sleep", "record", "wait"):
        monkeypatch.delattr(CudaRuntime, name)
    assert rig.engine.poll() == []
    assert rig.engine.wait(5.0) is False
    assert rig.engine.order_after([1], 5.0)
    assert rig.engine.quiesce(5.0)


def test_wait_returns_at_once_for_what_was_seen_to_end_while_a_writer_was_ordered(make_rig):
    rig = make_rig()
    transfer = rig.tiers.transfer(STORE, (0, 1, 1))
    rig.engine.submit(transfer)
    assert rig.engine.quiesce(PATIENCE_S)
    assert rig.engine.order_after([transfer.ticket], PATIENCE_S)
    assert rig.engine.wait(FOREVER_S)
    assert [outcome.ticket for outcome in rig.engine.poll()] == [transfer.ticket]


def test_what_a_copy_holds_is_given_back_before_its_stream_is(make_rig, monkeypatch):
    """Also where nobody asks how it ended. torch records an event on the stream for pinned memory that it gets back."""
    rig, held, alive = make_rig(verify=True), [], []
    begin, drop = FakeSums.begin, rig.cuda.drop_stream

    def begun(*args):
        sums = begin(*args)
        held.append(weakref.ref(sums))
        return sums

    monkeypatch.setattr(FakeSums, "begin", begun)
    monkeypatch.setattr(rig.cuda, "drop_stream", lambda s: (alive.append([r() is not None for r in held]), drop(s)))
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, STORE))
    assert rig.engine.close(PATIENCE_S)
    assert alive == [[False]] * 4, "two copy streams, and one beside each"


def test_what_a_copy_holds_is_kept_with_an_engine_that_does_not_stop(monkeypatch):
    """Of a cache that is gone. A copy that waits behind a long forward has yet to write its checksums, whose memory
    the next cache would be given."""
    rig, taken, kept = Rig(verify=True), list[weakref.ref](), list[object]()
    begin = FakeSums.begin

    def noted(self, *arguments):
        sums = begin(self, *arguments)
        taken.append(weakref.ref(sums))
        return sums

    monkeypatch.setattr(FakeSums, "begin", noted)
    gc.collect()  # caches that other tests have let go
    monkeypatch.setattr(memory_guard, "LAST_S", 0.05)
    monkeypatch.setattr(memory_guard, "KEPT", kept)
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 5, 1), (0, 2, 3)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, STORE))
    assert not memory_guard._stop(rig.engine, rig.tiers.memory)
    del rig.engine, rig.runtime
    gc.collect()
    assert taken[0]() is not None
    rig.cuda.held = False
    rig.cuda.run()
    engine, _ = kept[0]
    assert engine.close(PATIENCE_S)


@pytest.mark.parametrize("what", ["checksums", "event", "stream"])
def test_what_cannot_be_given_back_does_not_keep_the_host_memory_pinned(make_rig, monkeypatch, what):
    """Nothing runs any more, so memory may be unmapped next: not while the driver still has it registered."""
    rig, asked = make_rig(verify=True), []
    owner = inside.sums(rig.runtime) if what == "checksums" else rig.cuda

    def refuse(*arguments):
        asked.append(arguments)
        raise CudaError("cudaEventDestroy", 700, "an illegal memory access was encountered")

    monkeypatch.setattr(owner, {"checksums": "close"}.get(what, f"drop_{what}"), refuse)
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    drain(rig.engine, 1)
    assert rig.engine.close(PATIENCE_S)
    assert asked and rig.cuda.registered == {}
    assert bool(rig.cuda.streams) is (what == "stream") and bool(rig.cuda.events) is (what == "event")
    rig.cuda.streams.clear()
    rig.cuda.events.clear()


@pytest.mark.parametrize("polled", [True, False])
def test_what_copies_hold_on_a_lost_device_is_never_given_back(monkeypatch, polled):
    """torch records an event for pinned memory that it gets back: that fails, in a destructor, and ends the process."""
    rig, held, kept = Rig(verify=True), list[weakref.ref](), list[object]()
    begin = FakeSums.begin

    def begun(*arguments):
        sums = begin(*arguments)
        held.append(weakref.ref(sums))
        return sums

    monkeypatch.setattr(FakeSums, "begin", begun)
    monkeypatch.setattr(cuda_module, "KEPT", kept)
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, STORE))
    rig.cuda.lost = True
    if polled:
        assert "CUDA error 700" in drain(rig.engine, 1)[0].error
    assert rig.engine.close(PATIENCE_S)
    rig.cuda.streams.clear()  # they hold what a GPU would not
    del rig
    gc.collect()
    assert held[0]() is not None
    kept.clear()
    assert held[0]() is None


def test_no_thread_is_left_after_close():
    before = set(threading.enumerate())
    rig = Rig()
    assert len(set(threading.enumerate()) - before) == 2
    rig.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("verify", [False, True])
def test_events_are_used_again(make_rig, verify):
    rig = make_rig(verify=verify)
    for k in range(40):
        rig.engine.submit(rig.tiers.transfer((STORE, LOAD)[k % 2], (0, 1 + k % 6, 1 + k % 3)))
        drain(rig.engine, 1)
    assert len(rig.cuda.events) <= 4


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_copy_holds_is_held_until_it_has_ended_and_no_longer(make_rig, monkeypatch, fails):
    rig, sent = make_rig(verify=True, piece_bytes=1 << 20), []
    send = CudaRuntime.send

    def sending(self, *arguments):
        if fails and len(sent) == 1:
            raise CudaError("cuMemcpyAsync", 1, "refused")
        send(self, *arguments)
        sent.append(arguments)

    monkeypatch.setattr(cuda_module, "PIECE_BYTES", 1)
    monkeypatch.setattr(CudaRuntime, "send", sending)
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(LOAD, (0, 1, 1), (0, 2, 2)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, LOAD))
    assert inside.held(rig.runtime)
    done = inside.first_copy(rig.engine, LOAD).done
    rig.cuda.held = False
    while not rig.runtime.is_done(done):
        pass
    assert not any(stream.queue for stream in rig.cuda.streams.values()), "its end is behind its checksums as well"
    assert bool(drain(rig.engine, 1)[0].error) or not fails
    assert not inside.held(rig.runtime)


def test_checksums_of_a_load_do_not_wait_for_those_of_a_store(make_rig):
    rig = make_rig(verify=True)
    beside = [inside.beside(rig.runtime, inside.streams(rig.engine)[direction]) for direction in (STORE, LOAD)]
    assert len({*beside, *inside.streams(rig.engine).values()}) == 4
    assert [rig.cuda.streams[stream].urgent for stream in beside] == [False, True]


@pytest.mark.parametrize("under_way", [False, True])
def test_a_device_that_is_found_lost_only_when_it_is_closed(make_rig, under_way):
    rig = make_rig(verify=True)
    if under_way:
        rig.cuda.held = True
        rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
        assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, STORE))
    rig.cuda.lost = True
    assert rig.engine.close(PATIENCE_S)
    assert rig.cuda.registered == {}
    rig.cuda.streams.clear()
    rig.cuda.events.clear()
