"""Tiny GGUF files, written with llama.cpp's own package: a Llama of two layers that reads bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = list(bytes_to_unicode().values())
WORDS = [*BYTES, "Ġt", "he", "Ġthe", "<|start|>", "<|end|>", "<|turn|>"]
MERGES = ["Ġ t", "h e", "Ġt he"]
START, END, TURN = len(WORDS) - 3, len(WORDS) - 2, len(WORDS) - 1
CHAT = "{% for m in messages %}<|start|>{{ m['content'] }}<|turn|>{% endfor %}"
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
_KV = HIDDEN // HEADS * KV_HEADS
_LAYER = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (_KV, HIDDEN),
    "attn_v": (_KV, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
SHAPES = {
    "token_embd.weight": (len(WORDS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    **{f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in _LAYER.items()},
}


def write(
    file: Path,
    quantized: bool = False,
    architecture: str = "llama",
    more: Callable[[GGUFWriter], object] = lambda _: None,
    without: str = "",
    merges: list[str] | None = MERGES,
) -> Path:
    """Writes a model of seeded weights, matrices in Q8_0 or all in float32.

    ``without``: a tensor that it lacks; ``merges``: of its tokenizer, None for no tokenizer.
    """
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(WORDS))
    if merges is not None:
        _tokenizer(writer, merges)
    more(writer)
    draw = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        values: Any = draw.normal(0, 1 / 4, shape).astype(np.float32)
        if len(shape) == 1:
            values = 1 + values
        if name == without:
            continue
        if quantized and len(shape) == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tokenizer(writer: GGUFWriter, merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([TokenType.NORMAL] * START + [TokenType.CONTROL] * 3)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(TURN)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)
