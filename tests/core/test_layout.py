"""Where blocks lie: no two usable blocks of a group, and no usable block and a null block, share a byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from kvtier.geometry.layout import FEWEST_SLABS, LARGEST_SLAB, MOST_SLABS, Layout

SIZES = st.lists(st.integers(1, 400).map(lambda n: 16 * n), min_size=1, max_size=4)


def span(layout: Layout, g: int, b: int) -> tuple[int, int]:
    at = int(layout.origins[g] + b * layout.strides[g])
    return at, at + int(layout.block_bytes[g])


@given(SIZES, st.integers(1_000, 10_000_000))
def test_a_shared_arena_is_cut_without_a_gap_for_every_group(sizes: list[int], num_bytes: int) -> None:
    layout = Layout.of_slabs(sizes, num_bytes)
    assume(layout is not None)
    assert layout.shared
    assert layout.num_bytes <= num_bytes < layout.num_bytes + layout.slab_bytes
    assert FEWEST_SLABS * len(sizes) <= layout.num_slabs < 2 * MOST_SLABS or layout.slab_bytes == math.lcm(*sizes)
    null_end = max(span(layout, g, 0)[1] for g in range(len(sizes)))
    for g in range(len(sizes)):
        per_slab, last = int(layout.per_slab[g]), int(layout.rows[g]) - 1
        assert per_slab * layout.strides[g] == layout.slab_bytes
        assert span(layout, g, 0)[0] >= 0
        for slab in (0, layout.num_slabs - 1):  # blocks of a slab lie in it, whoever has it
            start = layout.num_bytes - (layout.num_slabs - slab) * layout.slab_bytes
            assert start >= null_end
            assert span(layout, g, 1 + slab * per_slab)[0] == start
            assert span(layout, g, (slab + 1) * per_slab)[1] <= start + layout.slab_bytes
        assert last == per_slab * layout.num_slabs
        assert span(layout, g, last)[1] <= layout.num_bytes


@given(st.lists(st.integers(10_000, 400_000).map(lambda n: 16 * n), min_size=1, max_size=3))
def test_slabs_are_small_and_padding_smaller(sizes: list[int]) -> None:
    """Whatever the sizes, an arena of 50,000 blocks of the size that models have wastes under two percent."""
    num_bytes = 50_000 * max(sizes)
    layout = Layout.of_slabs(sizes, num_bytes)
    assert layout is not None
    padding = float((layout.strides / layout.block_bytes).max() - 1)
    if math.lcm(*sizes) <= LARGEST_SLAB * num_bytes:
        assert padding == 0
    assert padding + len(sizes) * layout.slab_bytes / num_bytes < 0.02


def test_finer_slabs_are_more_and_blocks_still_fit() -> None:
    """As vLLM groups Gemma-3-27B: of 8, 9 and 10 layers, whose least common multiple is 360."""
    unit = 16 * 2 * 16 * 128 * 2
    sizes = [9 * unit] * 4 + [8 * unit] * 2 + [10 * unit]
    coarse, fine = (Layout.of_slabs(sizes, 64 << 30, finer=n) for n in (1, 8))
    assert coarse is not None and fine is not None
    assert 4 * coarse.num_slabs < fine.num_slabs < 16 * MOST_SLABS
    assert (fine.per_slab * fine.strides == fine.slab_bytes).all()
    assert (fine.strides / fine.block_bytes).max() < 1.02


def test_blocks_that_fit_together_are_not_padded() -> None:
    """Gemma-3-27B: 10 full layers and 52 of a window; a slab is a multiple of both."""
    unit = 16 * 2 * 16 * 128 * 2
    layout = Layout.of_slabs([10 * unit, 52 * unit], 80 << 30)
    assert layout is not None
    assert (layout.strides == layout.block_bytes).all()
    assert layout.slab_bytes % (260 * unit) == 0
    assert layout.num_bytes > 0.998 * (80 << 30)


@pytest.mark.parametrize(("groups", "most_wasted"), [(2, 0.005), (3, 0.02), (4, 0.06), (6, 0.08)])
def test_an_arena_of_80_gib_is_shared_whatever_its_groups(groups: int, most_wasted: float) -> None:
    """Blocks of 16 tokens, usual heads and head sizes, any number of layers."""
    rng = np.random.default_rng(groups)
    for _ in range(25):
        heads, dims = rng.choice([1, 2, 4, 8, 16], groups), rng.choice([64, 128, 192, 256], groups)
        layers = rng.integers(1, 63, groups)
        sizes = (64 * heads * dims * layers).tolist()
        layout = Layout.of_slabs(sizes, 80 << 30)
        assert layout is not None, sizes
        assert np.all(layout.strides >= layout.block_bytes)
        assert np.all(layout.strides * layout.per_slab == layout.slab_bytes)
        padding = 1 - (layout.per_slab * layout.block_bytes / layout.slab_bytes).min()
        assert padding + groups / 2 / layout.num_slabs <= most_wasted, sizes


def test_an_arena_of_a_few_slabs_is_not_shared() -> None:
    assert Layout.of_slabs([48, 32], 48 + 2 * FEWEST_SLABS * 96 - 1) is None
    assert Layout.of_slabs([48, 32], 48 + 2 * FEWEST_SLABS * 96) is not None


@given(SIZES, st.lists(st.integers(1, 50), min_size=4, max_size=4))
def test_pools_of_their_own_lie_side_by_side(sizes: list[int], blocks: list[int]) -> None:
    layout = Layout.fixed(sizes, blocks[: len(sizes)])
    assert not layout.shared
    spans = [span(layout, g, b) for g in range(len(sizes)) for b in range(int(layout.rows[g]))]
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == layout.num_bytes


@pytest.mark.parametrize("layout", [Layout.of_slabs([48, 32], 5000), Layout.fixed([48, 32], [7, 9])])
def test_blocks_share_cells_exactly_where_they_share_bytes(layout: Layout) -> None:
    ids = [(g, b) for g in range(2) for b in range(int(layout.rows[g]))]
    groups, blocks = np.array(ids, np.int32).T
    cells, of = layout.cells(groups, blocks)
    mine = {i: set(cells[of == i].tolist()) for i in range(len(ids))}
    for i in range(0, len(ids), 7):
        for j in range(len(ids)):
            a, b = span(layout, *ids[i]), span(layout, *ids[j])
            assert bool(mine[i] & mine[j]) == (a[0] < b[1] and b[0] < a[1])


@pytest.mark.parametrize(
    "layout", [Layout.of_slabs([48, 32], 5000, [False, True]), Layout.fixed([48, 32], [7, 9], [False, True])]
)
def test_a_spare_block_lies_inside_the_arena_and_on_no_other(layout: Layout) -> None:
    assert layout.spare.tolist() == [False, True]
    begin, end = span(layout, 1, int(layout.rows[1]))
    assert end <= layout.num_bytes <= 5000
    for g in range(2):
        for b in range(int(layout.rows[g])):
            low, high = span(layout, g, b)
            assert high <= begin or low >= end
