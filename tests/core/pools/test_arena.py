"""One allocation a tier: every view lies in its own block, block by block and layer by layer."""

from __future__ import annotations

from pathlib import Path

import inside
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, KVCache, SlidingWindow
from kvtier.geometry.dtypes import DTYPE_BYTES

GROUP = st.builds(
    GroupSpec,
    name=st.just("g"),
    attention=st.sampled_from([FullAttention(), SlidingWindow(5), ChunkedLocal(12)]),
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    block_tokens=st.integers(1, 3),
    head_dim_v=st.one_of(st.none(), st.integers(1, 5)),
)


def named(groups: list[GroupSpec]) -> CacheSpec:
    from dataclasses import replace

    return CacheSpec([replace(g, name=f"g{i}") for i, g in enumerate(groups)])


@settings(max_examples=60)
@given(st.lists(GROUP, min_size=1, max_size=3))
def test_every_element_of_every_view_has_its_own_bytes(groups):
    """Addresses of all elements, over all groups, layers, K and V: inside the arena and never twice."""
    spec = named(groups)
    sizes = {g.name: 2 + i for i, g in enumerate(spec.groups)}
    with KVCache(spec, device_blocks=sizes) as cache:
        base, used = inside.arena(cache).bytes.ctypes.data, []
        for g in spec.groups:
            item = DTYPE_BYTES[g.dtype]
            for layer in range(g.num_layers):
                for x, dim in zip(cache.kv(g.name, layer), g.head_dims, strict=True):
                    assert x.shape == (sizes[g.name] + 1, g.block_tokens, g.num_kv_heads, dim)
                    assert x.dtype == getattr(torch, g.dtype)
                    index = np.indices(x.shape).reshape(4, -1).T
                    used.append((x.data_ptr() - base + index @ np.array(x.stride()) * item)[:, None] + np.arange(item))
        flat = np.concatenate([u.ravel() for u in used])
        assert flat.min() >= 0
        assert flat.max() < cache.stats().device_bytes
        assert len(np.unique(flat)) == len(flat)


@given(GROUP)
@settings(max_examples=40)
def test_a_block_is_contiguous_and_k_and_v_have_equal_strides(group):
    spec = named([group])
    with KVCache(spec, device_blocks={"g0": 3}) as cache:
        base, g = inside.arena(cache).bytes.ctypes.data, spec.groups[0]
        for layer in range(g.num_layers):
            k, v = cache.kv("g0", layer)
            assert k.stride() == v.stride()
            for x in (k, v):
                for block in range(4):
                    start = x[block].data_ptr() - base
                    assert block * g.block_bytes <= start < (block + 1) * g.block_bytes
        assert cache.stats().device_bytes == 4 * g.block_bytes


def test_bytes_allocated_are_the_bytes_asked_for(make_cache):
    spec = CacheSpec([GroupSpec("full", FullAttention(), 4, 2, 64), GroupSpec("win", SlidingWindow(64), 4, 2, 64)])
    cache = make_cache(spec, None, device_bytes="20MiB", host_bytes="50MiB")
    stats = cache.stats()
    assert 0.99 * (20 << 20) <= stats.device_bytes <= 20 << 20
    assert 0.99 * (50 << 20) <= stats.host_bytes <= 50 << 20
    for pools, total in ((stats.device, stats.device_bytes), (stats.host, stats.host_bytes)):
        for pool in pools.values():  # each could have it all
            assert (pool.usable + 1) * pool.block_bytes == total


@pytest.mark.parametrize("tier", ["device", "host"])
def test_memory_of_a_tier_is_not_touched_before_it_is_used(make_cache, tier):
    """A tier of 2 GiB costs address space, not memory, until blocks are written."""

    def resident() -> int:
        with Path("/proc/self/status").open(encoding="ascii") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024

    spec = CacheSpec([GroupSpec("full", FullAttention(), 16, 8, 128)])
    make_cache({"full": (FullAttention(), 4)}, 2)
    before = resident()
    make_cache(
        spec, None, device_bytes="2GiB" if tier == "device" else "16MiB", host_bytes="2GiB" if tier == "host" else 0
    )
    assert resident() - before < 256 << 20


class Allocations(TorchDispatchMode):
    """Sizes in bytes of the storages, other than ``known``, in which operations leave their results."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self._known = known.untyped_storage().data_ptr()
        self.found: list[int] = []
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.copies += func is torch.ops.aten.copy_.default
        results = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        self.found += [s.nbytes() for s in storages if s.data_ptr() != self._known]
        return results


@pytest.mark.parametrize("g", [0, 1])
@pytest.mark.parametrize(
    ("sources", "targets", "copies"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], 1),
        ([1, 2, 4, 3], [6, 7, 8, 9], 3),
        ([3, 4, 5, 6], [1, 2, 8, 9], 2),
        ([7, 8], [4, 3], 2),
        ([9], [1], 1),
        ([], [], 0),
    ],
)
def test_blocks_move_within_the_memory_of_the_tier(make_cache, g: int, sources, targets, copies: int):
    """The whole of them, those of their group only, and without a copy of them anywhere else."""
    arena = inside.arena(make_cache({"full": (FullAttention(), 4), "win": (SlidingWindow(8), 2)}, 9))
    rng = np.random.default_rng(g)
    arena.bytes[:] = rng.integers(0, 256, arena.num_bytes, np.uint8)
    want = arena.bytes.copy()
    size, stride, origin = (int(x[g]) for x in (arena.block_bytes, arena.strides, arena.origins))
    for source, target in zip(sources, targets, strict=True):
        to, begin = origin + target * stride, origin + source * stride
        want[to : to + size] = want[begin : begin + size]
    with Allocations(arena.storage) as allocations:
        arena.move(g, np.array(sources, np.int32), np.array(targets, np.int32))
    assert np.array_equal(arena.bytes, want)
    assert (allocations.found, allocations.copies) == ([], copies)
