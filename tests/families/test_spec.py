"""spec_from_config: which groups a config makes, on real sizes, odd shapes and configs that say little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from kvtier import CacheSpec, ChunkedLocal, FullAttention, SlidingWindow
from kvtier.attention.flashinfer import workspace_bytes_for
from kvtier.integrations.transformers import is_latent, query_heads
from kvtier.machine.errors import ConfigError
from runner.model import hybrid as model

from . import zoo

REAL = {
    "Llama-3.1-8B": (
        "llama",
        {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
        {"full": (FullAttention(), 131_072)},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"num_hidden_layers": 24},
        {"full": (FullAttention(), 24_576), "sliding": (SlidingWindow(128), 24_576)},
    ),
    "Gemma-3-27B": (
        "gemma3_text",
        {
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
        {"full": (FullAttention(), 81_920), "sliding": (SlidingWindow(1024), 425_984)},
    ),
    "Gemma-4-31B": (
        "gemma4_text",
        {
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
        },
        {"full": (FullAttention(), 81_920), "sliding": (SlidingWindow(1024), 819_200)},
    ),
    "Llama-4-Scout": (
        "llama4_text",
        {},
        {"full": (FullAttention(), 49_152), "chunked": (ChunkedLocal(8192), 147_456)},
    ),
    "MiMo-V2-Flash": (
        "mimo_v2_flash",
        {"sliding_window": 128},
        {"full": (FullAttention(), 23_040), "sliding": (SlidingWindow(128), 199_680)},
    ),
    "Command-A": (
        "cohere2",
        {"num_hidden_layers": 64, "num_key_value_heads": 8, "hidden_size": 12288, "num_attention_heads": 96},
        {"full": (FullAttention(), 65_536), "sliding": (SlidingWindow(4096), 196_608)},
    ),
    "Ministral-8B": (
        "ministral",
        {
            "num_hidden_layers": 36,
            "sliding_window": 32768,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
        },
        {"full": (FullAttention(), 36_864), "sliding": (SlidingWindow(32768), 110_592)},
    ),
}


@pytest.mark.parametrize("model", REAL)
def test_bytes_per_token_of_real_models(model: str) -> None:
    model_type, fields, expected = REAL[model]
    spec = CacheSpec.from_config(AutoConfig.for_model(model_type, **fields))
    assert {g.name: (g.attention, g.token_bytes) for g in spec.groups} == expected
    assert {g.dtype for g in spec.groups} == {"bfloat16"}


def test_a_multimodal_config_means_its_decoder() -> None:
    spec = CacheSpec.from_config(AutoConfig.for_model("llama4"))
    assert spec == CacheSpec.from_config(AutoConfig.for_model("llama4_text"))


def test_layers_number_through_their_groups() -> None:
    spec = CacheSpec.from_config(zoo.config("gemma3"))
    assert spec.places("kv") == (("sliding", 0), ("full", 0), ("sliding", 1), ("full", 1))


@pytest.mark.parametrize("name", ["gemma3n", "gemma4_shared"])
def test_sharing_layers_map_to_the_layer_they_read(name: str) -> None:
    spec = CacheSpec.from_config(zoo.config(name))
    assert [g.num_layers for g in spec.groups] == [2, 2]
    assert spec.places("kv")[:4] == (("sliding", 0), ("full", 0), ("sliding", 1), ("full", 1))
    assert spec.places("kv")[4:] == (("sliding", 1), ("full", 1))


def test_keys_and_values_of_their_own_sizes_per_layer_type() -> None:
    spec = CacheSpec.from_config(AutoConfig.for_model("mimo_v2_flash"))
    assert [(g.name, g.num_kv_heads, g.head_dims) for g in spec.groups] == [
        ("full", 4, (192, 128)),
        ("sliding", 8, (192, 128)),
    ]
    told = AutoConfig.for_model("mimo_v2_flash", swa_num_key_value_heads=2, swa_head_dim=64, swa_v_head_dim=64)
    sliding = CacheSpec.from_config(told).group("sliding")
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.head_dim_v) == (2, 64, None)


def test_latents_stand_for_keys_and_rotated_keys_for_values() -> None:
    (group,) = CacheSpec.from_config(AutoConfig.for_model("deepseek_v3")).groups
    assert (group.name, group.attention, group.num_layers) == ("full", FullAttention(), 61)
    assert (group.num_kv_heads, group.head_dims, group.token_bytes) == (1, (512, 64), 70_272)
    assert is_latent(AutoConfig.for_model("deepseek_v3"))
    assert not is_latent(AutoConfig.for_model("llama"))


def test_each_layer_has_latents_or_not_by_its_own_config() -> None:
    own = {1: {"kv_lora_rank": 32}, 3: {"kv_lora_rank": 48}}
    config = zoo.config("llama", kv_lora_rank=None, qk_rope_head_dim=8, per_layer_config=own)
    spec = CacheSpec.from_config(config)
    assert [g.head_dims for g in spec.groups] == [(16, 16), (32, 8), (48, 8)]
    assert spec.places("kv") == (("full", 0), ("full_2", 0), ("full", 1), ("full_3", 0))
    assert is_latent(config)


# --- group names ----------------------------------------------------------------------------------------------------


def test_windows_that_differ_are_named_by_their_span() -> None:
    config = zoo.config("gemma3", per_layer_config={2: {"sliding_window": 48}})
    assert CacheSpec.from_config(config).names == ("full", "sliding_20", "sliding_48")


def test_geometry_that_differs_is_numbered() -> None:
    config = zoo.config("llama", per_layer_config={1: {"num_key_value_heads": 1}, 3: {"num_key_value_heads": 4}})
    spec = CacheSpec.from_config(config)
    assert spec.places("kv") == (("full", 0), ("full_2", 0), ("full", 1), ("full_3", 0))
    assert [g.num_kv_heads for g in spec.groups] == [2, 1, 4]


def test_reading_twice_gives_the_same() -> None:
    for name in zoo.ZOO:
        assert CacheSpec.from_config(zoo.config(name)) == CacheSpec.from_config(zoo.config(name)), name


# --- configs without layer_types ------------------------------------------------------------------------------------


def bare(**fields: Any) -> SimpleNamespace:
    """A config as an old or foreign library would write it."""
    base = {"model_type": "bare", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    return SimpleNamespace(**{**base, **fields})


@pytest.mark.parametrize(
    ("fields", "attentions"),
    [
        ({}, [FullAttention()] * 4),
        ({"sliding_window": None}, [FullAttention()] * 4),
        ({"sliding_window": 24}, [SlidingWindow(24)] * 4),
        ({"sliding_window": 24, "use_sliding_window": False}, [FullAttention()] * 4),
        (
            {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 3},
            [FullAttention()] * 3 + [SlidingWindow(24)],
        ),
        ({"attention_chunk_size": 32}, [ChunkedLocal(32)] * 4),
        ({"layers_block_type": ["attention"] * 4}, [FullAttention()] * 4),
    ],
)
def test_types_that_windows_and_chunks_imply(fields: dict[str, Any], attentions: list[Any]) -> None:
    spec = CacheSpec.from_config(bare(**fields))
    assert [spec.group(name).attention for name, _ in spec.places("kv")] == attentions


def test_heads_and_sizes_fall_back_to_what_there_is() -> None:
    (group,) = CacheSpec.from_config(bare()).groups
    assert (group.num_kv_heads, group.head_dims) == (4, (16, 16))
    (group,) = CacheSpec.from_config(bare(multi_query=True)).groups
    assert group.num_kv_heads == 1
    (group,) = CacheSpec.from_config(bare(num_key_value_heads=2, head_dim=8, text_config=None)).groups
    assert (group.num_kv_heads, group.head_dim) == (2, 8)
    nested = SimpleNamespace(model_type="outer", text_config=bare(sliding_window=20))
    assert CacheSpec.from_config(nested).names == ("sliding",)


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({}, 1),
        ({"multi_query": False}, 4),
        ({"multi_query": False, "num_kv_heads": 2}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": False}, 2),
        ({"new_decoder_architecture": True}, 4),
    ],
)
def test_kv_heads_of_falcon_are_those_of_its_checkpoint(fields: dict[str, Any], heads: int) -> None:
    """Its new architecture ignores multi_query, and was given one head."""
    config = AutoConfig.for_model("falcon", hidden_size=64, num_hidden_layers=1, num_attention_heads=4, **fields)
    (group,) = CacheSpec.from_config(config).groups
    assert group.num_kv_heads == heads
    attention = AutoModelForCausalLM.from_config(config).transformer.h[0].self_attention
    queries = 4 * group.head_dim
    assert attention.query_key_value.out_features == queries + 2 * heads * group.head_dim


# --- dtype and blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "asked", "expected"),
    [
        ({}, None, "bfloat16"),
        ({"dtype": "float16"}, None, "float16"),
        ({"torch_dtype": torch.float32}, None, "float32"),
        ({"dtype": "float16"}, "auto", "float16"),
        ({"dtype": "float16"}, torch.float32, "float32"),
        ({"dtype": "float16"}, "float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_dtype_asked_then_stated_then_bfloat16(stated: dict[str, Any], asked: Any, expected: str) -> None:
    assert CacheSpec.from_config(bare(**stated), dtype=asked).groups[0].dtype == expected


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'int3'"):
        CacheSpec.from_config(bare(), dtype="int3")


def test_block_tokens_reach_the_groups_and_must_divide_chunks() -> None:
    assert {g.block_tokens for g in CacheSpec.from_config(zoo.config("gemma3"), block_tokens=8).groups} == {8}
    with pytest.raises(ConfigError, match="chunk_tokens 40 is not a multiple of block_tokens 16"):
        CacheSpec.from_config(zoo.config("llama4", attention_chunk_size=40))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "names 3 layers, but num_hidden_layers is 4"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "sliding_window is None"),
        ({"layer_types": ["chunked_attention"] * 4}, "attention_chunk_size is None"),
        ({"sliding_window": 0}, "must be a positive integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, so there are no layers to cache"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000; no model has more than 10,000"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers must be in 0..4, got 9"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be in 0..4, got -1"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers must be in 0..4, got '2'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": [4]}, r"num_key_value_heads must be a positive integer .* got \[4\]"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types must be a list of names"),
    ],
)
def test_configs_that_contradict_themselves(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheSpec.from_config(bare(**fields))


@pytest.mark.parametrize("config", [{"model_type": "llama"}, "some/model", LlamaConfig])
def test_a_config_is_an_object(config: Any) -> None:
    with pytest.raises(ConfigError, match="AutoConfig"):
        CacheSpec.from_config(config)


# --- query heads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "heads"),
    [
        ("llama", {}, (4, 4, 4, 4)),
        ("step3p7", {}, (8, 4, 8, 4)),
        ("laguna", {"num_attention_heads_per_layer": [4, 16, 4, 16]}, (4, 16, 4, 16)),
    ],
)
def test_query_heads_are_those_of_each_layer_and_size_the_workspace(
    name: str, fields: dict[str, Any], heads: tuple[int, ...]
) -> None:
    config = zoo.config(name, **fields)
    spec = CacheSpec.from_config(config)
    assert query_heads(config, spec) == heads
    most = max(workspace_bytes_for(n, 2, 16, 256, 1) for n in heads)
    assert model._workspace_bytes(config, spec, torch.device("cpu"), 256) == most


def test_a_config_that_does_not_say_its_query_heads() -> None:
    config = zoo.config("laguna", num_attention_heads_per_layer=[4, 16, 4, 16])
    spec = CacheSpec.from_config(config)
    config.num_attention_heads_per_layer = [4]
    with pytest.raises(ConfigError, match="laguna: this config does not say how many query heads"):
        query_heads(config, spec)
