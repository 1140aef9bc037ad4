"""Tiny models with random weights, made from transformers' configs: no download, and no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 512

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

NAMES = ("llama", "gemma3", "gptoss", "llama4")
"""One group; 5 groups of windows and a full one; a window and a full one; chunks and a full one."""

POOL = {"llama": 72, "gemma3": 140, "gptoss": 92, "llama4": 130}
"""Device blocks for one prompt of 1,500 tokens and a part of another, not for two."""


HYBRIDS = ("qwen3next", "qwen35", "granite4", "falconh1", "nemotronh", "mamba2")
"""Models with recurrent states. The first two run in bfloat16 only, as their kernels for CPUs ask; the others need
``patches.py``. Only the last has no layer of attention."""


def hybrid_of(name: str) -> Any:
    """The config of one of ``HYBRIDS``."""
    import transformers

    wide = SHAPE | {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    delta = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    mamba = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
    if name == "qwen3next_wide":  # for two ranks
        delta |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    if name in ("qwen3next", "qwen3next_wide"):
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        sizes = {"num_hidden_layers": 4, "intermediate_size": 128, "shared_expert_intermediate_size": 32}
        return transformers.Qwen3NextConfig(**wide, **delta, **experts, **sizes)
    if name == "qwen35":
        return transformers.Qwen3_5TextConfig(**wide, **delta, num_hidden_layers=4, intermediate_size=128)
    if name == "granite4":
        shape = {k: v for k, v in SHAPE.items() if k != "head_dim"} | {"hidden_size": 128, "num_attention_heads": 4}
        return transformers.GraniteMoeHybridConfig(
            **shape | {"num_key_value_heads": 2},
            **mamba,
            mamba_d_head=32,
            mamba_expand=2,
            num_hidden_layers=4,
            intermediate_size=128,
            shared_intermediate_size=128,
            num_local_experts=0,
            layer_types=["mamba", "mamba", "attention", "mamba"],
        )
    two = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2}
    if name == "falconh1":
        return transformers.FalconH1Config(
            **two, **mamba, mamba_d_head=16, mamba_d_ssm=128, num_hidden_layers=3, intermediate_size=128
        )
    if name == "nemotronh":
        return transformers.NemotronHConfig(
            **two,
            num_hidden_layers=4,
            layers_block_type=["mamba", "attention", "mamba", "mlp"],
            intermediate_size=128,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
            n_group=1,
            topk_group=1,
        )
    shape = {k: SHAPE[k] for k in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    heads = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2}
    return transformers.Mamba2Config(**shape, **heads, num_hidden_layers=3)


def config_of(name: str) -> Any:
    """Of the model of this name."""
    if name in HYBRIDS or name == "qwen3next_wide":
        return hybrid_of(name)
    from transformers import DeepseekV2Config, Gemma3TextConfig, GptOssConfig, Llama4TextConfig, LlamaConfig

    if name == "deepseek":  # latents in place of keys and values
        latents = {"kv_lora_rank": 32, "q_lora_rank": None}
        heads = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
        dense = {"first_k_dense_replace": 4, "n_routed_experts": 4, "num_experts_per_tok": 1}
        return DeepseekV2Config(**SHAPE, **latents, **heads, **dense, num_hidden_layers=4, intermediate_size=128)
    if name == "llama":
        return LlamaConfig(**SHAPE, num_hidden_layers=4, intermediate_size=128)
    if name == "gemma3":  # 5 layers of windows to 1 full layer
        window = {"sliding_window": 128, "query_pre_attn_scalar": 32}
        return Gemma3TextConfig(**SHAPE, **window, num_hidden_layers=12, intermediate_size=128)
    if name == "gptoss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        return GptOssConfig(**SHAPE, **experts, num_hidden_layers=4, intermediate_size=64, sliding_window=128)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    sizes = {"intermediate_size": 64, "intermediate_size_mlp": 128, "attention_chunk_size": 128}
    return Llama4TextConfig(**SHAPE, **experts, **sizes, num_hidden_layers=4)


def make_model(name: str, folder: Path) -> Path:
    """Its folder, in ``folder``; made if it is not there."""
    import torch
    from transformers import AutoModelForCausalLM

    path = folder / name
    if (path / "config.json").exists():
        return path
    torch.manual_seed(7)
    config = config_of(name)
    config.dtype = "float32"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # large weights, so that the text depends on everything that a token attends to
        for weight, values in model.named_parameters():
            if values.dim() >= 2 and name.removesuffix("_wide") not in HYBRIDS:
                torch.nn.init.normal_(values, std=1.0 if "embed" in weight else 1.6 / values.shape[-1] ** 0.5)
            elif values.dim() == 2:
                torch.nn.init.normal_(values, std=1.0 if "embed" in weight else 1.5 / values.shape[-1] ** 0.5)
            elif values.dim() > 2:
                torch.nn.init.normal_(values, std=1.5 / values.shape[-2] ** 0.5)
            if "q_proj.weight" in weight:
                values.mul_(2.0)
    model.save_pretrained(path)
    return path
