"""A GPU's link as a cache has it: the path that is chosen, a whole cache, software that does not fit."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import deque
from itertools import count

import inside
import numpy as np
import pytest
from breadth import sample

from core.driving import is_zero, prompt
from core.fake_cuda import COMPUTE, FakeCuda, FakeSums, Stream
from kvtier import (
    ChunkedLocal,
    Fragment,
    FullAttention,
    HostTier,
    KVCache,
    KVTierError,
    MemoryUnavailable,
    OutsideGroup,
    SlidingWindow,
)
from kvtier.attention.kernels import checksum_blocks
from kvtier.cpu_offload import memory_guard
from kvtier.cpu_offload.engines.cuda import link as cuda_link, runtime as cuda_module
from kvtier.cpu_offload.engines.cuda.driver import CudaError
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory
from kvtier.cpu_offload.engines.cuda.link import CudaLink, mismatch
from kvtier.pools.arena import Arena
from kvtier.pools.block_pool import BlockPools
from kvtier.testing import Faults, FaultyLink, canary_spec, expected_tokens

# --- which path -----------------------------------------------------------------------------------


# --- the whole cache ------------------------------------------------------------------------------


GROUPS = {"full": (FullAttention(), 4), "win": (SlidingWindow(6), 2), "chunk": (ChunkedLocal(8), 4)}
NINE = dict.fromkeys(GROUPS, 9)


@pytest.mark.parametrize("store", ["eager", "lazy"])
@pytest.mark.parametrize("seed", sample(range(2), [0]))
def test_a_served_cache_gives_the_right_text(make_serving, linked, store, seed):
    """Requests over a few stems in pools that both tiers fight for, verified; every step is audited."""
    options, cuda = linked(seed=seed)
    serving = make_serving(
        GROUPS,
        {"full": 14, "win": 12, "chunk": 10},
        {"full": 24, "win": 16, "chunk": 12},
        store=store,
        verify="full",
        scheduler={"max_batched_tokens": 16, "max_running": 4},
        **options,
    )
    for i in range(24):
        serving.add(f"r{i}", [*prompt(i % 3, 4 + 5 * (i % 4)), i % 7], max_new_tokens=1 + i % 4)
    serving.run()
    stats = serving.cache.stats()
    assert stats.transfers.loaded_blocks > 0
    assert stats.transfers.failed_loads == stats.transfers.corrupt_blocks == 0
    assert stats.link.pinned_bytes == stats.host_bytes
    assert stats.link.transfers > 0
    assert stats.link.load_gbps > 0
    assert cuda.registered
    serving.cache.close()
    assert cuda.registered == {}


@pytest.mark.parametrize("store", sample(["eager", "lazy"], ["lazy"]))
def test_behind_a_bad_link_texts_are_right_and_its_memory_is_pinned(make_serving, linked, store):
    """As ``kvtier verify`` serves on a GPU: the driver's own copies, some of them damaged in the host tier."""
    options, cuda = linked()
    link = FaultyLink(options["copy_engine"], Faults(fail=0.1, tear=0.1, corrupt=0.3), seed=2)
    serving = make_serving(GROUPS, NINE, dict.fromkeys(NINE, 60), store=store, verify="full", copy_engine=link)
    for i in range(40):
        text = prompt(i % 4, 21)
        assert serving.serve(f"r{i}", text, 3).token_ids == expected_tokens(serving.spec, text, 3)
    counts = serving.cache.stats().transfers
    assert min(counts.failed_stores, counts.failed_loads, counts.corrupt_blocks, counts.loaded_blocks) > 0
    assert serving.cache.stats().link.pinned_bytes == serving.cache.stats().host_bytes
    serving.cache.close()
    assert cuda.registered == {}


