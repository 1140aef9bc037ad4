"""The copy engine on a real GPU: every byte of every dtype and group kind, every way across the link, every failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import inside
import numpy as np
import pytest
import torch

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvtier.cpu_offload.engines.cuda.device_sums import TorchSums, sums_of
from kvtier.cpu_offload.engines.cuda.link import CudaLink
from kvtier.cpu_offload.engines.cuda.runtime import CudaRuntime
from kvtier.cpu_offload.engines.streams import StreamsEngine
from kvtier.cpu_offload.tier_memory import TierMemory
from kvtier.cpu_offload.transfer import Direction, Transfer
from kvtier.geometry.dtypes import DTYPE_BYTES
from kvtier.geometry.layout import Layout
from kvtier.pools.arena import Arena

STORE, LOAD = Direction.STORE, Direction.LOAD
KINDS = {"full": FullAttention(), "window": SlidingWindow(32), "chunk": ChunkedLocal(64)}


def spec_of(dtype: str, heads: int = 2, dim: int = 64) -> CacheSpec:
    """Three kinds; one group has heads of two sizes, one has blocks that are padded to 16 bytes."""
    shapes = ((16, dim, None), (16, dim, dim // 2), (4, 3, None))
    return CacheSpec(
        [
            GroupSpec(name, kind, 1 + k, heads, d, dtype=dtype, block_tokens=tokens, head_dim_v=dv)
            for k, ((name, kind), (tokens, d, dv)) in enumerate(zip(KINDS.items(), shapes, strict=True))
        ]
    )


class Rig:
    """Two tiers, random bytes on the device, and the engine as a cache builds it."""

    def __init__(self, spec: CacheSpec, device=(400, 300, 200), host=(500, 350, 250), verify: bool = False) -> None:
        sizes = [g.block_bytes for g in spec.groups]
        self.device = Arena(spec, Layout.fixed(sizes, device), "cuda:0")
        self.host = Arena(spec, Layout.fixed(sizes, host), "cpu")
        self.device.allocate("device_blocks")
        link = CudaLink(0)
        self.host.use(link.host_memory(self.host.num_bytes, "host_blocks", self.host.layout.seams))
        self.memory = TierMemory(self.device, self.host, verify)
        self.engine: StreamsEngine = link(self.memory)
        self.runtime: CudaRuntime = self.engine.runtime  # type: ignore[assignment]
        torch.manual_seed(0)
        self.device.storage.random_(0, 256)
        torch.cuda.synchronize()
        self.tickets = 0

    def transfer(self, direction: Direction, pairs: np.ndarray) -> Transfer:
        self.tickets += 1
        groups, device, host = np.ascontiguousarray(pairs.astype(np.int32).T)
        return Transfer(self.tickets, direction, groups, device, host, np.zeros((len(pairs), 2), np.uint64), 0, 0)

    def move(self, direction: Direction, pairs: np.ndarray) -> list[str]:
        self.engine.submit(self.transfer(direction, pairs))
        return [o.error for o in self.drain(1)]

    def drain(self, n: int) -> list:
        out, end = [], time.monotonic() + 60.0
        while len(out) < n:
            assert time.monotonic() < end, "no end"
            self.engine.wait(0.05)
            out += self.engine.poll()
        return out

    def pairs(self, share: float = 0.8, scattered: bool = True) -> np.ndarray:
        """[(group, device block, host block)]"""
        rng, found = np.random.default_rng(1), []
        for g, (d, h) in enumerate(zip(self.device.rows - 1, self.host.rows - 1, strict=True)):
            n = int(share * min(d, h))
            ids = [rng.permutation(rows)[:n] if scattered else np.arange(n) for rows in (d, h)]
            found += [np.stack([np.full(n, g), ids[0] + 1, ids[1] + 1], axis=1)]
        return np.concatenate(found)

    def blocks(self, arena: Arena, pairs: np.ndarray, column: int) -> list[bytes]:
        whole = arena.storage.cpu().numpy()
        at = arena.origins[pairs[:, 0]] + pairs[:, column] * arena.block_bytes[pairs[:, 0]]
        sizes = arena.block_bytes[pairs[:, 0]]
        return [whole[a : a + n].tobytes() for a, n in zip(at.tolist(), sizes.tolist(), strict=True)]

    def round_trip(self, pairs: np.ndarray) -> None:
        """Out and back byte for byte, and nothing else touched."""
        before = self.blocks(self.device, pairs, 1)
        assert self.move(STORE, pairs) == [""]
        assert self.blocks(self.host, pairs, 2) == before
        self.device.storage.fill_(0xA5)
        torch.cuda.synchronize()
        assert self.move(LOAD, pairs) == [""]
        assert self.blocks(self.device, pairs, 1) == before
        mine = np.zeros(self.device.num_bytes, bool)
        for g, d, _ in pairs.tolist():
            at, n = int(self.device.origins[g] + d * self.device.block_bytes[g]), int(self.device.block_bytes[g])
            mine[at : at + n] = True
        assert (self.device.storage.cpu().numpy()[~mine] == 0xA5).all(), "a byte outside the blocks was written"


@pytest.fixture
def make_rig() -> Iterator:
    made: list[Rig] = []

    def make(spec: CacheSpec, **options) -> Rig:
        made.append(Rig(spec, **options))
        return made[-1]

    yield make
    for rig in made:
        assert rig.engine.close(30.0)
    made.clear()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_and_group_kind_makes_the_round_trip_byte_for_byte(make_rig, dtype, scattered):
    rig = make_rig(spec_of(dtype))
    rig.round_trip(rig.pairs(scattered=scattered))


@pytest.mark.parametrize("heads", [1, 16])
def test_blocks_of_2_to_100_kib(make_rig, heads):
    rig = make_rig(spec_of("bfloat16", heads=heads))
    rig.round_trip(rig.pairs())


def test_processes_that_share_a_gpu_keep_their_bytes():
    """The driver's batched copy lost some in one of 40 round trips where three processes made them at once (ADR 41)."""
    code = "from gpu.test_copies import round_trips; round_trips(60)"
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    running = [subprocess.Popen([sys.executable, "-c", code], env=here) for _ in range(3)]
    assert [process.wait(120.0) for process in running] == [0, 0, 0]


