"""A tiny model for vLLM with Gemma-3's shape: five layers with a window to each with full attention.

It needs no hub and no tokenizer.
"""

from __future__ import annotations

import random
from pathlib import Path

VOCABULARY = 512
WINDOW = 128
LAYERS = 12
HEAD_DIM = 32


def save(folder: Path, max_tokens: int) -> Path:
    """Writes the model, 12 layers with random weights in float32; returns its folder.

    The weights are large, so that greedy text depends on all content that a token attends to.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config(max_tokens), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 1.0 if "embed" in name else 1.6 / weight.shape[-1] ** 0.5
                weight.normal_(std=2 * scale if "q_proj" in name else scale)
    model.save_pretrained(folder)
    return folder


def config(max_tokens: int) -> object:
    """Its transformers config."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=WINDOW,
        max_position_embeddings=max_tokens,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Random tokens of its vocabulary, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(num_tokens)]
