"""Scales of 8-bit K and V: what they may be, and how they come to their layers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvtier import CacheSpec, ConfigError, FullAttention, GroupSpec, KVCache, KVScales, SlidingWindow

FULL = GroupSpec("full", FullAttention(), 2, 2, 8, "fp8", 4)
WINDOW = GroupSpec("win", SlidingWindow(6), 1, 3, 8, "fp8", 4)
SHARED = CacheSpec([FULL, WINDOW], layers=[("full", 0), ("win", 0), ("full", 1), ("full", 0)])
"""The last layer reads the first one's KV."""
GOOD = {0: {"k": [0.5, 2.0], "v": 3.0}, 1: {"k": 1.0, "v": [1.0, 1.0, 0.25]}, 2: {"k": 1, "v": 1}}


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"])
def test_names_of_e4m3(name: str) -> None:
    assert GroupSpec("full", FullAttention(), 1, 1, 8, name).dtype == "float8_e4m3fn"


@pytest.mark.parametrize("name", ["fp4", "float8", "float8_e4m3fnuz", "int8", "", None])
def test_dtypes_that_are_not_stored_are_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="unknown dtype"):
        GroupSpec("full", FullAttention(), 1, 1, 8, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (24, 16)])
def test_8_bits_take_exactly_half_of_16(heads: int, dims: tuple[int, int]) -> None:
    def of(dtype: str) -> GroupSpec:
        return GroupSpec("full", FullAttention(), 3, heads, dims[0], dtype, 16, dims[1])

    assert 2 * of("fp8").block_bytes == of("bfloat16").block_bytes
    assert 2 * of("fp8").token_bytes == of("bfloat16").token_bytes


def test_both_tiers_take_half_the_bytes_and_views_are_e4m3() -> None:
    import torch

    taken = []
    for dtype in ("fp8", "bfloat16"):
        spec = CacheSpec([GroupSpec("full", FullAttention(), 2, 2, 16, dtype, 4)])
        with KVCache(spec, device_blocks={"full": 9}, host_blocks={"full": 20}) as cache:
            stats = cache.stats()
            taken.append((stats.device_bytes, stats.host_bytes))
            assert {x.dtype for x in cache.kv("full", 1)} == {getattr(torch, spec.groups[0].dtype)}
    assert taken[1] == (2 * taken[0][0], 2 * taken[0][1])
    assert taken[0] == (10 * 2 * 2 * 2 * 16 * 4, 21 * 2 * 2 * 2 * 16 * 4)


def test_scales_go_to_the_layers_that_they_name() -> None:
    full, win = SHARED.with_kv_scales(GOOD).groups
    assert full.kv_scales == KVScales(((0.5, 2.0), (1.0, 1.0)), ((3.0, 3.0), (1.0, 1.0)))
    assert win.kv_scales is not None
    assert win.kv_scales.layer(0) == ((1.0, 1.0, 1.0), (1.0, 1.0, 0.25))
    assert SHARED.with_kv_scales(GOOD).layers == SHARED.layers


def test_scales_are_what_float32_holds() -> None:
    scales = KVScales(((0.1,),), ((np.float32(0.1),),))
    assert scales.k == scales.v == ((float(np.float32(0.1)),),)


@pytest.mark.parametrize("array", [np.float32(2), np.array(2.0), np.array([2.0]), np.array([2.0, 2.0]), (2, 2)])
def test_scales_may_come_as_arrays(array: object) -> None:
    full = SHARED.with_kv_scales({**GOOD, 0: {"k": array, "v": 1.0}}).groups[0]
    assert full.kv_scales is not None
    assert full.kv_scales.layer(0) == ((2.0, 2.0), (1.0, 1.0))


def test_scales_of_one_are_none() -> None:
    spec = SHARED.with_kv_scales({i: {"k": 1, "v": 1.0} for i in range(3)})
    assert [g.kv_scales for g in spec.groups] == [None, None]
    assert spec == SHARED


