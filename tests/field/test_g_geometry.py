"""Section G of docs/FIELD-BUGS.md: geometry, capacity, host memory. Named after the tracker and its number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import inside
import numpy as np
import pytest
import torch
from breadth import sized
from core.driving import LOAD, STORE, HeldEngine, engine_of, prompt

from kvtier import (
    CacheSpec,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    KVCache,
    MemoryUnavailable,
    Request,
    Scheduler,
    SlidingWindow,
)
from kvtier.cpu_offload.engines.threads import ThreadsEngine

FULL = {"full": (FullAttention(), 4)}
GROUPS = {**FULL, "win": (SlidingWindow(6), 4), "chunk": (ChunkedLocal(8), 4)}

MIXED = CacheSpec(
    [
        GroupSpec("full", FullAttention(), 2, 1, 3, dtype="bfloat16", block_tokens=4),
        GroupSpec("wide", FullAttention(), 1, 2, 8, dtype="float32", block_tokens=8, head_dim_v=3),
        GroupSpec("small", SlidingWindow(6), 3, 1, 5, dtype="float8_e4m3fn", block_tokens=4),
        GroupSpec("chunk", ChunkedLocal(8), 1, 3, 7, dtype="float16", block_tokens=2, head_dim_v=1),
    ]
)
"""Four dtypes, block sizes and paddings; K and V of different width."""


A_HOST_TIER = """
from pathlib import Path
import sys
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache

def resident():
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024

def cache(layers, host_bytes):
    spec = CacheSpec([GroupSpec("full", FullAttention(), layers, 2, 64)])
    return KVCache(spec, device="cpu", device_blocks={"full": 4}, host_bytes=host_bytes)

asked = int(sys.argv[1])
cache(1, 1 << 20).close()
before = resident()
kept = cache(4, asked)
kept.arenas[1].bytes[:] = 1
print(resident() - before)
"""
"""Prints by how many bytes a process grows that makes a host tier and writes it to the last byte. The first cache of
a process pays for what all of them share."""


A_CACHE_THAT_IS_KILLED = """
import time
from kvtier import FullAttention, KVCache
from kvtier.testing import canary_spec

