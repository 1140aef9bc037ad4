"""Copies and checksums of blocks between two arenas in memory, as compiled loops that release the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.machine.loops.jit import inlined, jit


@inlined
def copy_block(dst: Any, dst_at: Any, src: Any, src_at: Any, num_bytes: Any) -> None:
    """Copies ``num_bytes`` bytes between uint8 arrays."""
    target, source = np.uint64(dst_at), np.uint64(src_at)
    for i in range(np.uint64(num_bytes)):  # unsigned indices, so that this becomes a plain copy
        dst[target + i] = src[source + i]


@inlined
def checksum(words: Any, at: Any, count: Any) -> Any:
    """A 64-bit checksum of ``count`` words of a uint64 array, equal to the GPU's (ADR 0014).

    It is the sum of a bijection of each word, keyed by its place: any change of one word changes it for certain. Sums
    have no order, so the compiler vectorizes the loop, and a GPU can take the sum in parts.
    """
    golden, mix, half = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(32)
    total, key, first = np.uint64(0), np.uint64(0), np.uint64(at)
    for i in range(np.uint64(count)):
        key += golden
        x = words[first + i] ^ key
        x = (x ^ (x >> half)) * mix
        x = (x ^ (x >> half)) * mix
        total += x ^ (x >> half)
    return total


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
