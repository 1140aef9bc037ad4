"""The CUDA copy engine on a played driver: real bytes, real C calls, real threads; only the GPU is missing."""

from __future__ import annotations

import ctypes

import inside
import numpy as np
import pytest

from core.cpu_offload.engines.cuda.rig import PAGE
from core.cpu_offload.engines.test_engines import LOAD, STORE, drain
from core.fake_cuda import COMPUTE
from kvtier import (
    CacheSpec,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    SlidingWindow,
)
from kvtier.cpu_offload.engines.cuda.descriptors import Copies
from kvtier.cpu_offload.engines.cuda.driver import CudaError, copy_each
from kvtier.geometry.dtypes import DTYPE_BYTES

KINDS = {"full": FullAttention(), "window": SlidingWindow(8), "chunk": ChunkedLocal(8)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_and_group_kind_makes_the_round_trip_byte_for_byte(make_rig, dtype, seed):
    """Also with heads of different sizes, with blocks that are padded, and where registrations end inside blocks."""
    shapes = ((4, 3, None), (4, 8, 4), (8, 8, 7))  # block_tokens, head_dim, head_dim_v
    groups = [
        GroupSpec(name, kind, 1 + k, 1, dim, dtype=dtype, block_tokens=tokens, head_dim_v=dim_v)
        for k, ((name, kind), (tokens, dim, dim_v)) in enumerate(zip(KINDS.items(), shapes, strict=True))
    ]
    rig = make_rig(spec=CacheSpec(groups), sizes=([40, 30, 20], [60, 25, 33]), seed=seed)
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


def test_neighbours_are_one_copy(make_rig):
    rig = make_rig(piece_bytes=1 << 20)
    rig.engine.submit(rig.tiers.transfer(STORE, (0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 5, 9), (1, 4, 8)))
    drain(rig.engine, 1)
    assert len(rig.cuda.copies) == 2
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
    assert len(rig.cuda.copies) == int((rig.pinned.starts < end).sum()), "one run, cut at every registration"
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


# --- each copy is a call ---------------------------------------------------------------------------


def copies_of(*rows):
    """Copies of (dst, src, bytes)."""
    return Copies(*np.array(rows, np.uint64).reshape(-1, 3).T.copy())


def calls(status_of):
    """A C function like the driver's, and what it is called with."""
    seen: list[tuple[int, ...]] = []

    def copy(*arguments: int) -> int:
        seen.append(arguments)
        return status_of(len(seen) - 1)

    u64 = ctypes.c_uint64
    return ctypes.CFUNCTYPE(ctypes.c_int, u64, u64, ctypes.c_size_t, u64)(copy), seen


def test_copies_are_calls_in_their_order_with_all_64_bits():
    function, seen = calls(lambda k: 0)
    rows = [(1 << 63, 0x7FFF_FFFF_F000, 1), (2, (1 << 64) - 1, 1 << 40), (3, 4, 5)]
    copy_each(ctypes.cast(function, ctypes.c_void_p).value, copies_of(*rows), 0x7F00_1234_5678)
    assert seen == [(*row, 0x7F00_1234_5678) for row in rows]
    copy_each(0, copies_of(), 7)


def test_the_first_copy_that_is_refused_is_the_last():
    function, seen = calls(lambda k: 719 * (k == 1))
    with pytest.raises(CudaError, match="copy 1 of 3") as caught:
        copy_each(ctypes.cast(function, ctypes.c_void_p).value, copies_of(*[(1, 2, 3)] * 3), 7)
    assert caught.value.status == 719
    assert len(seen) == 2


def test_copies_are_on_streams_of_their_own(make_rig):
    rig = make_rig()
    for direction in (STORE, LOAD):
        rig.engine.submit(rig.tiers.transfer(direction, (0, 1, 1)))
        drain(rig.engine, 1)
    used = {stream for *_, stream in rig.cuda.copies}
    assert used == set(inside.streams(rig.engine).values())
    assert COMPUTE not in used


def test_loads_have_a_stream_of_their_own_that_comes_first(make_rig):
    rig = make_rig()
    assert [s.urgent for s in rig.cuda.streams.values()] == [d is LOAD for d in inside.streams(rig.engine)]


# --- the kernel ---------------------------------------------------------------------------------