def round_trips(count: int) -> None:
    """In a process of its own."""
    rig = Rig(spec_of("float16"))
    for _ in range(count):
        rig.round_trip(rig.pairs())
    assert rig.engine.close(30.0)


def test_the_link_was_measured(make_rig):
    rig = make_rig(spec_of("bfloat16"), device=(4000, 300, 200), host=(4000, 300, 200))
    stats = rig.engine.link_stats()
    assert stats.load_gbps > 0.5
    assert stats.store_gbps > 0.5
    assert stats.pinned_bytes == rig.host.num_bytes


def test_checksums_on_the_device_are_the_cpus_and_find_a_changed_bit(make_rig):
    from kvtier.cpu_offload.engines._blocks import checksum_blocks

    rig = make_rig(spec_of("bfloat16"), verify=True)
    pairs = rig.pairs()
    assert rig.move(STORE, pairs) == [""]
    sizes = rig.device.block_bytes[pairs[:, 0]]
    at = rig.device.origins[pairs[:, 0]] + pairs[:, 1] * sizes
    expected = np.empty(len(pairs), np.uint64)
    checksum_blocks(rig.device.storage.cpu().numpy().view(np.uint64), at, sizes, expected)
    found = inside.stored_sums(rig.memory, pairs[:, 0], pairs[:, 2])
    assert np.array_equal(found, expected)
    assert rig.move(LOAD, pairs) == [""]
    k = 7
    g, _, h = pairs[k].tolist()
    rig.host.bytes[int(rig.host.origins[g] + h * rig.host.block_bytes[g]) + 5] ^= 1
    rig.engine.submit(rig.transfer(LOAD, pairs))
    [outcome] = rig.drain(1)
    assert outcome.corrupt
    assert outcome.bad.tolist() == [k]


def test_torch_and_the_kernel_take_the_same_checksums(make_rig):
    rig = make_rig(spec_of("float16"), verify=True)
    size = int(rig.device.block_bytes[0])
    offsets = np.arange(1, 50, dtype=np.int64) * size
    by_torch = sums_of(rig.device.storage, offsets, size).cpu().numpy().view(np.uint64)
    pairs = np.stack([np.zeros(49, np.int64), np.arange(1, 50), np.arange(1, 50)], axis=1)
    sums = inside.sums(rig.runtime)
    assert isinstance(sums, TorchSums)
    stream = inside.streams(rig.engine)[STORE]
    t = rig.transfer(STORE, pairs)
    ready = sums.begin(stream, rig.memory, t.groups, rig.memory.addresses(t)[0])
    inside.api(rig.runtime).synchronize(stream)
    assert np.array_equal(ready(), by_torch)


def test_a_load_ends_while_a_long_store_is_under_way(make_rig):
    """Of a hundred stores and one load, the load is not last."""
    rig = make_rig(spec_of("bfloat16"), device=(4000, 300, 200), host=(4000, 300, 200))
    pairs = rig.pairs(1.0, scattered=False)
    for _ in range(20):
        rig.engine.submit(rig.transfer(STORE, pairs))
    rig.engine.submit(rig.transfer(LOAD, pairs[:1]))
    ended = [o.ticket for o in rig.drain(21)]
    assert ended.index(21) < 20