@pytest.mark.parametrize(
    "where", ["kvtier.cache.tier.CheckedPools", "kvtier.cache.facade.TierMemory", "kvtier.cache.facade.Connector"]
)
def test_a_cache_that_cannot_be_made_pins_nothing(linked, monkeypatch, where):
    options, cuda = linked()

    def refuse(*arguments):
        if where != "kvtier.cache.tier.CheckedPools" or cuda.registered:  # the host tier's books
            raise MemoryError("no room for books")
        return BlockPools(*arguments)

    monkeypatch.setattr(where, refuse)
    with pytest.raises(MemoryUnavailable, match="no room for books"):
        KVCache(canary_spec(GROUPS), device_blocks=NINE, host_blocks=NINE, **options)
    assert cuda.registered == {}


def test_memory_stays_pinned_under_a_copy_of_a_measurement_that_failed(linked, monkeypatch):
    """Waiting for it fails, and the copy does not end: nobody else may get either tier's memory."""
    options, cuda = linked()
    kept: list[list[Arena]] = []
    gc.collect()  # caches that other tests have let go
    monkeypatch.setattr(memory_guard, "KEPT", kept)
    monkeypatch.setattr(cuda_link, "CLOSE_S", 0.1)
    synchronize = cuda.synchronize

    def fail(stream):
        if not cuda.copies:
            return synchronize(stream)
        cuda.held = True
        raise RuntimeError("the driver is confused")

    monkeypatch.setattr(cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="confused"):
        KVCache(canary_spec(GROUPS), device_blocks=NINE, host_blocks=NINE, **options)
    assert cuda.registered
    assert [arena.has_bytes for arenas in kept for arena in arenas] == [True, True]
    cuda.held = False
    cuda.run()


def test_a_refused_load_leaves_zeros_on_the_device(make_serving, linked):
    options, _ = linked()
    serving = make_serving(GROUPS, 24, 48, verify="full", **options)
    serving.serve("original", prompt(0, 29), 1)
    inside.pools(serving.cache).forget_all()
    inside.blow_up_host(serving.cache)
    told = []

    def look(load, good):
        told.append((good.any(), is_zero(serving.cache, load.groups, load.device).all()))

    inside.at_end_of_loads(serving.cache, look)
    serving.serve("again", prompt(0, 29), 5)
    assert told == [(False, True)]


@pytest.mark.parametrize("thread", range(3))
def test_a_thread_that_cannot_choose_its_device_is_told_when_the_cache_is_made(linked, monkeypatch, thread):
    """One for stores, one for loads, one that measures: no traceback from a thread, no copy that waits for nobody."""
    options, cuda = linked()
    threads, order = set(threading.enumerate()), count()
    bind = cuda.bind_thread

    def fail():
        if next(order) == thread:
            raise CudaError("cudaSetDevice", 700, "lost")
        bind()

    monkeypatch.setattr(cuda, "bind_thread", fail)
    with pytest.raises(KVTierError, match="cudaSetDevice failed with CUDA error 700: lost"):
        KVCache(canary_spec(GROUPS), device_blocks=NINE, host_blocks=NINE, **options)
    assert next(order) == max(2, thread + 1)
    assert (cuda.registered, cuda.streams) == ({}, {})
    assert set(threading.enumerate()) <= threads


def test_a_thread_that_cannot_be_started_leaves_none_behind(monkeypatch):
    """A container's limit of processes: whoever tries again must not lose another thread each time."""
    threads, order, start = set(threading.enumerate()), count(), threading.Thread.start

    def refuse(thread):
        if next(order) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cuda_link.SubmissionThreads()
    assert set(threading.enumerate()) <= threads


def test_a_measurement_that_failed_is_taken_down_in_order(linked, monkeypatch):
    options, cuda = linked()
    monkeypatch.setattr(cuda_link, "Copies", lambda *_: 1 / 0)
    ended: list[str] = []
    for owner, name in (
        (cuda_link.SubmissionThreads, "close"),
        (cuda_link.CudaRuntime, "close"),
        (HostMemory, "release"),
    ):
        real = getattr(owner, name)
        said = f"{owner.__name__}.{name}"
        monkeypatch.setattr(owner, name, lambda *a, real=real, said=said: (ended.append(said), real(*a))[1])
    with pytest.raises(ZeroDivisionError):
        KVCache(canary_spec(GROUPS), device_blocks=NINE, host_blocks=NINE, **options)
    assert ended[:3] == ["SubmissionThreads.close", "CudaRuntime.close", "HostMemory.release"]
    assert cuda.registered == {}
    assert not cuda.streams


