"""The threads that share a compiled loop's work, for torch's number of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

_WORTH_A_THREAD = 1 << 16  # elements: some 30 us


def over_rows(compute: Callable[[int, int], bool], rows: int, elements: int) -> None:
    """``compute(begin, end)`` of all ``rows``, in equal shares; few ``elements`` are no work for another thread."""
    threads = 1
    if elements >= 2 * _WORTH_A_THREAD:
        threads = min(torch.get_num_threads(), rows, elements // _WORTH_A_THREAD)
    if threads < 2:
        compute(0, rows)
    else:
        in_shares(compute, [rows * share // threads for share in range(threads + 1)])


def in_shares(compute: Callable[[int, int], bool], bounds: Sequence[int]) -> bool:
    """``compute(begin, end)`` from each bound to the next, at the same time; whether all are true.

    The caller computes the first share. ``compute`` should release the GIL, and must hold the arrays or tensors that it
    works on: if the caller is interrupted, other shares go on.
    """
    if len(bounds) == 2:
        return compute(*bounds)
    workers = _workers(os.getpid())
    others = [workers.submit(compute, *bounds[i : i + 2]) for i in range(1, len(bounds) - 1)]
    return all([compute(*bounds[:2]), *(other.result() for other in others)])


@lru_cache(maxsize=1)
def _workers(_process: int) -> ThreadPoolExecutor:
    """Threads besides the caller's, started as they are needed; a forked process has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kvtier-loops")
