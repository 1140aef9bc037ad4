"""What cannot be served is refused, by name and with the reason, before it can give wrong text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.masking_utils import create_causal_mask

from kvtier import CacheSpec
from kvtier.integrations.transformers import picked
from kvtier.machine.errors import ConfigError, UnsupportedModel
from runner.errors import ModelLoadError
from runner.model import checkpoint, hybrid as model, selfcheck
from runner.model.hybrid import HybridModel

from . import zoo
from .conftest import Family
from .fake import FakeCache, FakeSteps
from .test_logits import CONTROLS

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def for_model(model_type: str, **fields: Any) -> Any:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}: install another version of it")
    return AutoConfig.for_model(model_type, **fields)


REFUSED = {
    "mamba": (lambda: for_model("mamba"), r"'linear_attention', which keeps a recurrent state.*begin .* from no state"),
    "jamba": (lambda: for_model("jamba"), r"'linear_attention', .*begin .* from no state"),
    "zaya": (lambda: for_model("zaya"), "its attention itself keeps a state"),
    "zamba2": (lambda: for_model("zamba2"), "share one attention"),
    "minimax": (lambda: for_model("minimax"), "are not those of transformers' linear attention"),
    "recurrent_gemma": (lambda: for_model("recurrent_gemma"), "keeps a recurrent state"),
    "rwkv": (lambda: for_model("rwkv"), "each layer keeps a recurrent state .* in lists of its own"),
    "xlstm": (lambda: for_model("xlstm"), "each layer keeps a recurrent state .* a cache class of its own"),
    "inkling2": (lambda: for_model("inkling2"), "are not those of transformers' linear attention"),
    "glm5_next": (lambda: for_model("glm5_next"), r"index pools the keys of tokens \(index_kpool\)"),
    "qwen4_exp": (lambda: for_model("qwen4_exp"), r"index pools the keys of tokens \(indexer_compress_ratio\)"),
    "an index of no size": (
        lambda: _with(zoo.config("llama"), layer_types=["indexed_attention"] * 4),
        "'indexed_attention', but there is no index_head_dim",
    ),
    "indices of other owners": (
        lambda: _with(for_model("glm_moe_dsa"), indexer_types=["every second"] * 78),
        "indexer_types names {'every second'}; kvtier knows 'full' and 'shared'",
    ),
    "entries of two heads": (
        lambda: _with(for_model("deepseek_v4"), num_key_value_heads=2),
        "its entries have 2 KV heads",
    ),
    "gpt_neo": (lambda: for_model("gpt_neo"), "layer 1 is 'local'"),
    "unknown type": (lambda: _with(zoo.config("llama"), layer_types=["soft"] * 4), "'soft', which is not a type"),
    "longrope": (lambda: zoo.config("phi3", rope_parameters=LONGROPE), "rope type 'longrope'"),
    "dynamic NTK": (lambda: zoo.config("llama", rope_parameters=DYNAMIC), "rope type 'dynamic'"),
    "dynamic NTK of one layer type": (
        lambda: zoo.config("olmo3", rope_parameters={"full_attention": DYNAMIC, "sliding_attention": DYNAMIC}),
        "rope type 'dynamic'",
    ),
    "encoder-decoder": (lambda: for_model("bart"), "encoder-decoder"),
    "encoder": (lambda: for_model("bert"), "not causal"),
    "encoder with windows": (
        lambda: for_model("modernbert", architectures=["ModernBertForMaskedLM"]),
        "modernbert: its attention is not causal",
    ),
    "encoder of images": (lambda: for_model("vit"), "vit: transformers generates no text with this model"),
    "encoder of sound": (lambda: for_model("wav2vec2"), "generates no text"),
    "encoder of text and images": (lambda: for_model("siglip"), "siglip_text_model: transformers generates no text"),
    "encoder in a family that generates": (lambda: for_model("qwen2_vl").vision_config, "generates no text"),
    "flags of XLM": (lambda: for_model("xlm"), "xlm: its attention is not causal"),
    "memories": (lambda: for_model("xlnet"), r"keeps hidden states .mem_len. instead of keys and values"),
    "layers that see an image": (lambda: for_model("mllama"), r"its layers \[3, 8.*\] attend to an image"),
    "bidirectional gemma": (lambda: zoo.config("gemma3", use_bidirectional_attention=True), "not causal"),
    "bidirectional gemma4": (lambda: zoo.config("gemma4", use_bidirectional_attention="all"), "not causal"),
    "layers that loop": (lambda: for_model("dory"), r"dory: its layers run in loops .n_recurrent_loops=2."),
    "cycles of layers": (lambda: for_model("hrm_text"), r"hrm_text: its layers run in loops .H_cycles=2."),
    "no heads": (
        lambda: SimpleNamespace(model_type="own", num_hidden_layers=2, vocab_size=9),
        "no num_attention_heads",
    ),
    "no layers": (lambda: for_model("blt"), "no num_hidden_layers"),
    "all layers shared": (lambda: zoo.config("gemma4_shared", num_kv_shared_layers=6), "no earlier layer of its type"),
    "layers without attention": (
        lambda: zoo.config("llama", per_layer_config={1: {"skip": ["attention"]}}),
        r"layer 1 skips \['attention'\]",
    ),
}


def causal(**arguments: Any) -> Any:
    return create_causal_mask(**arguments)


def _with(config: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(config, name, value)
    return config


ENCODERS = [
    "albert",
    "clap",
    "deberta",
    "deberta-v2",
    "deit",
    "dinov2",
    "distilbert",
    "eurobert",
    "hubert",
    "longformer",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "siglip2",
    "squeezebert",
    "wavlm",
]


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_is_refused_though_its_config_names_no_architecture(model_type: str) -> None:
    """They were given groups of full and sliding attention."""
    with pytest.raises(UnsupportedModel, match=r"generates no text|not causal"):
        CacheSpec.from_config(for_model(model_type))


GENERATE = [
    "bloom",
    "falcon",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4v_moe",
    "gpt2",
    "gpt_bigcode",
    "granite",
    "llama4",
    "llava",
    "mistral3",
    "molmo2",
    "mpt",
    "opt",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen3_omni_moe",
    "qwen3_vl",
    "smolvlm",
    "stablelm",
    "voxtral",
]


@pytest.mark.parametrize("model_type", GENERATE)
def test_a_decoder_is_not_taken_for_an_encoder_nor_as_the_part_of_a_larger_model(model_type: str) -> None:
    config = for_model(model_type)
    assert CacheSpec.from_config(config) == CacheSpec.from_config(config.get_text_config(decoder=True))


def test_a_config_of_another_library_is_taken_at_its_word() -> None:
    class Own(type(for_model("vit"))):
        model_type = "own"

    assert CacheSpec.from_config(Own()).names == ("full",)


@pytest.mark.parametrize("case", REFUSED)
def test_configs_refused_with_the_reason(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        CacheSpec.from_config(make())


DAMAGED = {
    "kv_lora_rank": ("deepseek_v32", ["full"], "deepseek_v32: kv_lora_rank must be a positive integer"),
    "qk_rope_head_dim": ("deepseek_v32", None, "deepseek_v32: qk_rope_head_dim must be a positive integer"),
    "index_head_dim": ("deepseek_v32", 0, "deepseek_v32: index_head_dim must be a positive integer"),
    "indexer_types": ("glm_moe_dsa", 4, "glm_moe_dsa: indexer_types must be a list of names, got 4"),
    "layer_types": ("qwen3_next", [[]] * 4, "qwen3_next: layer_types must be a list of names"),
    "num_key_value_heads": ("llama", 1.5, "llama: num_key_value_heads must be a positive integer"),
}


def plain(name: str, **fields: Any) -> SimpleNamespace:
    """A config of another library, which checks nothing."""
    config = zoo.config(name)
    return SimpleNamespace(**{name: getattr(config, name) for name in config.to_dict()} | fields)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_fields_are_named(name: str) -> None:
    family, value, message = DAMAGED[name]
    with pytest.raises(ConfigError, match=message):
        CacheSpec.from_config(plain(family, **{name: value}))


@pytest.mark.parametrize("family", ["llama", "deepseek_v4", "deepseek_v32"])
@pytest.mark.parametrize("bad", ["16", 1.5, None, 0, 2**31])
def test_block_tokens_that_are_no_number_are_not_the_config_s_fault(family: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"^block_tokens must be a positive integer"):
        CacheSpec.from_config(zoo.config(family), block_tokens=bad)


@pytest.mark.parametrize("bad", [["4"], float("nan"), float("inf"), 0])
def test_what_an_index_picks_must_be_a_number(bad: Any) -> None:
    with pytest.raises(ConfigError, match="deepseek_v32: index_topk must be a positive integer"):
        picked(plain("deepseek_v32", index_topk=bad))
    with pytest.raises(ConfigError, match="deepseek_v32: index_topk_blocks must be a positive integer"):
        picked(plain("deepseek_v32", index_topk=None))


def test_a_model_that_can_be_kept_but_not_run_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = for_model("minimax_m3_vl", text_config={"layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 59})
    assert CacheSpec.from_config(config).groups
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(checkpoint, "read_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedModel, match="minimax_m3_vl_text: layer 1 picks blocks of the tokens it sees by an"):
        HybridModel.load(tmp_path)


RECURRENT = ["mamba", "jamba", "zaya", "zamba2", "minimax", "recurrent_gemma", "rwkv", "xlstm"]


@pytest.mark.parametrize("model_type", RECURRENT)
def test_recurrent_models_are_refused_before_the_weights_are_read(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = REFUSED[model_type]
    make().save_pretrained(tmp_path)
    monkeypatch.setattr(checkpoint, "read_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedModel, match=message):
        HybridModel.load(tmp_path)


def test_refused_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.config("llama", rope_parameters=DYNAMIC).save_pretrained(tmp_path)
    monkeypatch.setattr(checkpoint, "read_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedModel, match="dynamic"):
        HybridModel.load(tmp_path)


# --- families whose config looks like plain attention, but whose code does otherwise --------------------------------

FOUR_HEADS = {"num_key_value_heads": 4}
BYPASSING = {
    "bloom": ({}, r"layers \[0, 1, 2, 3\] never called"),
    "falcon": ({}, "a table of its own"),
    "mpt": ({}, "its forward fails"),
    "nemotron": ({}, "drops keyword arguments"),
    "doge": ({}, "an attention mask of its own"),
    "diffllama": ({}, "attends twice in one forward"),
    "bert-generation": (FOUR_HEADS, "not causal"),
    "openai-gpt": (FOUR_HEADS, "never called"),
    "moshi": ({**FOUR_HEADS, "sliding_window": 20}, "SlidingWindow.*but its code gives the attention no window"),
    "gpt_neox": ({"num_key_value_heads": 2}, r"keys are 4 x 16 \(heads x size\), but the config was read as 2 x 16"),
}


@pytest.mark.parametrize("model_type", BYPASSING)
def test_families_that_bypass_our_attention_are_refused_at_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str
) -> None:
    fields, message = BYPASSING[model_type]
    monkeypatch.setitem(zoo.ZOO, model_type, (model_type, fields))
    folder = zoo.build(model_type, tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        HybridModel.load(folder)


def test_a_window_in_the_code_that_the_config_does_not_tell(family: Callable[[str], Family]) -> None:
    subject = family("mistral").model
    spec = CacheSpec.from_config(zoo.config("mistral", sliding_window=None))
    cache = FakeCache(spec)
    step = FakeSteps(cache, family("mistral").sequences).step({0: 4})
    with pytest.raises(UnsupportedModel, match=r"slides over 20 tokens, but the config was read as FullAttention"):
        subject.forward(step, cache)


def test_a_layer_that_attends_though_it_was_read_as_one_without_a_cache(family: Callable[[str], Family]) -> None:
    subject = family("llama").model
    spec = subject.spec()
    cache = FakeCache(CacheSpec(spec.groups, layers=[*spec.layers[:2], {}, spec.layers[3]]))
    step = FakeSteps(cache, family("llama").sequences).step({0: 4})
    with pytest.raises(UnsupportedModel, match=r"layer 2 .*read as a layer without keys and values"):
        subject.forward(step, cache)


def test_calling_the_model_itself_is_refused(family: Callable[[str], Family]) -> None:
    with pytest.raises(UnsupportedModel, match="called directly"):
        family("llama").model.model(torch.tensor([[3, 4]]), use_cache=False)


# --- the trial at load time sees what no structure shows ------------------------------------------------------------


def test_the_trial_sees_positions_that_count_tokens_of_the_batch(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family("llama4").folder
    monkeypatch.setattr(model, "take_temperatures", lambda _: {})
    with pytest.raises(UnsupportedModel, match="two requests packed in one forward give other logits"):
        HybridModel.load(folder)
    assert HybridModel.load(folder, self_check=False).temperatures == {}


def test_the_trial_sees_rotations_that_depend_on_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.build("llama", tmp_path, rope_parameters=DYNAMIC, max_position_embeddings=8)
    monkeypatch.setattr("kvtier.integrations.transformers.refuse_positions", lambda _: None)
    with pytest.raises(UnsupportedModel, match="two requests packed in one forward give other logits"):
        HybridModel.load(folder)


def test_a_window_argument_that_the_familys_own_mask_does_not_keep(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far beyond what the trial runs."""
    folder = zoo.build("mistral", family("mistral").folder / "long", sliding_window=4999)
    monkeypatch.setattr("transformers.models.mistral.modeling_mistral.create_sliding_window_causal_mask", causal)
    with pytest.raises(UnsupportedModel, match=r"own code token 4999 sees token 0, which SlidingWindow.*otherwise"):
        HybridModel.load(folder)


