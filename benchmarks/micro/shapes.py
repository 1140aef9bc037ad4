"""The shapes that are measured, and caches of them whose pools are as a long-lived server's: full, and aged."""

from __future__ import annotations

import numpy as np

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, KVCache, SlidingWindow
from kvtier.geometry.kinds import Attention
from kvtier.pools.block_pool import BlockPools, Mark

BLOCK_TOKENS = 16


def _spec(**groups: Attention) -> CacheSpec:
    return CacheSpec([GroupSpec(name, kind, 1, 1, 8, block_tokens=BLOCK_TOKENS) for name, kind in groups.items()])


SHAPES = {
    "L": _spec(full=FullAttention()),
    "G": _spec(full=FullAttention(), window=SlidingWindow(1024)),
    "C": _spec(full=FullAttention(), chunk=ChunkedLocal(8192)),
    "X": _spec(full=FullAttention(), **{f"w{w}": SlidingWindow(w) for w in (128, 512, 1024, 2048, 4096)}),
}
"""L: Llama-3.1-8B. G: Gemma-3-27B. C: Llama-4-Scout. X: six distinct groups, the stress case."""


def books(spec: CacheSpec, blocks: int, host_blocks: int = 0, store: str = "eager") -> KVCache:
    """A cache that keeps books and moves no bytes."""
    return KVCache(
        spec,
        device="meta",
        device_blocks=dict.fromkeys(spec.names, blocks),
        host_blocks=dict.fromkeys(spec.names, host_blocks) if host_blocks else None,
        store=store,
        key_secret=b"benchmark",
    )


def shared_books(spec: CacheSpec, blocks: int) -> KVCache:
    """As ``books``, on one arena of so many blocks of every group, whose slabs the groups exchange."""
    num_bytes = blocks * sum(group.block_bytes for group in spec.groups)
    return KVCache(spec, device="meta", device_bytes=num_bytes, key_secret=b"benchmark")


def age(pools: BlockPools, seed: int = 0) -> None:
    """Fills every pool with cached content whose order of eviction is not the order of its ids."""
    rng = np.random.default_rng(seed)
    for g, usable in enumerate(pools.usable.tolist()):
        groups = np.full(usable, g, np.int32)
        blocks = pools.take(groups)
        pools.publish(groups, blocks, rng.integers(1, 2**63, (usable, 2), dtype=np.uint64), Mark.READY)
        pools.release(groups, rng.permutation(blocks))


def prompt(seed: int, num_tokens: int) -> np.ndarray:
    """A prompt like no other."""
    return np.random.default_rng(seed).integers(0, 100_000, num_tokens).astype(np.int32)
