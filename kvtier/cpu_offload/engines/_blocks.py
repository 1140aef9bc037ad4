"""Copies and checksums of blocks between two arenas in memory, as compiled loops that release the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier._jit import inlined, jit


@inlined
def copy_block(dst: Any, dst_at: Any, src: Any, src_at: Any, num_bytes: Any) -> None:
    """Copies ``num_bytes`` bytes between uint8 arrays."""
    target, source = np.uint64(dst_at), np.uint64(src_at)
    for i in range(np.uint64(num_bytes)):  # unsigned indices, so that this becomes a plain copy
        dst[target + i] = src[source + i]


@inlined
def checksum(words: Any, at: Any, count: Any) -> Any:
    """A 64-bit checksum of ``count`` words of a uint64 array: any flipped bit changes it.

    Four independent lanes of multiply-and-add over odd constants (the form of xxHash's stripes), then mixed.
    """
    a, b = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
    h0, h1, h2, h3 = a, b, a ^ b, np.uint64(0x165667B19E3779F9)
    whole = count - count % 4
    for i in range(at, at + whole, 4):
        h0 = (h0 ^ words[i]) * a
        h1 = (h1 ^ words[i + 1]) * a
        h2 = (h2 ^ words[i + 2]) * a
        h3 = (h3 ^ words[i + 3]) * a
        h0 ^= h0 >> np.uint64(29)
        h1 ^= h1 >> np.uint64(29)
        h2 ^= h2 >> np.uint64(29)
        h3 ^= h3 >> np.uint64(29)
    for i in range(at + whole, at + count):
        h0 = (h0 ^ words[i]) * b
        h0 ^= h0 >> np.uint64(31)
    h = (((h0 * b) ^ h1) * b ^ h2) * b ^ h3
    h ^= h >> np.uint64(32)
    h *= a
    return h ^ (h >> np.uint64(29))


@jit
def copy_blocks(dst: Any, dst_at: Any, src: Any, src_at: Any, sizes: Any) -> None:
    """Copies len(sizes) blocks; offsets and sizes in bytes, int64."""
    for k in range(len(sizes)):
        copy_block(dst, dst_at[k], src, src_at[k], sizes[k])


@jit
def checksum_blocks(words: Any, at: Any, sizes: Any, out: Any) -> None:
    """Checksums of len(sizes) blocks of a uint64 array; offsets and sizes in bytes, multiples of 8."""
    for k in range(len(sizes)):
        out[k] = checksum(words, at[k] // 8, sizes[k] // 8)
