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


def config_of(name: str) -> Any:
    """Of the model of this name."""
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
            if values.dim() >= 2:
                torch.nn.init.normal_(values, std=1.0 if "embed" in weight else 1.6 / values.shape[-1] ** 0.5)
            if "q_proj.weight" in weight:
                values.mul_(2.0)
    model.save_pretrained(path)
    return path
