"""Specs: what is refused, with a message that names it, and the bounds on blocks against the masks."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st

from core.driving import sees, visible_blocks
from kvtier import CacheSpec, ChunkedLocal, ConfigError, FullAttention, GroupSpec, Part, RecurrentState, SlidingWindow
from kvtier.coordinator.needs import peak_blocks
from kvtier.geometry.kinds import ALIGN_BYTES, Attention, Kind
from kvtier.gpu_pool.row_state import first_position, geometry_of

FULL = FullAttention()


def group(attention=FULL, bt=16, name="full", **fields):
    options = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, **fields}
    return GroupSpec(name, attention, block_tokens=bt, **options)


ATTENTION = st.one_of(
    st.just(FullAttention()),
    st.integers(1, 40).map(SlidingWindow),
    st.integers(1, 8).map(lambda n: ChunkedLocal(4 * n)),
)
GROUP = st.builds(group, ATTENTION, st.sampled_from([1, 2, 4]))


@pytest.mark.parametrize("bad", [0, -1, 1.5, "4", None, True])
def test_a_number_that_is_not_a_positive_int_is_refused_by_name(bad):
    for make in (SlidingWindow, ChunkedLocal):
        with pytest.raises(ConfigError, match="tokens"):
            make(bad)
    for field in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
        with pytest.raises(ConfigError, match=field):
            GroupSpec("g", FullAttention(), **{"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, field: bad})
    with pytest.raises(ConfigError, match="entry_tokens"):
        group(entry_tokens=bad)
    if bad not in (None, 0):  # K alone
        with pytest.raises(ConfigError, match="head_dim_v"):
            group(head_dim_v=bad)


@pytest.mark.parametrize("bad", ["int8", "bf17", None, 7, "torch.complex64"])
def test_an_unknown_dtype_is_refused_with_those_that_are_known(bad):
    with pytest.raises(ConfigError, match="bfloat16"):
        group(dtype=bad)


def test_a_torch_dtype_is_taken_by_name():
    import torch

    assert group(dtype=torch.float16).dtype == "float16"


def test_a_chunk_that_is_no_multiple_of_its_block_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"'c'.*24.*16"):
        group(ChunkedLocal(24), 16, name="c")


@pytest.mark.parametrize("attention", [None, "full", SlidingWindow, 4096])
def test_an_attention_of_another_kind_is_refused(attention):
    with pytest.raises(ConfigError, match="attention"):
        group(attention)


def test_a_spec_without_groups_or_with_equal_names_is_refused():
    with pytest.raises(ConfigError):
        CacheSpec([])
    with pytest.raises(ConfigError, match="unique"):
        CacheSpec([group(), group()])
    with pytest.raises(ConfigError, match="GroupSpec"):
        CacheSpec(["full"])
    with pytest.raises(ConfigError):
        group(name="")


def test_more_layers_than_any_model_has_are_refused():
    """A spec of 2**30 made a list of as many places."""
    with pytest.raises(ConfigError, match=r"'full': num_layers is 1,073,741,824; no model has more than 10,000"):
        group(num_layers=2**30)
    with pytest.raises(ConfigError, match=r"'full': num_kv_heads is 65,537; no model has more than 65,536"):
        group(num_kv_heads=2**16 + 1)  # one scale for each would fill the memory
    assert group(num_kv_heads=2**16).num_kv_heads == 2**16


@pytest.mark.parametrize("sizes", [(2**31 - 1, 2), (3, 2**31 - 1, 2**31 - 3), tuple(2**20 - n for n in (1, 3, 5, 9))])
def test_blocks_that_hardly_ever_end_together_are_refused_with_their_sizes(sizes):
    """Above 2**57 tokens a cache of them ended in an OverflowError."""
    with pytest.raises(ConfigError, match=rf"g0: {sizes[0]:,}, g1: {sizes[1]:,}.*take sizes that divide each other"):
        CacheSpec([group(bt=n, name=f"g{i}") for i, n in enumerate(sizes)])


def test_a_layer_that_maps_nowhere_is_refused():
    for layers in ([("full", 2)], [("full", -1)], [("other", 0)]):
        with pytest.raises(ConfigError, match="model layer 0"):
            CacheSpec([group()], layers=layers)


def test_layers_are_numbered_through_the_groups_unless_given():
    spec = CacheSpec([group(), group(name="win", attention=SlidingWindow(4), num_layers=1)])
    assert [spec.layer(i) for i in range(3)] == [("full", 0), ("full", 1), ("win", 0)]
    shared = CacheSpec([group()], layers=[("full", 0), ("full", 1), ("full", 0)])
    assert shared.layer(2) == ("full", 0)


def test_an_unknown_group_is_answered_with_those_there_are():
    spec = CacheSpec([group()])
    with pytest.raises(ConfigError, match="full"):
        spec.group("window")
    assert spec.group("full") is spec.groups[0]


def test_units_are_the_gcd_and_the_lcm_of_the_blocks():
    spec = CacheSpec([group(bt=6), group(SlidingWindow(9), 4, name="win")])
    assert (spec.hash_tokens, spec.hit_tokens) == (2, 12)


@given(GROUP, st.integers(0, 80))
def test_first_visible_is_the_first_token_that_the_mask_shows(g, position):
    visible = [j for j in range(position + 1) if sees(g, position, j)]
    assert g.attention.first_visible(position) == visible[0]
    assert visible == list(range(visible[0], position + 1))


@given(GROUP, st.integers(0, 60), st.integers(1, 30))
def test_blocks_needed_are_those_that_the_mask_touches(g, start, count):
    assert g.blocks_needed(start, start + count) == len(visible_blocks(g, start, start + count))


@given(GROUP, st.integers(1, 90))
def test_peak_blocks_bound_every_run_of_one_token_a_step_and_are_reached(g, n):
    held = [len(visible_blocks(g, p, p + 1)) for p in range(n)]
    assert max(held) <= g.peak_blocks(n)
    longer = [len(visible_blocks(g, p, p + 1)) for p in range(n + g.block_tokens)]
    assert max(longer) >= g.peak_blocks(n), "the bound is tight, but for where the run begins"


def test_the_compiled_loops_follow_the_rule_of_every_attention_kind():
    made = {RecurrentState: lambda: RecurrentState((Part("conv0", (3,), "float32"),)), FullAttention: FullAttention}
    kinds = [made[kind]() if kind in made else kind(8) for kind in get_args(Attention)]
    assert [attention.kind for attention in kinds] == list(Kind), "each member of Kind has its class in Attention"
    for g in (
        GroupSpec("state", attention, 1, block_tokens=bt) if attention.kind is Kind.STATE else group(attention, bt)
        for attention in kinds
        for bt in (1, 4, 8)
    ):
        geometry = geometry_of([g], g.block_tokens)
        for n in range(40):
            assert first_position(geometry, 0, n) == g.attention.first_visible(n), (g, n)
            assert peak_blocks(geometry, 0, n) == g.peak_blocks(n), (g, n)


def test_an_unaligned_window_spans_one_block_more_than_its_size_says():
    assert (
        group(SlidingWindow(4096), 32).peak_blocks(98_012)
        == 129
        == group(SlidingWindow(4096), 32).blocks_needed(98_011, 98_012) + 0
    )


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    st.integers(1, 9),
)
def test_block_bytes_hold_the_tokens_and_are_aligned(layers, heads, dim, dtype, bt):
    g = group(bt=bt, num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=dtype, head_dim_v=dim + 3)
    item = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}[dtype]
    assert g.token_bytes == layers * heads * (2 * dim + 3) * item
    assert 0 <= g.block_bytes - g.token_bytes * bt < ALIGN_BYTES
    assert g.block_bytes % ALIGN_BYTES == 0


def test_a_spec_can_be_compared_and_hashed():
    a, b = CacheSpec([group()]), CacheSpec([group()])
    assert a == b
    assert hash(a) == hash(b)
    assert a != CacheSpec([group(bt=8)])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (5, "layers must be a list of .group name, index in it., got 5"),
        ([([], 0)], "maps to layer 0 of group \\[\\], which is not there"),
        ([("full", "0")], "maps to layer '0' of group 'full', which is not there"),
        ([("full", None)], "maps to layer None of group 'full'"),
        ([("full", 0.5)], "maps to layer 0.5 of group 'full'"),
    ],
)
def test_layers_of_another_type(layers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheSpec([GroupSpec("full", FullAttention(), 1, 1, 4)], layers=layers)
