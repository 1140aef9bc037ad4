"""Coalescing: the copies move exactly the blocks' bytes, are as few as can be, and stay inside one registration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvtier.cpu_offload.engines.cuda.descriptors import coalesce

SIZE = 48
DEVICE, HOST = 1 << 45, 1 << 46


def copies(blocks: list[tuple[int, int]], starts: list[int], to_host: bool, size: int = SIZE):
    """blocks: (device id, host id)."""
    device, host = (np.array(blocks, np.uint64).reshape(-1, 2) * np.uint64(size)).T
    device, host = device + np.uint64(DEVICE), host + np.uint64(HOST)
    dst, src = (host, device) if to_host else (device, host)
    first = np.array(sorted(HOST + at for at in starts), np.uint64)
    return coalesce(dst, src, np.full(len(blocks), size, np.uint64), to_host, first)


def bytes_moved(found, to_host: bool) -> dict[int, int]:
    """Device byte -> host byte, each once."""
    moved: dict[int, int] = {}
    for d, s, n in zip(*(a.tolist() for a in found), strict=True):
        for i in range(n):
            device, host = (s + i, d + i) if to_host else (d + i, s + i)
            assert device not in moved, "a byte is copied twice"
            moved[device] = host
    return moved


ids = st.lists(st.integers(0, 11), min_size=1, max_size=10, unique=True)


@given(device=ids, host=ids, starts=st.lists(st.integers(0, 600), max_size=4, unique=True), to_host=st.booleans())
def test_the_copies_move_the_blocks_and_nothing_else(device, host, starts, to_host):
    pairs = list(zip(device, host, strict=False))
    found = copies(pairs, starts, to_host, 5)
    expected = {DEVICE + d * 5 + i: HOST + h * 5 + i for d, h in pairs for i in range(5)}
    assert bytes_moved(found, to_host) == expected
    for at, n in zip((found.dst if to_host else found.src).tolist(), found.sizes.tolist(), strict=True):
        assert n > 0, "a copy of nothing: the driver refuses those"
        assert not any(at < HOST + start < at + n for start in starts), "a copy straddles two registrations"


@pytest.mark.parametrize(
    ("pairs", "count"),
    [
        ([(1, 4), (2, 5), (3, 6)], 1),  # upwards
        ([(3, 6), (2, 5), (1, 4)], 1),  # downwards
        ([(2, 5), (3, 6), (1, 4), (4, 7)], 1),  # both ways round
        ([(1, 4), (2, 6)], 2),  # neighbours on one side only
        ([(1, 4), (3, 5)], 2),
        ([(1, 5), (2, 4)], 2),  # neighbours, but crossed
        ([(1, 1), (2, 2), (7, 7), (8, 8), (4, 4)], 3),
    ],
)
@pytest.mark.parametrize("to_host", [True, False])
def test_neighbours_on_both_sides_are_one_copy(pairs, count, to_host):
    found = copies(pairs, [], to_host)
    assert len(found.dst) == count
    assert found.sizes.sum() == SIZE * len(pairs)


@pytest.mark.parametrize("to_host", [True, False])
def test_a_run_is_cut_where_a_registration_begins(to_host):
    pairs = [(i, i) for i in range(1, 9)]
    found = copies(pairs, [0, 2 * SIZE, 2 * SIZE + 16, 6 * SIZE], to_host)
    assert found.sizes.tolist() == [SIZE, 16, 4 * SIZE - 16, 3 * SIZE]


def test_sizes_may_differ_and_blocks_of_different_groups_may_touch():
    dst = np.array([1000, 1100, 1150], np.uint64)
    found = coalesce(dst, dst + np.uint64(1 << 40), np.array([100, 50, 7], np.uint64), False, np.empty(0, np.uint64))
    assert (found.dst.tolist(), found.sizes.tolist()) == ([1000], [157])


def test_nothing_to_copy():
    none = np.empty(0, np.uint64)
    assert len(coalesce(none, none, none, True, none).dst) == 0
