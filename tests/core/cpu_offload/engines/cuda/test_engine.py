"""The CUDA copy engine on a played driver: real bytes, real C calls, real threads; only the GPU is missing."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import inside
import numpy as np
import pytest
from patience import FOREVER_S, PATIENCE_S, wait_until

from core.cpu_offload.engines.test_engines import LOAD, SPEC, STORE, Tiers, drain
from core.fake_cuda import COMPUTE, FakeCuda, FakeSums, Stream
from kvtier import (
    CacheSpec,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    SlidingWindow,
    TransferError,
)
from kvtier.cpu_offload import memory_guard
from kvtier.cpu_offload.engines.cuda import runtime as cuda_module
from kvtier.cpu_offload.engines.cuda.descriptors import Copies
from kvtier.cpu_offload.engines.cuda.device_sums import TorchSums
from kvtier.cpu_offload.engines.cuda.driver import ABIS, LEGACY, BatchCopy, CudaError, SourceOrder
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Registration
from kvtier.cpu_offload.engines.cuda.link import CudaEngine
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime
from kvtier.cpu_offload.engines.submission import SubmissionThreads
from kvtier.geometry.layout import Layout
from kvtier.geometry.spec import DTYPE_BYTES
from kvtier.machine.wakeup import Wakeup

PAGE = 4096


class Rig:
    """Two tiers, a played GPU and the engine on it. The host tier is registered in pieces of ``piece_bytes``."""

    def __init__(
        self,
        verify: bool = False,
        spec: CacheSpec = SPEC,
        sizes=([6, 5], [3, 9]),
        piece_bytes: int = PAGE,
        threads: bool = True,
        paced: bool = False,
        **options,
    ) -> None:
        from kvtier.cpu_offload.tier_memory import TierMemory
        from kvtier.pools.arena import Arena

        self.cuda = FakeCuda(**options)
        self.tiers = Tiers.__new__(Tiers)
        device, host = (Arena(spec, Layout.fixed([g.block_bytes for g in spec.groups], n), "cpu") for n in sizes)
        device.allocate("device_blocks")
        pins = Registration(self.cuda.host_register, self.cuda.host_unregister)
        self.pinned = HostMemory(host.num_bytes, pins, piece_bytes=piece_bytes)
        host.use(self.pinned.array)
        self.tiers.device, self.tiers.host, self.tiers.tickets = device, host, 0
        self.tiers.memory = TierMemory(device, host, verify)
        device.bytes[:] = np.random.default_rng(0).integers(0, 256, device.num_bytes, np.uint8)
        self.cuda.device_ranges.append((device.address, device.num_bytes))
        self.runtime = CudaRuntime(
            self.cuda,
            self.pinned.starts,
            FakeSums(self.cuda) if verify else None,
            host=self.pinned.report,
            on_close=self.pinned.release,
            paced=paced,
        )
        retire = self.runtime.retire

        def retired(event: int) -> None:  # whoever waits for it from now on waits for nothing, and is told
            self.cuda.events[event] = None
            retire(event)

        self.runtime.retire = retired
        submission = SubmissionThreads(self.runtime.bind_thread) if threads else None
        self.engine = CudaEngine(self.tiers.memory, self.runtime, submission)

    def close(self) -> None:
        assert self.engine.close(PATIENCE_S)
        assert self.cuda.problems == []
        assert self.cuda.registered == {}, "a registration is left behind"
        assert self.cuda.streams == {}
        assert self.cuda.events == {}, "an event was lost"


@pytest.fixture
def make_rig():
    made: list[Rig] = []

    def make(**options) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.cuda.held = False
        rig.close()


KINDS = {"full": FullAttention(), "window": SlidingWindow(8), "chunk": ChunkedLocal(8)}


@pytest.mark.parametrize("driver", [12070, 12080, 12090, 13000, 13020])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_and_group_kind_makes_the_round_trip_byte_for_byte(make_rig, dtype, driver):
    """Also with heads of different sizes, with blocks that are padded, and where registrations end inside blocks."""
    shapes = ((4, 3, None), (4, 8, 4), (8, 8, 7))  # block_tokens, head_dim, head_dim_v
    groups = [
        GroupSpec(name, kind, 1 + k, 1, dim, dtype=dtype, block_tokens=tokens, head_dim_v=dim_v)
        for k, ((name, kind), (tokens, dim, dim_v)) in enumerate(zip(KINDS.items(), shapes, strict=True))
    ]
    rig = make_rig(spec=CacheSpec(groups), sizes=([40, 30, 20], [60, 25, 33]), driver=driver, seed=driver)
    tiers, rng = rig.tiers, np.random.default_rng(1)
    before = tiers.device.bytes.copy()
    pairs = [
        (g, int(d) + 1, int(h) + 1)
        for g, n in enumerate((30, 20, 15))
        for d, h in zip(rng.permutation(n), rng.permutation(n + 5), strict=False)
    ]
    rig.engine.submit(tiers.transfer(STORE, *pairs))
    assert [o.error for o in drain(rig.engine, 1)] == [""]
    assert np.array_equal(tiers.device.bytes, before)
    for g, d, h in pairs:
        assert np.array_equal(tiers.block(tiers.host, g, h), tiers.block(tiers.device, g, d))
    tiers.device.bytes[:] = 0
    rig.engine.submit(tiers.transfer(LOAD, *pairs))
    assert [o.error for o in drain(rig.engine, 1)] == [""]
    mine = np.zeros(len(before), bool)
    for g, d, _ in pairs:
        at, size = int(tiers.device.origins[g] + d * tiers.device.block_bytes[g]), int(tiers.device.block_bytes[g])
        mine[at : at + size] = True
    assert np.array_equal(tiers.device.bytes[mine], before[mine])
    assert not tiers.device.bytes[~mine].any(), "a byte outside the blocks was written"
    assert bool(rig.cuda.batches) is (driver >= 12080)
    assert bool(rig.cuda.single_copies) is (driver < 12080)


def test_a_transfer_is_one_call_and_neighbours_are_one_copy(make_rig):
    rig = make_rig(piece_bytes=1 << 20)
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 5, 9), (1, 4, 8)))
    drain(rig.engine, 1)
    assert [n for n, _, _ in rig.cuda.batches] == [2]
    stats = rig.engine.link_stats()
    assert (stats.transfers, stats.blocks, stats.copies) == (1, 5, 2)


def test_no_copy_straddles_two_registrations(make_rig):
    """The played driver refuses one; here a run of blocks lies across several."""
    rig = make_rig(sizes=([60, 5], [60, 9]), piece_bytes=PAGE)
    assert len(rig.cuda.registered) > 1
    run = [(0, k, k) for k in range(1, 61)]
    rig.engine.submit(rig.tiers.transfer(STORE, *run))
    assert [o.error for o in drain(rig.engine, 1)] == [""]
    end = rig.tiers.host.address + 61 * int(rig.tiers.host.block_bytes[0])
    assert rig.cuda.batches[0][0] == int((rig.pinned.starts < end).sum()), "one run, cut at every registration"
    for _, d, h in run:
        assert np.array_equal(rig.tiers.block(rig.tiers.host, 0, h), rig.tiers.block(rig.tiers.device, 0, d))


def test_a_played_driver_refuses_a_copy_across_registrations(make_rig, monkeypatch):
    """The proof above can fail."""
    rig = make_rig(sizes=([60, 5], [60, 9]), piece_bytes=PAGE)
    inside.use_starts(rig.runtime, rig.pinned.starts[:1])
    rig.engine.submit(rig.tiers.transfer(STORE, *[(0, k, k) for k in range(1, 61)]))
    [outcome] = drain(rig.engine, 1)
    assert "CUDA error 1" in outcome.error
    assert rig.cuda.problems
    rig.cuda.problems.clear()


# --- the two forms of the batched copy ------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "version", "asked"),
    [(12040, None, [12080, 13000]), (12080, 12080, [12080]), (13000, 12080, [12080])],
)
def test_the_form_that_is_called_is_the_one_that_was_asked_for(driver, version, asked):
    cuda = FakeCuda(driver=driver)
    batch = BatchCopy.find(cuda)
    assert (batch and batch.version) == version
    assert cuda.asked_for == asked


def test_a_driver_that_gives_out_only_the_newer_form_is_served_with_eight_arguments(make_rig, monkeypatch):
    older = FakeCuda.entry_point
    monkeypatch.setattr(FakeCuda, "entry_point", lambda s, name, v: None if v < 13000 else older(s, name, v))
    rig = make_rig()
    assert rig.runtime.abi == 13000
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 2, 3)))
    assert [o.error for o in drain(rig.engine, 1)] == [""]
    assert np.array_equal(rig.tiers.block(rig.tiers.host, 0, 3), rig.tiers.block(rig.tiers.device, 0, 2))


@pytest.mark.parametrize(("version", "count"), [(12080, 9), (13000, 8)])
def test_each_form_has_its_number_of_arguments(version, count):
    assert len(ABIS[version]._argtypes_) == count


def test_the_forms_mixed_up_are_noticed():
    """What this guards against: 8 arguments for a function of 9 put the stream where failIdx is written."""
    cuda = FakeCuda()
    stream = cuda.new_stream(False)
    wrong = BatchCopy(cuda.entry_point(b"cuMemcpyBatchAsync", 12080), 12080)
    inside.mix_up_forms(wrong)
    one = np.ones(1, np.uint64)
    buffer = (ctypes.c_uint64 * 8)()
    cuda.streams[ctypes.addressof(buffer)] = cuda.streams.pop(stream)
    with pytest.raises(CudaError):
        wrong(Copies(one, one, one), SourceOrder.STREAM, ctypes.addressof(buffer))
    assert cuda.problems


def test_the_null_stream_and_an_empty_batch_are_kept_from_the_driver():
    cuda = FakeCuda()
    batch = BatchCopy.find(cuda)
    one, none = np.ones(1, np.uint64), np.empty(0, np.uint64)
    for stream in (0, LEGACY):
        with pytest.raises(TransferError, match="null stream"):
            batch(Copies(one, one, one), SourceOrder.STREAM, stream)
    batch(Copies(none, none, none), SourceOrder.STREAM, cuda.new_stream(False))
    assert cuda.problems == []


def test_sources_are_read_in_stream_order(make_rig):
    rig = make_rig()
    for direction in (STORE, LOAD):
        rig.engine.submit(rig.tiers.transfer(direction, (0, 1, 1)))
        drain(rig.engine, 1)
    assert {order for _, order, _ in rig.cuda.batches} == {SourceOrder.STREAM}
    assert COMPUTE not in {stream for _, _, stream in rig.cuda.batches}


def test_loads_have_a_stream_of_their_own_that_comes_first(make_rig):
    rig = make_rig()
    assert [s.urgent for s in rig.cuda.streams.values()] == [d is LOAD for d in inside.streams(rig.engine)]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_batch_that_the_driver_refuses_fails_alone(make_rig, at):
    rig = make_rig(piece_bytes=1 << 20)
    rig.cuda.fail_batch = (2, at, 3)
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
    rig.cuda.held, rig.cuda.fail_batch = True, (2, 2, 3)
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
    before = threading.active_count()
    rig = Rig()
    assert threading.active_count() == before + 2
    rig.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("verify", [False, True])
def test_events_are_used_again(make_rig, verify):
    rig = make_rig(verify=verify)
    for k in range(40):
        rig.engine.submit(rig.tiers.transfer((STORE, LOAD)[k % 2], (0, 1 + k % 6, 1 + k % 3)))
        drain(rig.engine, 1)
    assert len(rig.cuda.events) <= 4


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_copy_holds_is_held_until_it_has_ended_and_no_longer(make_rig, monkeypatch, fails):
    rig, held = make_rig(verify=True, piece_bytes=1 << 20), []
    send = CudaRuntime.send

    def sending(self, copies, *arguments):
        if fails and len(held) == 1:
            raise CudaError("cuMemcpyBatchAsync", 1, "refused")
        send(self, copies, *arguments)
        held.append(weakref.ref(copies.dst))

    monkeypatch.setattr(cuda_module, "PIECE_BYTES", 1)
    monkeypatch.setattr(CudaRuntime, "send", sending)
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(LOAD, (0, 1, 1), (0, 2, 2)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, LOAD))
    assert all(kept() is not None for kept in held), "the driver may still read its list of copies"
    done = inside.first_copy(rig.engine, LOAD).done
    rig.cuda.held = False
    while not rig.runtime.is_done(done):
        pass
    assert not any(stream.queue for stream in rig.cuda.streams.values()), "its end is behind its checksums as well"
    assert bool(drain(rig.engine, 1)[0].error) or not fails
    assert not inside.held(rig.runtime)
    assert all(kept() is None for kept in held)


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


# --- order ----------------------------------------------------------------------------------------


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


# --- verification ---------------------------------------------------------------------------------


def test_each_block_that_changed_in_the_host_tier_is_found(make_rig):
    rig = make_rig(verify=True, piece_bytes=1 << 20)
    tiers = rig.tiers
    pairs = [(0, 1, 1), (0, 2, 2), (1, 1, 5), (1, 4, 9)]
    rig.engine.submit(tiers.transfer(STORE, *pairs))
    assert [o.error for o in drain(rig.engine, 1)] == [""]
    for k, (g, _, h) in enumerate(pairs):
        block = tiers.block(tiers.host, g, h)
        for at in (0, len(block) // 2, len(block) - 1):
            block[at] ^= 16
            rig.engine.submit(tiers.transfer(LOAD, *pairs))
            [outcome] = drain(rig.engine, 1)
            assert outcome.corrupt
            assert outcome.bad.tolist() == [k]
            block[at] ^= 16
    rig.engine.submit(tiers.transfer(LOAD, *pairs))
    assert [o.error for o in drain(rig.engine, 1)] == [""]


def test_a_stores_checksums_go_beside_its_copies_and_a_loads_after_each_piece_of_them(make_rig, monkeypatch):
    rig, calls = make_rig(verify=True, piece_bytes=1 << 20), []
    monkeypatch.setattr(cuda_module, "PIECE_BYTES", int(rig.tiers.device.block_bytes[0]))
    send, begin = CudaRuntime.send, FakeSums.begin
    monkeypatch.setattr(CudaRuntime, "send", lambda *a: (calls.append(("copy", a[-1])), send(*a))[1])
    monkeypatch.setattr(FakeSums, "begin", lambda *a: (calls.append(("sum", a[1])), begin(*a))[1])
    blocks = (0, 1, 1), (0, 2, 2), (0, 3, 3)
    for direction, parts in ((STORE, ["sum", "copy"]), (LOAD, ["copy", "sum"] * 3)):
        calls.clear()
        rig.engine.submit(rig.tiers.transfer(direction, *blocks))
        assert [o.error for o in drain(rig.engine, 1)] == [""]
        assert [what for what, _ in calls] == parts
        assert {stream for what, stream in calls if what == "copy"} == {inside.streams(rig.engine)[direction]}
        assert not {stream for what, stream in calls if what == "sum"} & set(inside.streams(rig.engine).values())


@pytest.mark.parametrize("removed", [None, (STORE, 0), (STORE, 1), (LOAD, 0), (LOAD, 1), (LOAD, 2)])
def test_every_order_between_copies_and_their_checksums_is_needed(make_rig, monkeypatch, removed):
    """A forward that has yet to write two blocks, a store of them, and a load of what was stored, again and again."""
    rig, calls, follow, copy = make_rig(verify=True, piece_bytes=1 << 20), [], CudaRuntime._follow, CudaRuntime.copy
    monkeypatch.setattr(cuda_module, "PIECE_BYTES", 1)
    compute = rig.cuda.streams[COMPUTE] = Stream(False)

    def copying(self, stream, memory, transfer):
        calls[:] = [transfer.direction]
        return copy(self, stream, memory, transfer)

    def following(self, later, earlier):
        calls.append(1)
        if (calls[0], len(calls) - 2) != removed:
            follow(self, later, earlier)

    monkeypatch.setattr(CudaRuntime, "copy", copying)
    monkeypatch.setattr(CudaRuntime, "_follow", following)
    wrong, blocks = [], ((0, 1, 1), (0, 2, 2))
    for k in range(40):
        for _, b, _ in blocks:
            rig.cuda.enqueue(COMPUTE, lambda b=b, k=k: rig.tiers.block(rig.tiers.device, 0, b).fill(k + b))
        for direction in (STORE, LOAD):
            rig.engine.submit(rig.tiers.transfer(direction, *blocks))
            wrong += [o.error for o in drain(rig.engine, 1) if o.error]
            for _, b, _ in blocks:
                rig.tiers.block(rig.tiers.device, 0, b)[:] = 255
    assert (wrong == []) is (removed is None)
    rig.cuda.run()
    assert not compute.queue
    del rig.cuda.streams[COMPUTE]


def test_what_a_load_that_fails_half_way_has_under_way_is_kept(make_rig, monkeypatch):
    rig, used = make_rig(verify=True, piece_bytes=1 << 20), []
    send, begin = CudaRuntime.send, FakeSums.begin
    monkeypatch.setattr(cuda_module, "PIECE_BYTES", 1)

    def sending(*arguments):
        if used:
            raise CudaError("cuMemcpyBatchAsync", 1, "refused")
        return send(*arguments)

    def begun(*arguments):
        sums = begin(*arguments)
        used.append(weakref.ref(sums))
        return sums

    monkeypatch.setattr(CudaRuntime, "send", sending)
    monkeypatch.setattr(FakeSums, "begin", begun)
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(LOAD, (0, 1, 1), (0, 2, 2)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, LOAD))
    assert used[0]() is not None, "the first piece's checksums are still to be taken"
    rig.cuda.held = False
    [outcome] = drain(rig.engine, 1)
    assert "refused" in outcome.error


def test_a_load_that_is_verified_is_cut_into_a_few_pieces_that_cover_it():
    sizes = np.full(1000, 1 << 20, np.uint64)
    for n, count in ((0, 1), (1, 1), (100, 1), (128, 2), (1000, cuda_module.MOST_PIECES)):
        pieces = cuda_module.pieces(sizes[:n], cuda_module.PIECE_BYTES, cuda_module.MOST_PIECES)
        assert len(pieces) == count
        assert [i for at in pieces for i in range(n)[at]] == list(range(n))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_paced_stream_gets_a_piece_once_it_has_made_the_one_before(make_rig, monkeypatch, direction, verify):
    """So its copy engine serves others in between. Nobody paces while somebody waits until all is given."""
    monkeypatch.setattr(cuda_module, "PACED_BYTES", 1)
    rig = make_rig(paced=True, verify=verify)
    pairs = [(0, 1, 1), (0, 2, 3), (1, 1, 5), (0, 3, 2)]
    rig.engine.submit(rig.tiers.transfer(STORE, *pairs))
    drain(rig.engine, 1)
    stored = [rig.tiers.block(rig.tiers.host, g, h).copy() for g, _, h in pairs]
    tier, column = (rig.tiers.host, 2) if direction is STORE else (rig.tiers.device, 1)
    for pair in pairs:
        rig.tiers.block(tier, pair[0], pair[column])[:] = 0
    batches, behind = len(rig.cuda.batches), []
    send = CudaRuntime.send

    def sending(self, copies, way, stream):
        behind.append(len([job for job in rig.cuda.streams[stream].queue if callable(job)]))
        send(self, copies, way, stream)

    monkeypatch.setattr(CudaRuntime, "send", sending)
    rig.engine.submit(rig.tiers.transfer(direction, *pairs))
    assert [o.error for o in drain(rig.engine, 1)] == [""]
    found = [rig.tiers.block(tier, pair[0], pair[column]) for pair in pairs]
    assert all(np.array_equal(a, b) for a, b in zip(found, stored, strict=True))
    assert len(rig.cuda.batches) - batches == len(behind) == len(pairs)
    assert behind == [0] * len(pairs)


def test_nobody_paces_while_somebody_waits_until_all_is_given(make_rig, monkeypatch):
    monkeypatch.setattr(cuda_module, "PACED_BYTES", 1)
    rig = make_rig(paced=True)
    rig.cuda.held = True  # no piece ever ends
    store = rig.tiers.transfer(STORE, (0, 1, 1), (0, 2, 3), (1, 1, 5))
    rig.engine.submit(store)
    wait_until(lambda: rig.cuda.batches, "the first piece is given")
    assert not inside.copy_of(rig.engine, store).is_given()
    assert inside.waits_until_given(rig.engine, inside.copy_of(rig.engine, store))
    assert len(rig.cuda.batches) == 3
    rig.cuda.held = False
    assert [o.error for o in drain(rig.engine, 1)] == [""]


def test_checksums_that_cannot_be_read_are_a_failure(make_rig, monkeypatch):
    def begin(self, stream, *blocks):
        return lambda: 1 / 0

    monkeypatch.setattr(FakeSums, "begin", begin)
    rig = make_rig(verify=True)
    rig.engine.submit(rig.tiers.transfer(LOAD, (0, 1, 1)))
    assert "ZeroDivisionError" in drain(rig.engine, 1)[0].error


def test_a_kernel_for_checksums_is_given_addresses(make_rig):
    rig, asked = make_rig(verify=True), []

    def kernel(addresses, block_bytes, device):
        import torch

        asked.append((addresses.tolist(), block_bytes, str(device)))
        return torch.arange(len(addresses), dtype=torch.int64)

    t = rig.tiers.transfer(STORE, (0, 2, 1), (1, 3, 1), (0, 1, 2))
    sums = TorchSums(kernel).begin(0, rig.tiers.memory, t.groups, rig.tiers.memory.addresses(t)[0])()
    d = rig.tiers.device
    first, second = d.address, d.address + int(d.origins[1])
    size = d.block_bytes.tolist()
    assert asked == [([first + 2 * size[0], first + size[0]], size[0], "cpu"), ([second + 3 * size[1]], size[1], "cpu")]
    assert sums.tolist() == [0, 0, 1]


def test_on_a_gpu_checksums_are_launched_on_the_stream_that_they_are_given_and_come_back_pinned(make_rig, monkeypatch):
    import torch

    from kvtier.cpu_offload.engines.cuda import device_sums

    rig, now, pinned, given = make_rig(verify=True), list[int](), list[bool](), list[weakref.ref]()
    empty, d = torch.empty, rig.tiers.device
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0")
    memory = SimpleNamespace(arenas=[SimpleNamespace(storage=on_gpu, address=d.address, block_bytes=d.block_bytes)])

    @contextmanager
    def on(stream, device):
        now.append(stream)
        yield
        now.clear()

    def kernel(addresses, block_bytes, device):
        assert now == [77]
        return torch.arange(len(addresses), dtype=torch.int64)

    def pin(tensor):
        copy = tensor.clone()
        given.append(weakref.ref(copy))
        return copy

    def made(*sizes, pin_memory=False, **options):
        assert now == [77]
        pinned.append(pin_memory)
        return empty(*sizes, **options)

    t = rig.tiers.transfer(STORE, (0, 2, 1), (1, 3, 1))
    at = rig.tiers.memory.addresses(t)[0]
    monkeypatch.setattr(device_sums, "_on", on)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    read = TorchSums(kernel).begin(77, memory, t.groups, at)
    assert pinned == [True] and not now
    assert len(given) == 2 and all(addresses() is not None for addresses in given), (
        "what is let go early holds up others"
    )
    read()
    assert all(addresses() is None for addresses in given)


def test_memory_that_torch_keeps_for_streams_is_given_back_before_they_end(make_rig, monkeypatch):
    import torch

    rig, left = make_rig(verify=True), list[int]()
    monkeypatch.setattr(FakeSums, "close", lambda self: self._sums.close())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(len(rig.cuda.streams)))
    assert rig.engine.close(PATIENCE_S)
    assert len(left) == 1 and left[0] > 0 and not rig.cuda.streams


def test_events_of_a_close_that_is_tried_again_are_used_again(make_rig):
    rig = make_rig()
    rig.cuda.held = True
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1)))
    assert inside.waits_until_given(rig.engine, inside.first_copy(rig.engine, STORE))
    assert not rig.runtime.close(0.0)
    made = len(rig.cuda.events)
    assert not any(rig.runtime.close(0.0) for _ in range(5))
    assert len(rig.cuda.events) == made
    rig.cuda.held = False
