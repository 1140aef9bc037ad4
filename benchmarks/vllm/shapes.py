"""Layers of models as vLLM's own classes have them, and the groups that vLLM makes of them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.vllm import tiny

BLOCK_TOKENS = 16
MOST_TOKENS = 131_072


@dataclass(frozen=True)
class Shape:
    """``windowed``: bool by layer; of KV heads and their size, in bfloat16."""

    windowed: tuple[bool, ...]
    window_tokens: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "Gemma-3-27B": Shape(tuple(i % 6 != 5 for i in range(62)), 1024, 16, 128),
    "gpt-oss-120b": Shape(tuple(i % 2 == 0 for i in range(36)), 128, 8, 64),
    "Llama-3.1-8B": Shape((False,) * 32, 0, 8, 128),
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
    num_blocks: int, most_requests: int, chunk_tokens: int, connector: dict[str, Any] | None = None
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
            block_size=BLOCK_TOKENS, enable_prefix_caching=True, num_gpu_blocks_override=num_blocks
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
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    common = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": shape.num_kv_heads,
        "head_size": shape.head_dim,
        "dtype": torch.bfloat16,
    }
    specs = {
        f"model.layers.{i}.self_attn.attn": SlidingWindowSpec(**common, sliding_window=shape.window_tokens)
        if windowed
        else FullAttentionSpec(**common)
        for i, windowed in enumerate(shape.windowed)
    }
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    found = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 44)
    found = kv_cache_utils.generate_scheduler_kv_cache_config([found])
    config.cache_config.num_gpu_blocks = found.num_blocks
    return found
