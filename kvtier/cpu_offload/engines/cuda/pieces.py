"""Parts of a transfer that a stream is given one after the other.

Promises   the pieces are all blocks, each once, in their order.
Does not   decide which transfers are cut: ``CudaRuntime`` does.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvtier.cpu_offload.engines.cuda.descriptors import Addresses

PIECE_BYTES, MOST_PIECES = 64 << 20, 8
"""Pieces of a verified load: smaller pieces are not worth a driver call."""

PACED_BYTES = 128 << 20
"""Pieces of a paced transfer. On an H200, a small copy then waited 0.5 ms (median) instead of 17. Loads ran at 51.5
GB/s instead of 49.8. With pieces of 32 MiB these were 0.2 ms and 45.8 GB/s."""


def pieces(sizes: Addresses, num_bytes: int, most: int) -> list[slice]:
    """Blocks of these sizes, uint64 [n], in at most ``most`` pieces of some ``num_bytes`` bytes."""
    count = max(1, min(most, len(sizes), int(sizes.sum()) // num_bytes))
    cuts = np.linspace(0, len(sizes), count + 1).astype(int).tolist()
    return [slice(first, end) for first, end in pairwise(cuts)]
