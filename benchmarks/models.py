"""Real models, as transformers configs with the hyperparameters of their published checkpoints.

Tests, ``benchmarks/capacity`` and the README's example of ``kvtier plan`` share them: the shapes of layers, heads,
windows and experts are theirs, so bytes and FLOPs are; nothing is downloaded. Where the checkpoint also has a vision
tower, this is the config of its language model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig


def gpt_oss_20b() -> Any:
    """24 layers, every other one with a window of 128; 32 experts, 4 of them per token."""
    return _gpt_oss(num_hidden_layers=24, num_local_experts=32)


def gpt_oss_120b() -> Any:
    """36 layers, every other one with a window of 128; 128 experts, 4 of them per token."""
    return _gpt_oss(num_hidden_layers=36, num_local_experts=128)


def gemma_3_12b() -> Any:
    """48 layers, five with a window of 1,024 to each with full attention."""
    return _gemma_3(
        num_hidden_layers=48,
        hidden_size=3840,
        intermediate_size=15360,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        query_pre_attn_scalar=256,
    )


def gemma_3_27b() -> Any:
    """62 layers, five with a window of 1,024 to each with full attention; the last two have windows."""
    return _gemma_3(
        num_hidden_layers=62,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        query_pre_attn_scalar=168,
    )


def gemma_4_31b() -> Any:
    """60 layers, five with a window of 1,024 to each with full attention, which has heads of its own shape."""
    return AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=60,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        attention_k_eq_v=True,
        sliding_window=1024,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        vocab_size=262144,
        max_position_embeddings=262144,
        dtype="bfloat16",
    )


def llama_4_scout() -> Any:
    """48 layers, three with chunks of 8,192 to each with full attention; 16 experts, one of them per token."""
    return AutoConfig.for_model(
        "llama4_text",
        num_hidden_layers=48,
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        attention_chunk_size=8192,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        vocab_size=202048,
        max_position_embeddings=10485760,
        dtype="bfloat16",
    )


def mistral_7b() -> Any:
    """Version 0.1: 32 layers, all with a window of 4,096."""
    return AutoConfig.for_model(
        "mistral",
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        sliding_window=4096,
        vocab_size=32000,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )


def llama_3_1_8b() -> Any:
    """32 layers, all with full attention."""
    return AutoConfig.for_model(
        "llama",
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        dtype="bfloat16",
    )


def smollm2_135m() -> Any:
    """30 layers, all with full attention."""
    return AutoConfig.for_model(
        "llama",
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=100000,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        dtype="float32",
    )


def gemma_3_270m() -> Any:
    """18 layers, five with a window of 512 to each with full attention."""
    return _gemma_3(
        num_hidden_layers=18,
        hidden_size=640,
        intermediate_size=2048,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
        vocab_size=262144,
        max_position_embeddings=32768,
        dtype="float32",
    )


def _gpt_oss(**fields: Any) -> Any:
    return AutoConfig.for_model(
        "gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
        num_experts_per_tok=4,
        vocab_size=201088,
        max_position_embeddings=131072,
        dtype="bfloat16",
        **fields,
    )


def _gemma_3(**fields: Any) -> Any:
    usual = {
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    }
    return AutoConfig.for_model("gemma3_text", **usual | fields)


MODELS: dict[str, Callable[[], Any]] = {
    "gpt-oss-20b": gpt_oss_20b,
    "gpt-oss-120b": gpt_oss_120b,
    "Gemma-3-12B": gemma_3_12b,
    "Gemma-3-27B": gemma_3_27b,
    "Gemma-4-31B": gemma_4_31b,
    "Llama-4-Scout": llama_4_scout,
    "Mistral-7B-v0.1": mistral_7b,
    "Llama-3.1-8B": llama_3_1_8b,
}
"""Model name -> its config."""


def qwen3_next_delta() -> Any:
    """Two layers of Qwen3-Next-80B-A3B: the gated delta rule, 16 heads of keys and 32 of values; few experts."""
    return AutoConfig.for_model(
        "qwen3_next",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=1024,
        dtype="bfloat16",
    )


def granite_4_small_mamba() -> Any:
    """Two layers of Granite-4.0-H-Small: Mamba2, 128 heads of 64, states of 128; few experts."""
    return AutoConfig.for_model(
        "granitemoehybrid",
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_chunk_size=256,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=1024,
        dtype="bfloat16",
    )


RECURRENT: dict[str, Callable[[], Any]] = {
    "Qwen3-Next": qwen3_next_delta,
    "Granite-4.0-H-Small": granite_4_small_mamba,
}
"""Models with recurrent layers -> the config of one of these layers, and one that attends."""
