"""Pinned memory and refusals with a real driver."""

from __future__ import annotations

import inside
import pytest
import torch

from kvtier import ConfigError, DeviceUnavailable, FullAttention, KVCache, MemoryUnavailable
from kvtier.cpu_offload.engines.cuda.host_memory import HostMemory, Registration
from kvtier.cpu_offload.engines.cuda.link import CudaLink
from kvtier.testing import canary_spec

SPEC = canary_spec({"full": (FullAttention(), 16)}, num_layers=64)


def test_memory_is_pinned_in_pieces_and_unpinned():
    torch.cuda.init()  # before that, torch takes no memory for pinned
    api = inside.api(CudaLink(0))
    for _ in range(2):  # a second time: nothing was left registered
        memory = HostMemory(
            (48 << 20) + 123, Registration(api.host_register, api.host_unregister), piece_bytes=16 << 20
        )
        tensor = torch.from_numpy(memory.array)
        assert len(memory.starts) == 4
        assert tensor.is_pinned()
        memory.release()
        assert not tensor.is_pinned()


def test_pinning_is_exact():
    """128 GiB would be taken for 65 by an allocator that rounds up; here the process grows by what was asked for."""
    from pathlib import Path

    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    api, size = inside.api(CudaLink(0)), 600 << 20
    api.bind_thread()  # the context takes memory of its own
    before = rss()
    memory = HostMemory(size, Registration(api.host_register, api.host_unregister))
    assert abs(rss() - before - size) < 64 << 20  # the kernel counts pages by the processor, and adds up some time
    memory.release()


def test_a_device_that_is_not_there():
    with pytest.raises(DeviceUnavailable, match="is not there"):
        KVCache(SPEC, device=f"cuda:{torch.cuda.device_count() + 6}", device_bytes="1GiB")


def test_more_memory_than_the_gpu_has_free_is_refused_and_nothing_is_taken():
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(MemoryUnavailable, match=r"device_bytes asks for .* of .* bytes free"):
        KVCache(SPEC, device="cuda:0", device_bytes=total + (1 << 30))
    assert abs(torch.cuda.mem_get_info()[0] - free) < 64 << 20


def test_memory_that_somebody_else_holds_is_named():
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free // 2, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(MemoryUnavailable, match="in this process"):
        KVCache(SPEC, device="cuda:0", device_bytes=int(free * 0.8))
    del taken
    torch.cuda.empty_cache()


def test_a_closed_cache_has_given_everything_back():
    KVCache(SPEC, device="cuda:0", device_bytes="64MiB", host_bytes="64MiB").close()  # kernels are loaded once
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    cache = KVCache(SPEC, device="cuda:0", device_bytes="512MiB", host_bytes="256MiB")
    assert cache.stats().link.pinned_bytes == cache.stats().host_bytes
    host = cache.arenas[1].storage
    assert host.is_pinned()
    cache.close()
    assert not host.is_pinned()
    torch.cuda.empty_cache()
    assert abs(torch.cuda.mem_get_info()[0] - free) < 64 << 20


@pytest.mark.parametrize("engine", ["threads", "simulated"])
def test_engines_for_cpus_are_refused(engine):
    with pytest.raises(ConfigError, match="copy_engine must be one of 'cuda'"):
        KVCache(SPEC, device="cuda:0", device_bytes="64MiB", host_bytes="64MiB", copy_engine=engine)