spec = canary_spec({"full": (FullAttention(), 4)})
cache = KVCache(spec, device="cpu", device_blocks={"full": 4}, host_bytes=64 << 20)
cache.arenas[1].bytes[:] = 1
print("ready", flush=True)
time.sleep(600)
"""


# --- a copy stays where it belongs ----------------------------------------------------------------


@pytest.mark.parametrize("store", ["eager", "lazy"])
def test_g1_vllm_42348_a_host_pool_far_smaller_than_the_device_gets_no_id_beyond_it(make_serving, store):
    """39 host rows and device ids up to 511, as in the report."""
    serving = make_serving(FULL, 511, 38, hold=[], store=store, scheduler={"max_batched_tokens": 256})
    for k in range(5):
        serving.add(str(k), prompt(k, 401), 2)
    serving.run()
    for k in range(10, 16):
        inside.pools(serving.cache).forget_all()
        serving.serve(f"short {k}", prompt(k, 101), 2)
        if store == "lazy":
            serving.serve(f"pushes it out {k}", prompt(k + 10, 2001), 2)
        inside.pools(serving.cache).forget_all()
        serving.serve(f"again {k}", prompt(k, 101), 2)
    moved = serving.engine.submitted
    rows = inside.host_arena(serving.cache).rows
    assert max(int(t.device.max()) for t in moved) > 38 + 1
    assert serving.cache.stats().transfers.loaded_blocks > 0
    for t in moved:
        assert np.all((t.host >= 1) & (t.host < rows[t.groups]))
        assert np.all((t.device >= 1) & (t.device < inside.arena(serving.cache).rows[t.groups]))
    stats = serving.cache.stats()
    assert stats.host_bytes == (38 + 1) * stats.host["full"].block_bytes


@pytest.mark.parametrize("budget", [25_000, 123_457, 1 << 20])
def test_g1_vllm_50443_rows_times_their_bytes_are_the_budget_within_a_row(make_cache, budget):
    spec = CacheSpec([GroupSpec("full", FullAttention(), 7, 2, 8), GroupSpec("more", FullAttention(), 3, 1, 24)])
    cache = make_cache(spec, None, device_bytes="1MiB", host_bytes=budget)
    host, stats = cache.arenas[1], cache.stats()
    rows = np.array([pool.usable + 1 for pool in stats.host.values()])
    assert stats.host_bytes == int((host.origins + rows * host.strides).max()) <= budget
    assert budget - max(host.layout.slab_bytes, int(host.block_bytes.max())) < stats.host_bytes


class Blocks:
    """A cache of ``MIXED`` groups with random bytes in every block that a step writes, and what they were by key."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.scheduler = Scheduler(cache, max_batched_tokens=64)
        self.rng = np.random.default_rng(3)

    def tensors(self, g: int, block: int) -> list[np.ndarray]:
        """The bytes of each K and V of a device block."""
        group = self.cache.spec.groups[g]
        pairs = (self.cache.kv(group.name, layer) for layer in range(group.num_layers))
        return [x[block].contiguous().view(torch.uint8).numpy().copy() for pair in pairs for x in pair]

    def fill(self, g: int, block: int) -> None:
        arena = inside.arena(self.cache)
        at, size = int(arena.origins[g] + block * arena.block_bytes[g]), int(arena.block_bytes[g])
        arena.bytes[at : at + size] = self.rng.integers(0, 256, size, np.uint8)

    def serve(self, name: str, seed: int, length: int) -> dict[str, int]:
        self.scheduler.add(Request(name, prompt(seed, length), 1))
        while True:
            step = self.scheduler.schedule()
            for g, group in enumerate(self.cache.spec.groups if step.num_tokens else ()):
                for block in np.unique(step.group(group.name).slot_mapping // group.block_tokens):
                    self.fill(g, int(block))
            for done in self.scheduler.commit(step, [1] * len(step.sample_rows)):
                return done.cached_tokens
            assert self.cache.audit() == []


@pytest.mark.parametrize("length", [33, 65])
def test_g12_vllm_53607_every_copy_lies_in_its_own_group_and_comes_back_to_the_bit(make_cache, length):
    """Groups of different dtype, padding and page size: each tensor of each block, before a store and after a load."""
    cache = make_cache(MIXED, 40, 60, copy_engine=lambda memory: HeldEngine(memory, ()))
    blocks, submitted = Blocks(cache), engine_of(cache).submitted
    blocks.serve("first", 0, length)
    blocks.scheduler.commit(blocks.scheduler.schedule(), [])
    assert submitted
    stored = {
        (int(g), key.tobytes()): blocks.tensors(int(g), int(b))
        for t in submitted
        for g, b, key in zip(t.groups, t.device, t.keys, strict=True)
    }
    inside.pools(cache).forget_all()
    inside.arena(cache).bytes[:] = 0xAA
    del submitted[:]
    cached = blocks.serve("again", 0, length)
    assert cached == {"device": 0, "host": length - 1}
    (load,) = [t for t in submitted if t.direction is LOAD]
    assert set(load.groups.tolist()) >= {0, 1, 2}
    for g, b, key in zip(load.groups, load.device, load.keys, strict=True):
        before = stored[int(g), key.tobytes()]
        for old, new in zip(before, blocks.tensors(int(g), int(b)), strict=True):
            assert np.array_equal(old, new)
    for t in submitted:
        for arena, ids in ((inside.arena(cache), t.device), (inside.host_arena(cache), t.host)):
            at, sizes = inside.spans(arena, t.groups, ids)
            low = arena.origins[t.groups] + arena.block_bytes[t.groups]
            high = arena.origins[t.groups] + arena.rows[t.groups] * arena.block_bytes[t.groups]
            assert np.all((at >= low) & (at + sizes <= high))


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_g11_vllm_7577_a_copy_that_fails_is_reported_and_publishes_nothing(make_serving, direction):
    """The engine with threads, whose copies of one direction raise."""

    def broken(memory):
        copy = memory.copy

        def fail(transfer):
            if transfer.direction is direction:
                raise OSError("the link is gone")
            return copy(transfer)

        memory.copy = fail
        return ThreadsEngine(memory)

    serving = make_serving(GROUPS, 24, 64, copy_engine=broken)
    serving.serve("first", prompt(0, 25), 1)
    inside.pools(serving.cache).forget_all()
    done = serving.serve("again", prompt(0, 25), 4)
    stats = serving.cache.stats()
    assert (done.finish_reason, done.cached_tokens) == ("length", {"device": 0, "host": 0})
    if direction is STORE:
        assert stats.transfers.failed_stores > 0
        assert all(pool.cached == 0 for pool in stats.host.values())
    else:
        assert stats.transfers.failed_loads == 1
        assert stats.transfers.loaded_blocks == 0


# --- capacity -------------------------------------------------------------------------------------


def test_g2_vllm_56871_a_token_in_the_host_tier_costs_what_its_groups_cost_and_no_more(make_serving):
    """Three groups of different size; a row that is as wide as all groups would cost three times as much."""
    spec = CacheSpec([GroupSpec(f"g{n}", FullAttention(), n, 2, 16, block_tokens=16) for n in (1, 3, 8)])
    serving = make_serving(
        spec, None, device="meta", device_bytes="4MiB", host_bytes="16MiB", scheduler={"max_batched_tokens": 512}
    )
    tokens = 4 * 16 * 50
    for k in range(4):
        serving.serve(str(k), prompt(k, tokens // 4), 1)
    stats = serving.cache.stats()
    assert stats.transfers.stored_bytes / tokens == pytest.approx(spec.token_bytes, rel=0.05)
    assert stats.host_capacity_tokens == pytest.approx((16 << 20) / spec.token_bytes, rel=0.05)
    assert stats.host_capacity_tokens > stats.device_capacity_tokens
    inside.pools(serving.cache).forget_all()
    for k in range(4):
        assert serving.serve(f"{k} again", prompt(k, tokens // 4), 1).cached_tokens["host"] == tokens // 4 - 16


def test_g3_vllm_54743_groups_with_blocks_of_64_16_and_4_tokens_start_and_hit(make_serving):
    groups = {"a": (FullAttention(), 16), "b": (SlidingWindow(5), 4), "c": (FullAttention(), 64)}
    serving = make_serving(groups, {"a": 32, "b": 64, "c": 8}, 64, hold=[], scheduler={"max_batched_tokens": 256})
    assert serving.spec.names == tuple(groups)
    assert (serving.spec.hash_tokens, serving.spec.hit_tokens) == (4, 64)
    serving.serve("first", prompt(0, 200), 3)
    assert serving.serve("device", prompt(0, 200), 3).cached_tokens == {"device": 192, "host": 0}
    inside.pools(serving.cache).forget_all()
    assert serving.serve("host", prompt(0, 200), 3).cached_tokens["host"] > 0
    assert sum(serving.finished["host"].cached_tokens.values()) == 192


# --- the machine's memory -------------------------------------------------------------------------


def test_g4_vllm_53042_a_host_tier_takes_the_memory_that_was_asked_for():
    """130 MiB, which an allocator that rounds to powers of two would make 256.

    In a process of its own: what other tests have left is given back at any time.
    """
    asked = 130 << 20
    grown = int(subprocess.run([sys.executable, "-c", A_HOST_TIER, str(asked)], check=True, capture_output=True).stdout)
    assert 0.98 * asked <= grown <= 1.05 * asked


def test_g6_ninfer_45_a_host_tier_of_ten_times_the_memory_is_refused_in_words(make_serving):
    """It names host memory, the bytes and the setting; and the process goes on without a host tier."""
    asked = 10 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(MemoryUnavailable) as refused:
        make_serving(FULL, 8, None, host_bytes=asked)
    text = str(refused.value)
    asked_in_words = int(text.split("asks for ")[1].split(" bytes")[0].replace(",", ""))
    assert 0.99 * asked <= asked_in_words <= asked
    assert "this machine has" in text
    assert text.endswith("lower host_bytes")
    assert make_serving(FULL, 8).serve("without", prompt(0, 9), 2).finish_reason == "length"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps here: run it on Linux")
def test_g7_vllm_51317_no_memory_outlives_the_process(make_serving):
    """Both tiers are private memory: nothing shared, nothing with a name, so that even a killed process leaves none."""

    def shared() -> set[str]:
        lines = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
        return {line for line in lines if line.split()[1].endswith("s") or "/dev/shm" in line}

    before = shared()
    serving = make_serving(GROUPS, 64, None, host_bytes="4MiB")
    serving.serve("A", prompt(0, 25), 2)
    assert shared() - before == set()


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="no /dev/shm here: run it on Linux")
def test_g7_vllm_51317_a_killed_process_leaves_no_memory_and_no_name():
    """SIGKILL amid the life of a host tier of 64 MiB, then a restart: what shared memory had names has them still."""

    def names() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir()}

    before = names()
    for _ in range(sized(1, 2)):
        child = subprocess.Popen([sys.executable, "-c", A_CACHE_THAT_IS_KILLED], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            opened = {str(path.readlink()) for path in Path(f"/proc/{child.pid}/fd").iterdir()}
            mapped = Path(f"/proc/{child.pid}/maps").read_text(encoding="ascii", errors="replace")
            assert not any("/dev/shm" in name for name in (*opened, mapped)), "it would outlive the process"
        finally:
            child.kill()
            child.communicate()
        assert not any(str(child.pid) in name for name in names() - before)


def test_g8_miaai_57_a_host_tier_changes_no_setting_of_the_process(make_serving):
    before = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    serving = make_serving(GROUPS, 24, 64)
    serving.serve("A", prompt(0, 25), 2)
    assert before == (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled())
