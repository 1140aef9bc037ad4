"""Models with entries that tokens share and with indices: bytes and compute against published figures and by hand."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from kvtier import CacheSpec, ChunkedLocal, FullAttention, GroupSpec, SlidingWindow
from kvtier.geometry import capacity
from kvtier.geometry.kinds import Kind
from kvtier.geometry.sizing import layout_of, parse_bytes
from kvtier.integrations.transformers import picked
from runner.plan import compute
from runner.plan.run import Options, run

FLASH = {"compress_ratios": [0, 0, *[4, 128] * 20, 4]}
PRO = {"compress_ratios": [128, 128, *[4, 128] * 29, 4], "num_hidden_layers": 61, "num_attention_heads": 128}
SPARSE = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57
GROWTH = {  # bytes of one more token in a long text; layers whose index has keys of its own
    "DeepSeek-V4-Flash": ("deepseek_v4", FLASH, 6_880, 21),
    "DeepSeek-V4-Pro": ("deepseek_v4", PRO, 9_848, 30),
    "DeepSeek-V3": ("deepseek_v3", {}, 70_272, 0),
    "DeepSeek-V3.2": ("deepseek_v32", {}, 85_888, 61),
    "GLM-5, an index for 4 layers": ("glm_moe_dsa", {"index_topk_freq": 4}, 95_232, 21),
    "GLM-5, an index for each layer": ("glm_moe_dsa", {}, 109_824, 78),
    "Kimi-K2": ("kimi_k25", {}, 70_272, 0),
    "MiniMax-M3, dense": ("minimax_m3_vl", {}, 122_880, 0),
    "MiniMax-M3, sparse": ("minimax_m3_vl", {"text_config": {"layer_types": SPARSE}}, 122_880 + 57 * 256, 57),
    "dots3-note": ("dots3_note", {}, 13 * (1152 + 256), 13),
}


def spec_of(name: str) -> CacheSpec:
    model_type, fields, *_ = GROWTH[name]
    return CacheSpec.from_config(AutoConfig.for_model(model_type, **fields), dtype="bfloat16")


@pytest.mark.parametrize("name", GROWTH)
def test_published_bytes_a_token_and_layers_with_an_index(name: str) -> None:
    spec, growth, indices = spec_of(name), *GROWTH[name][2:]
    full = [group for group in spec.groups if group.attention.kind is Kind.FULL]
    assert sum(group.entry_bytes / group.entry_tokens for group in full) == growth
    assert sum(place is not None for place in spec.places("index")) == indices


def test_a_million_tokens_of_deepseek_v4_pro() -> None:
    """9.62 GiB are published."""
    spec = spec_of("DeepSeek-V4-Pro")
    held = capacity.bytes_of(spec, capacity.held_blocks(spec, 2**20))
    far = [n for n, group in zip(held, spec.groups, strict=True) if group.attention.kind is Kind.FULL]
    assert sum(far) / 2**30 == pytest.approx(9.62, abs=0.005)


def test_the_places_of_deepseek_v4_flash() -> None:
    spec = spec_of("DeepSeek-V4-Flash")
    assert [dict(spec.layers[i]) for i in (0, 2, 3)] == [
        {"kv": ("sliding", 0)},
        {"kv": ("sliding", 2), "entries": ("entries_4", 0), "index": ("index_4", 0), "rows": ("rows_4", 0)},
        {"kv": ("sliding", 3), "entries": ("entries_128", 0), "rows": ("rows_128", 0)},
    ]
    assert (spec.hit_tokens, spec.hash_tokens) == (128, 8)
    entries, full = {"head_dim_v": 0, "entry_tokens": 4}, FullAttention()
    assert spec.group("sliding") == GroupSpec("sliding", SlidingWindow(128), 43, 1, 512, head_dim_v=0)
    assert spec.group("entries_4") == GroupSpec("entries_4", full, 21, 1, 512, block_tokens=128, **entries)
    assert spec.group("index_4") == GroupSpec("index_4", full, 21, 1, 128, block_tokens=128, **entries)
    assert spec.group("rows_4") == GroupSpec("rows_4", SlidingWindow(8), 21, 1, 1280, block_tokens=8)
    assert spec.group("rows_128") == GroupSpec("rows_128", ChunkedLocal(128), 20, 1, 512)


def test_what_a_hit_of_deepseek_v4_needs_beside_its_entries() -> None:
    """At multiples of 128: a window in each layer, and the rows that overlap with the next entries of 4."""
    spec = spec_of("DeepSeek-V4-Flash")
    needed = dict(zip(spec.names, capacity.hit_blocks(spec, 90_112), strict=True))
    assert needed == {
        "sliding": 8, "entries_4": 704, "index_4": 704, "rows_4": 1, "entries_128": 704, "rows_128": 0,
    }  # fmt: skip


def test_capacity_at_90k_in_the_memory_of_the_incident() -> None:
    """7.13 GiB held one prompt of 90k there."""
    spec = spec_of("DeepSeek-V4-Flash")
    layout = layout_of(spec, parse_bytes("7.13GiB", ""), "")
    each, peak = capacity.running_blocks(spec, 90_112), capacity.peak_blocks(spec, 90_113)
    assert capacity.requests(layout, each, peak) == 11
    assert max(layout.strides / layout.block_bytes) < 1.04, "padding"


@pytest.mark.parametrize("name", [name for name in GROWTH if "sparse" not in name and "index for" not in name])
def test_a_plan_is_made_and_says_what_a_token_takes(name: str) -> None:
    model_type, fields, *_ = GROWTH[name]
    config = AutoConfig.for_model(model_type, **{"dtype": "bfloat16", "num_hidden_layers": 3, **cut(fields)})
    plan = run(config, Options("40GiB", "40GiB"))
    assert plan.assumptions.weights is not None or "vl" in model_type
    assert plan.growth_bytes > 0


def cut(fields: dict[str, Any]) -> dict[str, Any]:
    """The same for three layers."""
    return {name: value[:3] for name, value in fields.items() if isinstance(value, list)}


def test_8_bits_are_refused_where_each_entry_has_a_scale() -> None:
    from kvtier import UnsupportedModel

    with pytest.raises(UnsupportedModel, match="in 8 bits each of its entries has scales of its own"):
        CacheSpec.from_config(AutoConfig.for_model("deepseek_v4"), dtype="fp8")
    narrow = CacheSpec.from_config(AutoConfig.for_model("deepseek_v32"), dtype="fp8")
    assert [group.dtype for group in narrow.groups] == ["float8_e4m3fn", "bfloat16"], "index keys stay as they are"


# --- compute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "most"), [(1, None), (1, 5), (4, None), (4, 3), (8, 100)])
def test_pairs_of_tokens_and_entries_are_those_counted_one_by_one(shared: int, most: int | None) -> None:
    group = GroupSpec("g", FullAttention(), 1, 1, 8, block_tokens=8, entry_tokens=shared)
    for n in (1, 3, 4, 7, 8, 40, 61):
        counted = sum(min((i + 1) // shared, most or 10**9) for i in range(n))
        assert compute.seen(group, n, most) == counted


def test_an_index_costs_less_than_what_it_saves() -> None:
    """V3.2 sees 2,048 tokens at most, and its index all of them, with 64 heads of 128."""
    dense, sparse = (AutoConfig.for_model(name) for name in ("deepseek_v3", "deepseek_v32"))
    n, pairs = 90_112, 90_112 * 90_113 // 2
    every = 61 * 2 * 128 * (128 + 64 + 128)
    assert compute.attention_flops(dense, CacheSpec.from_config(dense), n) == every * pairs
    few = 2048 * 2049 // 2 + (n - 2048) * 2048
    index = 61 * 2 * 64 * 128 * pairs
    assert compute.attention_flops(sparse, CacheSpec.from_config(sparse), n) == every * few + index
    assert picked(AutoConfig.for_model("deepseek_v4", **FLASH)) == tuple(
        512 if ratio == 4 else None for ratio in FLASH["compress_ratios"]
    )
    sparse_m3 = AutoConfig.for_model("minimax_m3_vl", text_config={"layer_types": SPARSE})
    assert picked(sparse_m3)[2:4] == (None, 17 * 128)