def test_equal_scales_are_equal_and_others_are_not() -> None:
    one, same, other = (KVScales(((x, 1.0),), ((1.0, 1.0),)) for x in (2.0, 2.0, 3.0))
    assert one == same and hash(one) == hash(same) and one != other
    assert KVScales(((1.0, 2.0),), ((1.0, 1.0),)) != KVScales(((1.0,), (2.0,)), ((1.0,), (1.0,)))
    assert other.digest in repr(other)


BAD = [0.0, -1.0, math.nan, math.inf, 1e39, 1e-45, "1", None, True, [[1.0, 2.0]], 2**2000]


@pytest.mark.parametrize("scale", BAD)
@pytest.mark.parametrize("which", ["k", "v"])
def test_scales_that_are_no_positive_numbers_are_refused(which: str, scale: object) -> None:
    for value in (scale, [1.0, scale]):
        with pytest.raises(ConfigError, match=f"kv_scales of layer 0: {which}_scale"):
            SHARED.with_kv_scales({**GOOD, 0: {"k": 1.0, "v": 1.0, which: value}})


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ([1.0], "maps model layers"),
        ({}, r"model layers \[0, 1, 2, 3\]"),
        ({0: GOOD[0]}, r"model layers \[1, 2\]"),
        ({**GOOD, 4: GOOD[0]}, r"layers 0\.\.3"),
        ({**GOOD, -1: GOOD[0]}, r"layers 0\.\.3"),
        ({**GOOD, "0": GOOD[0]}, r"layers 0\.\.3"),
        ({0: GOOD[0], True: GOOD[1], 2: GOOD[2]}, r"layers 0\.\.3"),
        ({**GOOD, 0: 1.0}, "must be"),
        ({**GOOD, 0: {"k": 1.0}}, "must be"),
        ({**GOOD, 0: {"k": 1.0, "v": 1.0, "q": 1.0}}, "must be"),
        ({**GOOD, 0: {"k": [1.0, 1.0, 1.0], "v": 1.0}}, "3 scales, but the layer has 2 KV heads"),
        ({**GOOD, 0: {"k": [], "v": 1.0}}, "0 scales, but the layer has 2 KV heads"),
        ({**GOOD, 3: {"k": 7.0, "v": 3.0}}, "differ from those of the layer whose KV it reads"),
    ],
)
def test_scales_of_a_wrong_shape_are_refused(scales: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SHARED.with_kv_scales(scales)  # type: ignore[arg-type]


def test_a_reading_layer_may_repeat_the_scales_that_it_reads() -> None:
    assert SHARED.with_kv_scales({**GOOD, 3: GOOD[0]}) == SHARED.with_kv_scales(GOOD)


def test_layers_of_a_group_whose_places_are_nobody_s_k_and_v_are_named() -> None:
    full = GroupSpec("full", FullAttention(), 3, 1, 8, "fp8", 4)
    spec = CacheSpec([full], layers=[{"kv": ("full", 0), "index": ("full", 2)}])
    with pytest.raises(ConfigError, match=r"layers \[1, 2\] of group 'full' are of no model layer's K and V"):
        spec.with_kv_scales({0: {"k": 2.0, "v": 2.0}})


def test_scales_are_for_8_bits_and_for_all_of_a_group() -> None:
    two = KVScales(((2.0, 2.0),) * 2, ((1.0, 1.0),) * 2)
    assert GroupSpec("full", FullAttention(), 2, 2, 8, "fp8", 4, None, two).kv_scales == two
    for options in ({"dtype": "bfloat16"}, {"num_layers": 3}, {"num_kv_heads": 1}, {"kv_scales": 2.0}):
        given = {"num_layers": 2, "num_kv_heads": 2, "dtype": "fp8", "kv_scales": two, **options}
        with pytest.raises(ConfigError, match=r"kv_scale|k_scale"):
            GroupSpec("full", FullAttention(), head_dim=8, **given)
    for rows in (1.0, "ab", (1.0, 2.0)):
        with pytest.raises(ConfigError, match="k_scale"):
            KVScales(rows, ((1.0,),))  # type: ignore[arg-type]
