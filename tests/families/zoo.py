"""Tiny random-weight models of every family that the runner serves, built from transformers' own configs.

Owns       ``ZOO`` (family name -> model type and config fields; those that the installed transformers has), ``MORE``
           (text of models that also see images, and masks without a window argument; for the forward alone) and
           ``build``, which writes one to a folder.
Promises   seeded weights, so that a name always gives the same model; logits that differ from token to token and that
           a wrong mask, scale or position changes; windows and chunks of a few blocks of 16 tokens or less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig

from runner.model.checkpoint import auto_class

VOCAB = 160
_TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
_MIXED = ["sliding_attention", "full_attention"] * 2
_SIX = ["sliding_attention", "full_attention"] * 3
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_CONV = ["conv", "conv", "full_attention", "conv"]
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "layer_types": _LINEAR,
}
_SCAN = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_COMPRESSED = {
    "head_dim": 32,
    "num_key_value_heads": 1,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "sliding_window": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 512,  # never binding: scores of tiny indices tie, at 0
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
}
_INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 512}  # as above: never binding
INDEXED = {"deepseek_v4", "deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2"}
"""Families that read compressed entries, or pick tokens by an index."""
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_SLIDING = {"layer_types": _MIXED, "sliding_window": 20, "head_dim": 16}
_GRANITE = {"layer_types": _MIXED, "sliding_window": 20, "attention_multiplier": 0.3}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_PER_LAYER_INPUT = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_hidden_layers": 6}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": _LLAMA3}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 32}),
    "gemma3_vision": (
        "gemma3",
        {
            "text_config": {**_SLIDING, "query_pre_attn_scalar": 32},
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 150,
            "boi_token_index": 151,
            "eoi_token_index": 152,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {**_PER_LAYER_INPUT, "layer_types": _SIX, "sliding_window": 20, "head_dim": 16, "global_head_dim": 32},
    ),
    "gemma4_shared": (
        "gemma4_text",
        {
            **_PER_LAYER_INPUT,
            "layer_types": _SIX,
            "sliding_window": 16,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "deepseek_v4": ("deepseek_v4", _COMPRESSED),
    "deepseek_v32": ("deepseek_v32", {**_LATENT, **_DEEPSEEK_EXPERTS, **_INDEX}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_LATENT, **_DEEPSEEK_EXPERTS, **_INDEX, "index_topk_freq": 2}),
    "hy_v4": ("hy_v4", {**_LATENT, **_DEEPSEEK_EXPERTS, **_INDEX, "indexer_types": ["full", "shared"] * 2}),
    "axk2": ("axk2", {**_LATENT, **_DEEPSEEK_EXPERTS, **_INDEX}),
    "gpt_oss": ("gpt_oss", {**_SLIDING, **_EXPERTS, "rope_parameters": _YARN}),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": 32,
            "no_rope_layer_interval": 2,
            "floor_scale": 8,
            "attn_scale": 0.5,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
        },
    ),
    "cohere2": ("cohere2", {**_SLIDING, "logit_scale": 1.0}),
    "olmo3": ("olmo3", {"layer_types": _MIXED, "sliding_window": 20}),
    "gemma3n": (
        "gemma3n_text",
        {
            **_PER_LAYER_INPUT,
            "layer_types": _SIX,
            "sliding_window": 20,
            "head_dim": 16,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5] + [0.0] * 5,
        },
    ),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    "smollm3": ("smollm3", {"use_sliding_window": True, "layer_types": _MIXED, "sliding_window": 20}),
    "exaone4": ("exaone4", _SLIDING),
    "vaultgemma": ("vaultgemma", {**_SLIDING, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 3.0}),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {**_SLIDING, **_DEEPSEEK_EXPERTS, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16},
    ),
    "granite_swa": ("granite_swa", _GRANITE),
    "granitemoe_swa": ("granitemoe_swa", {**_GRANITE, **_EXPERTS}),
    "ministral": ("ministral", {**_SLIDING, "layer_types": ["sliding_attention"] * 4}),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.5}}),
    "afmoe": ("afmoe", {**_SLIDING, **_FEW_EXPERTS}),
    "cwm": ("cwm", {**_SLIDING, "rope_parameters": _LLAMA3}),
    "flint": ("flint", {**_SLIDING, **_FEW_EXPERTS}),
    "kolibri1": ("kolibri1", {**_SLIDING, **_FEW_EXPERTS}),
    "beam": ("beam", {**_SLIDING, **_FEW_EXPERTS, "num_experts": 16}),
    "dots1": ("dots1", {**_DEEPSEEK_EXPERTS, "layer_types": _MIXED, "sliding_window": 20}),
    "cohere2_moe": ("cohere2_moe", {**_SLIDING, **_FEW_EXPERTS}),
    "exaone_moe": ("exaone_moe", {**_SLIDING, **_FEW_EXPERTS}),
    "laguna": ("laguna", {**_SLIDING, **_FEW_EXPERTS}),
    "mellum": ("mellum", {**_SLIDING, **_FEW_EXPERTS}),
    "modernbert-decoder": (
        "modernbert-decoder",
        {"layer_types": _MIXED, "local_attention": 40, "num_key_value_heads": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "mixtral": ("mixtral", {"sliding_window": 20, **_EXPERTS}),
    "phi3": ("phi3", {"sliding_window": 20}),
    "starcoder2": ("starcoder2", {"sliding_window": 20}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, **_FEW_EXPERTS},
    ),
    "glm4": ("glm4", {"head_dim": 16}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {"num_key_value_heads": 4}),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, **_DEEPSEEK_EXPERTS}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, **_DEEPSEEK_EXPERTS}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_DEEPSEEK_EXPERTS}),
    "axk1": ("axk1", {**_LATENT, **_DEEPSEEK_EXPERTS}),
    "sarvam_mla": ("sarvam_mla", {**_LATENT, **_DEEPSEEK_EXPERTS, **_FEW_EXPERTS}),
    "minicpm3": ("minicpm3", _LATENT),
    "youtu": ("youtu", _LATENT),
    "qwen3_next": ("qwen3_next", {**_DELTA, **_FEW_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_DELTA, **_FEW_EXPERTS, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("olmo_hybrid", _DELTA),
    "lara_mini": (
        "lara_mini",
        {
            **_DELTA,
            **_FEW_EXPERTS,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
            "sliding_window": 20,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": _CONV, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**_FEW_EXPERTS, "layer_types": _CONV, "conv_L_cache": 3, "num_dense_layers": 1}),
    "lfm3": (
        "lfm3",
        {
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "conv_L_cache": 5,
            "sliding_window": 20,
            "head_dim": 16,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_SCAN,
            **_FEW_EXPERTS,
            "num_local_experts": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "mamba_expand": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "bamba": ("bamba", {**_SCAN, "mamba_expand": 2, "attn_layer_indices": [2]}),
    "falcon_h1": ("falcon_h1", {**_SCAN, "mamba_d_ssm": 128, "head_dim": 16}),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16, "expand": 2},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_DEEPSEEK_EXPERTS,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "head_dim": 16,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {**_LATENT, **_DEEPSEEK_EXPERTS, "layer_types": _LINEAR, "num_local_experts": 4, "head_dim": 16},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "layer_types": _LINEAR,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
            "linear_num_heads": 4,
            "linear_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_token": 2,
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        {
            **_LATENT,
            "num_layers": 2,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 96,
            "zero_expert_num": 0,
        },
    ),
}

_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": (
        "mistral3",
        {
            "text_config": {"model_type": "ministral3", "head_dim": 16},
            "vision_config": {"model_type": "pixtral", **_VISION},
            "image_token_index": 150,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
                "use_sliding_window": True,
                "sliding_window": 20,
                "max_window_layers": 2,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_heads": 2,
                "patch_size": 8,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [0],
                "window_size": 32,
            },
            "image_token_id": 150,
            "video_token_id": 151,
            "vision_start_token_id": 152,
            "vision_end_token_id": 153,
        },
    ),
    "step3p7": (
        "step3p7",
        {
            "text_config": {
                **_SLIDING,
                **_FEW_EXPERTS,
                "num_sliding_attention_heads": 8,
                "n_routed_experts": 4,
                "num_local_experts": 4,
                "share_expert_dim": 32,
                "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            },
            "vision_config": _VISION,
            "image_token_id": 150,
        },
    ),
    "phimoe": ("phimoe", {"sliding_window": 20, **_EXPERTS}),
}

ZOO = {name: entry for name, entry in _FAMILIES.items() if entry[0] in CONFIG_MAPPING}
MORE = {name: entry for name, entry in _MORE.items() if entry[0] in CONFIG_MAPPING}


def config(name: str, **overrides: Any) -> Any:
    """The family's tiny transformers config; ``overrides`` replace fields (head_dim=64 for GPU kernels)."""
    model_type, fields = ZOO[name] if name in ZOO else MORE[name]
    if "text_config" in fields:
        fields = {**fields, "text_config": {**_TINY, **fields["text_config"], **overrides}}
    else:
        fields = {**_TINY, **fields, **overrides}
    return AutoConfig.for_model(model_type, **fields)


def build(name: str, folder: Path, **overrides: Any) -> Path:
    """Writes the family's tiny model (config, safetensors, no tokenizer) to ``folder`` and returns it."""
    return save(config(name, **overrides), folder)


def save(model_config: Any, folder: Path, seed: int = 0) -> Path:
    """Writes a model of ``model_config`` with seeded random weights to ``folder`` and returns it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(model_config).from_config(model_config, dtype=torch.float32)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                _randomize(key, parameter)
    model.save_pretrained(folder)
    return Path(folder)


def _randomize(key: str, parameter: torch.Tensor) -> None:
    """Weights that keep activations near 1 and attention sharp; gains, biases and sinks away from their defaults."""
    if parameter.dim() == 1:
        parameter.add_(torch.randn_like(parameter), alpha=1.0 if "sink" in key else 0.1)
    elif "embed" in key or "wte" in key:
        parameter.normal_(std=0.5)
    else:
        gain = 2.0 if "q_proj" in key or "k_proj" in key else 1.0
        parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
