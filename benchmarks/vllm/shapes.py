"""Layers of models as vLLM's own classes have them, and the groups that vLLM makes of them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from benchmarks.vllm import tiny

BLOCK_TOKENS = 16
MOST_TOKENS = 131_072


@dataclass(frozen=True)
class Shape:
    """``windowed``: bool by layer; of KV heads and their size, in bfloat16.

    With ``state`` these layers keep a recurrent state instead, of these parts' shapes, in bfloat16.
    """

    windowed: tuple[bool, ...]
    window_tokens: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int = BLOCK_TOKENS
    state: tuple[tuple[int, ...], ...] = ()

    @property
    def layer_token_bytes(self) -> int:
        """K and V of a token in a layer."""
        return 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def end_bytes(self) -> int:
        """What a hit needs at its end beside all tokens of full layers: windows, or a state."""
        each = sum(2 * prod(part) for part in self.state) or self.window_tokens * self.layer_token_bytes
        return self.windowed.count(True) * each


SHAPES = {
    "Gemma-3-27B": Shape(tuple(i % 6 != 5 for i in range(62)), 1024, 16, 128),
    "gpt-oss-120b": Shape(tuple(i % 2 == 0 for i in range(36)), 128, 8, 64),
    "Llama-3.1-8B": Shape((False,) * 32, 0, 8, 128),
    "Qwen3-Next-80B": Shape(tuple(i % 4 != 3 for i in range(48)), 0, 2, 256, 544, ((3, 8192), (32, 128, 128))),
}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """With the config of some model that vLLM knows: its scheduler asks for limits, and never for layers."""
    folder = tempfile.TemporaryDirectory()
    config: Any = tiny.config(MOST_TOKENS)
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(folder.name)
    return folder


def engine_config(
    num_blocks: int,
    most_requests: int,
    chunk_tokens: int,
    connector: dict[str, Any] | None = None,
    shape: Shape = SHAPES["Llama-3.1-8B"],
) -> Any:
    """vLLM's ``VllmConfig``. ``connector``: its ``KVTransferConfig``."""
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig

    config = VllmConfig(
        model_config=ModelConfig(
            model=_folder().name, skip_tokenizer_init=True, max_model_len=MOST_TOKENS, dtype="bfloat16", seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=most_requests,
            max_num_batched_tokens=chunk_tokens,
            max_model_len=MOST_TOKENS,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(
            block_size=shape.block_tokens,
            enable_prefix_caching=True,
            num_gpu_blocks_override=num_blocks,
            mamba_cache_mode="align" if shape.state else "none",
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(**connector) if connector else None,
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.kv_cache_layout = "LBNHC"  # FlashAttention's on a GPU: layer by layer
    return config


def cache_config(config: Any, shape: Shape) -> Any:
    """vLLM's ``KVCacheConfig`` of this shape, grouped and laid out by its own functions."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    common = {
        "block_size": shape.block_tokens,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_dim,
        "dtype": torch.bfloat16,
    }
    if shape.state:
        local: Any = MambaSpec(
            block_size=shape.block_tokens,
            shapes=shape.state,
            dtypes=(torch.bfloat16,) * len(shape.state),
            page_size_padded=shape.block_tokens * shape.layer_token_bytes,
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode="align",
        )
    else:
        local = SlidingWindowSpec(**common, sliding_window=shape.window_tokens)
    specs = {
        f"model.layers.{i}.self_attn.attn": local if windowed else FullAttentionSpec(**common)
        for i, windowed in enumerate(shape.windowed)
    }
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    found = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 44)
    found = kv_cache_utils.generate_scheduler_kv_cache_config([found])
    config.cache_config.num_gpu_blocks = found.num_blocks
    return found
