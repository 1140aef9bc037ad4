"""Layers of models as vLLM's own classes have them, and the groups that vLLM makes of them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
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

    hash_tokens = property(lambda self: self.block_tokens)
    """Of a block hash."""
    layout = "LBNHC"
    """FlashAttention's on a GPU: layer by layer."""

    def specs(self) -> dict[str, Any]:
        """vLLM's spec of each layer."""
        import torch
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

        common = {
            "block_size": self.block_tokens,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_dim,
            "dtype": torch.bfloat16,
        }
        if self.state:
            local: Any = MambaSpec(
                block_size=self.block_tokens,
                shapes=self.state,
                dtypes=(torch.bfloat16,) * len(self.state),
                page_size_padded=self.block_tokens * self.layer_token_bytes,
                mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
                mamba_cache_mode="align",
            )
        else:
            local = SlidingWindowSpec(**common, sliding_window=self.window_tokens)
        return {
            f"model.layers.{i}.self_attn.attn": local if windowed else FullAttentionSpec(**common)
            for i, windowed in enumerate(self.windowed)
        }


@dataclass(frozen=True)
class DeepSeekV4Flash:
    """Its specs as vLLM's own model code makes them, in its packed format of 8 bits.

    ``retention``: vLLM's ``prefix_cache_retention_interval``; with None all blocks of windows and rows can be found.
    """

    retention: int | None = 0
    state = ()
    block_tokens, hash_tokens = 256, 4
    layout = "BLNHC"
    """Pages of several sizes lie block by block."""
    RATES = (0, 0, *(4, 128) * 20, 4)
    """Tokens of an entry, by layer."""
    ROWS = MappingProxyType({4: (4, 8), 128: (8, 128)})
    """By rate, tokens of a block of rows and of the window that they are kept for."""

    def specs(self) -> dict[str, Any]:
        """vLLM's spec of each place of a layer."""
        import torch
        from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

        common = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
        packed = {"head_size": 512, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 584}
        packed |= common | {"model_version": "deepseek_v4"}
        found: dict[str, Any] = {}
        for i, rate in enumerate(self.RATES):
            name = f"model.layers.{i}.attn"
            found[f"{name}.swa_cache"] = SlidingWindowMLASpec(**packed, block_size=64, sliding_window=128)
            if not rate:
                continue
            block, span = self.ROWS[rate]
            rows = common | {"block_size": block, "sliding_window": span, "dtype": torch.float32}
            both = span // rate * 2  # a row has a value and a weight, for an entry, or for two that overlap
            found[f"{name}.mla_attn"] = MLAAttentionSpec(**packed, block_size=256, tokens_per_state=rate)
            found[f"{name}.mla_attn.compressor.state_cache"] = SlidingWindowMLASpec(**rows, head_size=both * 512)
            if rate == 4:
                keys = {"head_size": 132, "dtype": torch.uint8, "block_size": 256, "tokens_per_state": 4}
                found[f"{name}.indexer.k_cache"] = MLAAttentionSpec(**common, **keys)
                found[f"{name}.indexer.compressor.state_cache"] = SlidingWindowMLASpec(**rows, head_size=both * 128)
        return found


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
    shape: Shape | DeepSeekV4Flash = SHAPES["Llama-3.1-8B"],
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
    config.cache_config.kv_cache_layout = shape.layout
    if isinstance(shape, DeepSeekV4Flash):
        config.cache_config.prefix_cache_retention_interval = shape.retention
    return config


def cache_config(config: Any, shape: Shape | DeepSeekV4Flash) -> Any:
    """vLLM's ``KVCacheConfig`` of this shape, grouped and laid out by its own functions."""
    from vllm.v1.core import kv_cache_utils

    groups = kv_cache_utils.get_kv_cache_groups(config, shape.specs())
    found = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 44)
    found = kv_cache_utils.generate_scheduler_kv_cache_config([found])
    config.cache_config.num_gpu_blocks = found.num_blocks
    return found
