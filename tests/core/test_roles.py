"""Roles: which places of a layer are for what, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from kvtier import CacheSpec, ConfigError, FullAttention, GroupSpec, SlidingWindow
from kvtier.geometry.roles import ROLES

FULL = GroupSpec("full", FullAttention(), 2, 2, 8)
SIDE = GroupSpec("side", SlidingWindow(4), 2, 1, 8)


def spec_of(*layers: Any) -> CacheSpec:
    return CacheSpec([FULL, SIDE], layers=layers)


MIXED = spec_of({"kv": ("full", 0)}, {"index": ("side", 0), "kv": ("full", 1)}, {}, ("side", 1), {"kv": ["full", 0]})


def test_a_layer_has_its_places_by_role() -> None:
    assert MIXED.layers[0] == {"kv": ("full", 0)}
    assert MIXED.layers[1] == {"kv": ("full", 1), "index": ("side", 0)}
    assert MIXED.layers[2] == {}
    assert MIXED.layers[3] == {"kv": ("side", 1)}
    assert list(MIXED.layers[1]) == ["kv", "index"], "in the order of ROLES, however they were given"
    assert repr(MIXED.layers[1]) == "{'kv': ('full', 1), 'index': ('side', 0)}"
    assert "kv" not in MIXED.layers[2]


def test_places_of_one_role_by_layer() -> None:
    assert MIXED.places("kv") == (("full", 0), ("full", 1), None, ("side", 1), ("full", 0))
    assert MIXED.places("index") == (None, ("side", 0), None, None, None)
    assert MIXED.places("state") == (None,) * 5
    for bad in ("KV", "", None, 0, []):
        with pytest.raises(ConfigError, match=r"no role .*; there are kv, entries, state, index, rows"):
            MIXED.places(bad)  # type: ignore[arg-type]


def test_layer_answers_for_layers_of_one_place() -> None:
    assert MIXED.layer(0) == MIXED.layer(4) == ("full", 0)
    with pytest.raises(ConfigError, match=r"layer 1 has several places, \{'kv'.*ask layers\[1\]"):
        MIXED.layer(1)
    with pytest.raises(ConfigError, match=r"layer 2 has no place in the cache; ask layers\[2\]"):
        MIXED.layer(2)


def test_places_alone_and_places_by_role_are_the_same_spec() -> None:
    plain = spec_of(("full", 0), ("side", 0))
    named = spec_of({"kv": ("full", 0)}, {"kv": ("side", 0)})
    assert plain == named
    assert hash(plain) == hash(named)
    assert spec_of({"kv": ("full", 0), "index": ("side", 0)}) == spec_of({"index": ("side", 0), "kv": ("full", 0)})
    assert spec_of({"kv": ("full", 0)}) != spec_of({"index": ("full", 0)})
    assert CacheSpec([FULL]).layers == ({"kv": ("full", 0)}, {"kv": ("full", 1)})
    for other in (copy.deepcopy(MIXED), pickle.loads(pickle.dumps(MIXED))):
        assert other == MIXED
        assert other.layers[1] == MIXED.layers[1]


def test_what_layers_hands_out_cannot_be_changed() -> None:
    given = {"kv": ("full", 0)}
    spec = spec_of(given)
    given["kv"] = ("full", 1)
    assert spec.layers[0] == {"kv": ("full", 0)}
    with pytest.raises(TypeError):
        spec.layers[0]["kv"] = ("full", 1)  # type: ignore[index]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"keys": ("full", 0)}, f"model layer 1: no role 'keys'; there are {', '.join(ROLES)}"),
        ({None: ("full", 0)}, "model layer 1: no role None"),
        ({"kv": "full"}, "model layer 1 must be .group name, index in it., got 'full'"),
        ({"kv": None}, "model layer 1 must be .group name, index in it., got None"),
        ({"kv": ("full", 2)}, "model layer 1 maps to layer 2 of group 'full', which is not there"),
        ({"kv": ("none", 0)}, "model layer 1 maps to layer 0 of group 'none'"),
        ({"kv": ("full", 0), "index": ("full", 0)}, r"model layer 1: \('full', 0\) cannot have two roles in one layer"),
        (None, "model layer 1 must be .group name, index in it., got None"),
        ({"kv"}, "model layer 1 must be"),
    ],
)
def test_a_layer_that_is_none_is_refused_by_its_number(layer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(("full", 0), layer)


@pytest.mark.parametrize("layers", [{"kv": ("full", 0)}, "full", 5, {("full", 0)}])
def test_layers_that_are_no_list_are_refused(layers: Any) -> None:
    with pytest.raises(ConfigError, match="layers must be a list"):
        CacheSpec([FULL, SIDE], layers=layers)


def test_scales_are_asked_of_layers_with_keys_and_values_alone() -> None:
    fp8 = GroupSpec("full", FullAttention(), 1, 2, 8, "fp8")
    spec = CacheSpec([fp8], layers=[{}, {"kv": ("full", 0)}])
    scales = {"k": 0.5, "v": 0.25}
    scaled = spec.with_kv_scales({1: scales})
    assert scaled.layers == spec.layers
    assert scaled.groups[0].kv_scales is not None
    with pytest.raises(ConfigError, match="kv_scales of layer 0: this layer keeps no keys and values"):
        spec.with_kv_scales({0: scales, 1: scales})