def test_the_measurement_comes_after_the_zeros_that_the_compute_stream_still_writes(linked, monkeypatch):
    """torch.zeros is only enqueued when it returns: until then the arena holds what somebody else has left there."""
    options, cuda = linked()
    build = CudaLink.__call__

    def with_zeros_under_way(self, memory):
        storage = memory.arenas[0].storage
        storage.fill_(0xA5)
        cuda.streams[COMPUTE] = Stream(False, deque([lambda: None] * 200 + [storage.zero_]))
        return build(self, memory)

    monkeypatch.setattr(CudaLink, "__call__", with_zeros_under_way)
    with KVCache(canary_spec(GROUPS), device_blocks=NINE, host_blocks=NINE, **options) as cache:
        assert cuda.copies, "nothing was measured"
        cuda.run()
        assert [int(arena.storage.max()) for arena in cache.arenas] == [0, 0]


def test_a_host_tier_that_cannot_be_pinned_leaves_nothing_behind(linked):
    options, cuda = linked(pinnable=100)
    threads = set(threading.enumerate())
    with pytest.raises(MemoryUnavailable, match=r"pinning [\d,]+ bytes of host memory failed .* Try host_blocks="):
        KVCache(canary_spec(GROUPS), device_blocks=NINE, host_blocks=NINE, **options)
    assert cuda.registered == {}
    assert set(threading.enumerate()) <= threads


def test_a_closed_cache_gives_its_pinned_memory_back(linked):
    options, cuda = linked()
    cache = KVCache(canary_spec(GROUPS), device_blocks=NINE, host_blocks=NINE, **options)
    mapping = weakref.ref(inside.mapping(inside.pinned_memory(cache)))
    cache.close()
    assert cuda.registered == {}
    assert mapping() is None, "unpinned, but not given back"


@pytest.mark.parametrize("works", [True, False])
def test_checksums_whose_kernel_cannot_be_compiled_are_taken_by_torch_and_that_is_said(make_serving, linked, works):
    options, cuda = linked()

    def kernel(addresses, block_bytes, device):
        if not works:
            raise RuntimeError("Failed to find C compiler")
        return checksum_blocks(addresses, block_bytes, device)

    inside.use_sums(options["copy_engine"], FakeSums(cuda, kernel))
    blocks = {"full": 14, "win": 12, "chunk": 10}
    serving = make_serving(GROUPS, blocks, dict.fromkeys(GROUPS, 30), verify="full", **options)
    for i in range(6):
        serving.add(f"r{i}", prompt(i, 24), max_new_tokens=1)
    serving.run()
    stats = serving.cache.stats()
    assert stats.transfers.stored_blocks > 0
    assert stats.transfers.failed_stores == 0
    said = "checksums by torch operations, as their kernel does not run: RuntimeError: Failed to find C compiler"
    assert (said in stats.link.notes) is not works


def test_pinning_much_shows_a_bar_and_pinning_little_does_not(monkeypatch, capsys):
    for least, shown in ((1 << 20, True), (1 << 40, False)):
        monkeypatch.setattr(cuda_link, "BAR_BYTES", least)
        cuda = FakeCuda()
        link = CudaLink(api=cuda, sums=FakeSums(cuda), pci_bus_id="none")
        assert len(link.host_memory(3 << 20, "host_bytes", [(0, 4096)])) == 3 << 20
        text = capsys.readouterr().err
        assert ("faulting in" in text) is ("pinning" in text) is shown


