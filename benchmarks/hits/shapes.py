"""Layers of models, as numbers: no cache and no engine is imported here."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Local(Enum):
    """What a layer sees that does not see all."""

    NONE = "none"
    WINDOW = "window"
    CHUNK = "chunk"


class Shape(NamedTuple):
    """``span_tokens``: of a window or chunk."""

    full_layers: int
    local_layers: int
    local: Local
    span_tokens: int
    num_kv_heads: int
    head_dim: int

    @property
    def layer_token_bytes(self) -> int:
        """K and V of a token in a layer, in bfloat16."""
        return 2 * self.num_kv_heads * self.head_dim * 2

    def working_set_bytes(self, distinct_tokens: int, sessions: int) -> int:
        """All tokens in full layers, and one window (half a chunk, on average) a session."""
        kept = self.span_tokens // (2 if self.local is Local.CHUNK else 1)
        return self.layer_token_bytes * (distinct_tokens * self.full_layers + sessions * self.local_layers * kept)


SHAPES = {
    "gemma3": Shape(10, 52, Local.WINDOW, 1024, 16, 128),
    "gptoss": Shape(18, 18, Local.WINDOW, 128, 8, 64),
    "llama4": Shape(12, 36, Local.CHUNK, 8192, 8, 128),
    "full": Shape(32, 0, Local.NONE, 0, 8, 128),
}
"""Gemma-3-27B, gpt-oss-120b, Llama 4 and Llama-3.1-8B."""
