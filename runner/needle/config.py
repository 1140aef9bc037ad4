"""Configuration of the needle model, in transformers' own field names.

Any reader of a hybrid model's config can read it: ``layer_types``, ``sliding_window``, ``attention_chunk_size``. The
one unusual field is ``num_attention_heads_per_layer``. Full attention over a long context costs time in proportion to
its query heads, and this model needs only one there.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from transformers import PreTrainedConfig

WINDOW_TOKENS = 256
CHUNK_TOKENS = 1536
"""Not a power of two: a prompt of 90,112 or 131,072 tokens ends inside a chunk, so its answer can see a header."""


class NeedleConfig(PreTrainedConfig):
    """Shape of the model; the defaults are the bundled weights'.

    Layers 0 and 2 are sliding, layer 1 is chunked-local, layer 3 is full. All share one KV shape: one head of 64.
    Rotary positions apply to the first ``partial_rotary_factor`` of a head, in the sliding layers only.
    ``num_attention_heads`` is the largest of ``num_attention_heads_per_layer``.
    Raises ``ValueError`` when the per-layer lists and ``num_hidden_layers`` disagree.
    """

    model_type = "kvtier_needle"

    vocab_size: int = 461
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_attention_heads_per_layer: list[int] = field(default_factory=lambda: [8, 1, 8, 1])
    num_key_value_heads: int = 1
    head_dim: int = 64
    layer_types: list[str] = field(
        default_factory=lambda: ["sliding_attention", "chunked_attention", "sliding_attention", "full_attention"]
    )
    sliding_window: int = WINDOW_TOKENS
    attention_chunk_size: int = CHUNK_TOKENS
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 150.0, "partial_rotary_factor": 0.5}
    )
    max_position_embeddings: int = 1 << 20
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 1
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("layer_types", "num_attention_heads_per_layer"):
            if len(getattr(self, name)) != self.num_hidden_layers:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.num_hidden_layers} layers")
        super().__post_init__(**kwargs)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that carry a position."""
        return int(self.head_dim * self.rope_parameters["partial_rotary_factor"])