def test_without_tqdm_pinning_much_is_a_line_of_the_log(monkeypatch, capsys, caplog):
    monkeypatch.setattr(cuda_link, "BAR_BYTES", 1 << 20)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    cuda = FakeCuda()
    link = CudaLink(api=cuda, sums=FakeSums(cuda), pci_bus_id="none")
    with caplog.at_level("INFO", "kvtier.transfers"):
        assert len(link.host_memory(3 << 20, "host_bytes", [(0, 4096)])) == 3 << 20
    assert [line.split(" ")[0] for line in caplog.messages] == ["faulting", "pinning"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("what", ["__init__", "new_stream", "send"])
def test_an_engine_that_cannot_be_built_leaves_nothing_behind(linked, monkeypatch, what):
    """Its driver does not answer, its streams cannot be made, or its measurement fails."""
    options, cuda = linked()
    threads = set(threading.enumerate())
    monkeypatch.setattr(cuda_module.CudaRuntime, what, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        KVCache(canary_spec(GROUPS), device_blocks=NINE, host_blocks=NINE, **options)
    assert cuda.registered == {}
    assert cuda.streams == {}
    assert set(threading.enumerate()) <= threads


# --- software that does not fit -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch_cuda", "cupy", "driver", "said"),
    [
        ("12.8", 12090, 12080, ""),
        ("12.8", 12090, 13000, ""),
        ("13.0", 13000, 13000, ""),
        (None, 12090, 12080, "without CUDA"),
        ("12.8", 13000, 13000, "kvtier[gpu-cuda12]"),
        ("13.0", 12090, 13000, "kvtier[gpu-cuda13]"),
        ("12.8", 12090, 0, "no NVIDIA driver"),
        ("13.0", 13000, 12080, "made for CUDA 12.8"),
    ],
)
def test_software_that_does_not_fit_is_named_with_the_fix(torch_cuda, cupy, driver, said):
    found = mismatch(torch_cuda, cupy, driver)
    assert (said in found) if said else found == ""


# --- checksums by torch operations ----------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 48, 4096, 100_000])
def test_torch_takes_the_checksums_that_the_cpu_takes(monkeypatch, size):
    """So a tier that was filled on a GPU could be checked on a CPU. Also in several parts, and of any offsets."""
    import torch

    from kvtier.cpu_offload.engines._blocks import checksum_blocks
    from kvtier.cpu_offload.engines.cuda import device_sums

    monkeypatch.setattr(device_sums, "MOST_BYTES", 3 * size)
    storage = np.random.default_rng(size).integers(0, 256, 12 * size, np.uint8)
    offsets = np.array([5, 0, 10, 7, 3], np.int64) * size
    expected = np.empty(5, np.uint64)
    checksum_blocks(storage.view(np.uint64), offsets, np.full(5, size, np.int64), expected)
    found = device_sums.sums_of(torch.from_numpy(storage), offsets, size).numpy().view(np.uint64)
    assert np.array_equal(found, expected)
    storage[10 * size + size // 2] ^= 4
    found = device_sums.sums_of(torch.from_numpy(storage), offsets, size).numpy().view(np.uint64)
    assert np.flatnonzero(found != expected).tolist() == [2]


def test_the_memory_of_an_engine_keeps_its_content_under_the_measurement(linked):
    """And nothing outside of it is read, such as a null block that its fragments do not have."""
    options, cuda = linked()
    memory = np.random.default_rng(0).integers(0, 256, 48 << 20, np.uint8)
    before, first, summed = memory.copy(), memory.ctypes.data, list[int]()

    def kernel_sums(addresses, block_bytes, device):
        summed.extend(addresses.tolist())
        return checksum_blocks(addresses, block_bytes, device)

    link = options["copy_engine"]
    inside.use_sums(link, FakeSums(cuda, kernel_sums))
    group = OutsideGroup("full", FullAttention(), 4, 1024, (Fragment(0, 4096, 4096), Fragment(4 << 20, 4096, 4096)))
    with HostTier([group], memory, "48MiB", copy_engine=link) as tier:
        assert np.array_equal(memory, before)
        text = tier.text(np.arange(16, dtype=np.uint64).reshape(8, 2))
        text.computed([np.arange(8, dtype=np.int32)], 32, is_end=True)
        text.close()
        tier.poll()
        while tier.has_work:
            tier.wait(1.0)
            tier.poll()
        assert tier.stats().transfers.stored_blocks == 8
    assert len(summed) > 8
    assert all(first <= address < first + len(memory) for address in summed)