def test_the_trial_passes_windows_that_are_not_too_long(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that loses the window is seen, though every argument of the call is right."""
    subject = HybridModel(family("gemma3").model.model, backend=CONTROLS["span"])
    with pytest.raises(UnsupportedModel, match="two requests packed in one forward give other logits"):
        selfcheck.self_check(subject)
    monkeypatch.setattr(selfcheck, "_CPU_WORK", 0)
    selfcheck.self_check(subject)


def test_logits_that_float16_cannot_hold(tmp_path: Path) -> None:
    """Gemma 3's BOS token overflows, and no other."""
    folder = zoo.build("gemma3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][1] *= 2e4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r'logits are not finite in float16.*dtype="bfloat16" or "float32"'):
        HybridModel.load(folder, dtype="float16")
    HybridModel.load(folder, dtype="bfloat16")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="not finite in float32, so its weights are damaged"):
        HybridModel.load(folder)


def test_a_config_of_which_transformers_makes_no_model(tmp_path: Path) -> None:
    path = zoo.build("gemma3", tmp_path) / "config.json"
    path.write_text(path.read_text().replace("gelu_pytorch_tanh", "none_such"))
    with pytest.raises(
        UnsupportedModel, match=r"gemma3_text: transformers cannot make a model of this config .*none_such"
    ):
        HybridModel.load(tmp_path)


def test_a_family_that_no_auto_class_loads_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    config = for_model("evolla")
    CacheSpec.from_config(config)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="evolla: transformers has no language model that generates text"):
        HybridModel.load(tmp_path)


def test_a_device_that_is_lost_is_not_the_familys_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("runner.model.selfcheck._packed", lost)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        HybridModel.load(zoo.build("gemma3", tmp_path))


def test_the_trial_leaves_the_model_as_it_was(family: Callable[[str], Family]) -> None:
    subject = family("llama4").model
    assert subject.config._attn_implementation == "kvtier"
    assert not any(getattr(m, "attn_temperature_tuning", False) for m in subject.model.modules())
