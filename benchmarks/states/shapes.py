"""Models with states, as numbers; and the same without them."""

from __future__ import annotations

from typing import NamedTuple

from kvtier import CacheSpec, FullAttention, GroupSpec, Part, RecurrentState

BLOCK_TOKENS = 64


class Shape(NamedTuple):
    """Full-attention layers, and layers with a state."""

    full_layers: int
    kv_heads: int
    head_dim: int
    state_layers: int
    parts: tuple[Part, ...]

    def spec(self, states: bool = True, block_tokens: int = BLOCK_TOKENS) -> CacheSpec:
        """In bfloat16, states in float32; without ``states``: full attention alone."""
        full = GroupSpec(
            "full",
            FullAttention(),
            self.full_layers,
            self.kv_heads,
            self.head_dim,
            block_tokens=block_tokens,
        )
        state = GroupSpec("state", RecurrentState(self.parts), self.state_layers)
        return CacheSpec([full, state] if states else [full])


def _delta(keys: int, values: int) -> tuple[Part, ...]:
    """Of so many heads of 128: the window of the short convolution, and the state."""
    channels = 128 * (2 * keys + values)
    return Part("conv0", (channels, 4), "bfloat16"), Part("recurrent0", (values, 128, 128), "float32")


QWEN3_NEXT = Shape(12, 2, 256, 36, _delta(16, 32))
"""Qwen3-Next-80B: 24,576 bytes a token, a state of 74 MiB."""
QWEN3_5_27B = Shape(16, 4, 256, 48, _delta(16, 48))
"""Qwen3.5-27B and its kin: 65,536 bytes a token, a state of 148 MiB."""
GLM_FLASH = Shape(11, 1, 352, 34, _delta(32, 32))
"""GLM-5.3-Flash by its bytes: 15,488 a token with its index, a state of 71 MiB."""
