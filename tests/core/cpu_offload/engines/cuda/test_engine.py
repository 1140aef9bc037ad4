"""The CUDA copy engine on a played driver: real bytes, real C calls, real threads; only the GPU is missing."""

from __future__ import annotations

import ctypes

import inside
import numpy as np
import pytest

from core.cpu_offload.engines.cuda.rig import PAGE
from core.cpu_offload.engines.test_engines import LOAD, STORE, drain
from core.fake_cuda import COMPUTE, FakeCuda
from kvtier import (
    CacheSpec,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    SlidingWindow,
    TransferError,
)
from kvtier.cpu_offload.engines.cuda.descriptors import Copies
from kvtier.cpu_offload.engines.cuda.driver import ABIS, LEGACY, BatchCopy, CudaError, SourceOrder
from kvtier.geometry.spec import DTYPE_BYTES

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


# --- the kernel ---------------------------------------------------------------------------------
