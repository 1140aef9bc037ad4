"""vLLM's config objects as text, for the names of a remote tier's objects.

Owns       the fields that say nothing of K and V.
Promises   every other field is in the text: one that a later vLLM adds makes other names, never shared ones. So does
           a value that has no form of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

OF_HF = ("_name_or_path", "transformers_version")
OF_MODEL = frozenset(
    (
        # named by their content, or in another form
        *("model", "hf_config", "hf_config_path", "config_format", "multimodal_config"),
        *("max_model_len", "original_max_model_len", "spec_target_max_model_len", "seed"),
        # before token ids, and after logits
        *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "io_processor_plugin"),
        *("max_logprobs", "logprobs_mode", "use_fp64_gumbel", "return_sampling_mask", "logits_processors"),
        *("generation_config", "override_generation_config"),
        # a server's own
        *("allowed_local_media_path", "allowed_media_domains", "hf_token", "served_model_name"),
        *("renderer_num_workers", "allow_deprecated_quantization"),
        # memory
        *("enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph"),
        *("enable_nccl_comm_suspend", "enable_cumem_allocator"),
    )
)
OF_IMAGES = frozenset(
    (
        *("mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
        *("mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "skip_mm_profiling"),
    )
)
OF_LOAD = frozenset(
    (
        *("download_dir", "device", "use_tqdm_on_load", "pt_load_map_location"),
        *("safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
    )
)


def told_of(config: Any) -> dict[str, Any]:
    """The configs in a ``VllmConfig`` whose fields K and V may depend on."""
    model, load = config.model_config, getattr(config, "load_config", None)
    return {
        "model": fields_of(model, OF_MODEL),
        "seed": getattr(model, "seed", 0) if getattr(load, "load_format", None) == "dummy" else 0,
        "images": fields_of(getattr(model, "multimodal_config", None), OF_IMAGES),
        "attention": fields_of(getattr(config, "attention_config", None)),
        "load": fields_of(load, OF_LOAD),
        "platform": plain(getattr(config, "additional_config", None)),
    }


def hf_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config of transformers as a dict."""
    return {name: value for name, value in plain(hf).items() if name not in OF_HF}


def fields_of(config: Any, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """All fields of a config but some."""
    if config is None:
        return {}
    names = [field.name for field in fields(config)] if is_dataclass(config) else list(vars(config))
    return {name: plain(getattr(config, name, None)) for name in names if name not in without}


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(of) for name, of in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, fields_of(value)]
    if isinstance(value, (list, tuple)):
        return [plain(of) for of in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(plain(of)) for of in value)
    if hasattr(value, "to_dict") and not isinstance(value, type):  # a config of transformers
        return [type(value).__qualname__, hf_of(value.to_dict())]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__qualname__"):  # a class, or a function
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
