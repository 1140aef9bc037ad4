"""What the K and V of a vLLM engine depend on, as text: the names of a remote's objects begin with it.

Owns       the list of what is part of it.
Promises   two engines share a remote only if a block of one means the same in the other. They have the same weights,
           config, dtypes, kernels, layout, share of each rank, vLLM, and making of block hashes. What cannot be known
           is refused by ``ConfigError``, which says what to set.
Does not   know adapters: a request with a LoRA adapter, whose weights may change under its path, does without a remote.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.integrations.vllm.configs import hf_of, told_of
from kvtier.machine.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.integrations.vllm.geometry import Geometry

logger = logging.getLogger("vllm.kvtier")

READS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats that read a folder's safetensors."""
HASHES = ("sha256", "sha256_cbor")
"""Block hashes that are the same in every process, and that nobody can forge."""
FILES = ("*.safetensors", "*.safetensors.index.json", "*.py", "*processor*.json", "*quant*.json")
"""Files of a model's folder: its weights, code, making of images, and quantization."""


def check_engine(config: Any) -> str:
    """How vLLM makes its block hashes. Raises ``ConfigError`` if engines cannot share them, or their K and V."""
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales makes the scales of K and V from an engine's first request; remote_uri needs scales "
            "that all engines have: those of the checkpoint"
        )
    if getattr(config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "weight_transfer_config changes the weights of a running engine, and a remote tier knows one name of them; "
            'leave "remote_uri" out'
        )
    name = config.cache_config.prefix_caching_hash_algo
    if name not in HASHES:
        raise ConfigError(
            f"block hashes are made by {name!r}, which can be forged; a remote needs --prefix-caching-hash-algo sha256"
        )
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    seed_of = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if seed_of is None:
        raise ConfigError("this vLLM does not tell how its block hashes begin, so that they cannot name stored objects")
    return f"{name}/{seed_of(get_hash_fn_by_name(name))}"


def weights_of(config: Any, given: str | None) -> str:
    """The name of the weights: ``given``, or a digest. Raises ``ConfigError`` if there is neither."""
    model = config.model_config
    overrides = getattr(model, "hf_overrides", None)
    beside = overrides.get("quantization_config_file") if isinstance(overrides, Mapping) else None
    files = [] if beside is None else [Path(str(beside))]
    if given is not None:
        return f"given/{given}/{_digest(files)}" if files else f"given/{given}"
    folders, why = _folders(config), ""
    if not folders:
        why = f"{model.model!r} is neither a local folder nor one snapshot in the hub's cache"
    elif config.load_config.load_format not in READS:
        why = f"load_format is {config.load_config.load_format!r}"
    elif not any(list(folder.glob("*.safetensors")) for folder in folders):
        why = f"{folders[0]} has no *.safetensors"
    if why:
        raise ConfigError(
            f'{why}, so that kvtier cannot name the weights by their content; set "model_id" in '
            "kv_connector_extra_config to a name that changes whenever the weights do"
        )
    begun = time.monotonic()
    by_name = {file.name: file for folder in folders for pattern in FILES for file in folder.glob(pattern)}
    found = _digest([*files, *(by_name[name] for name in sorted(by_name))])
    logger.info("kvtier: the weights are %s (read in %.1f s)", found, time.monotonic() - begun)
    return found


def _folders(config: Any) -> list[Path]:
    """Where the model's files lie. Of the hub: the snapshots of weights and config; empty if it is not sure which."""
    model = config.model_config
    if Path(model.model).is_dir():
        return [Path(model.model)]
    from huggingface_hub import snapshot_download

    found, revision = list[Path](), getattr(model, "revision", None)
    for cache in dict.fromkeys((getattr(config.load_config, "download_dir", None), None)):
        try:
            folder = snapshot_download(model.model, revision=revision, cache_dir=cache, local_files_only=True)
            found.append(Path(folder))
        except (OSError, ValueError):  # it is not there, or is no name of the hub
            continue
    commits = {folder.name for folder in found} | {getattr(model.hf_config, "_commit_hash", None)} - {None}
    return found if len(commits) == 1 and getattr(model, "code_revision", None) is None else []


def _name_of(model: str) -> str:
    """What a model is called: its folder's name, or its own on the hub."""
    path = Path(model)
    return path.parent.parent.name.rsplit("--", 1)[-1] if path.parent.name == "snapshots" else path.name


def _digest(files: Sequence[Path]) -> str:
    from kvtier.remote.weights import weights_digest

    try:
        return weights_digest(files, {})
    except OSError as problem:
        raise ConfigError(f"the weights cannot be read: {problem}") from problem


def model_id(config: Any, cache: Any, geometry: Geometry, weights: str, hashes: str, facts: Mapping[int, str]) -> str:
    """A name for all of it. ``cache``: vLLM's ``KVCacheConfig``; ``facts``: ``facts_of`` each worker, by rank."""
    import vllm

    model, own = config.model_config, config.cache_config
    hf = hf_of(model.hf_config.to_dict())
    is_by_length = any(word in json.dumps(hf) for word in ("longrope", '"su"', "dynamic"))
    told = told_of(config) | {
        "vllm": vllm.__version__,
        "transformers": version("transformers"),  # it makes images into numbers
        "weights": weights,
        "config": hf,
        "max_model_len": model.max_model_len if is_by_length else 0,
        "cache_dtype": str(own.cache_dtype),
        "experts": bool(getattr(config.parallel_config, "enable_expert_parallel", False)),
        "groups": [[list(group.layer_names), repr(group.kv_cache_spec)] for group in cache.kv_cache_groups],
        "hashes": [hashes, geometry.hash_tokens, geometry.hashes_per_key],
        "workers": [facts[rank] for rank in sorted(facts)],
    }
    whole = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16)
    return f"{_name_of(model.model)}@{whole.hexdigest()}"


def facts_of(config: Any, num_blocks: int, caches: Mapping[str, Any]) -> str:
    """What only a worker knows: its device, its kernels, and how its KV ``caches`` (tensors by layer) lie."""
    import torch

    device = next(iter(caches.values())).device
    if device.type == "cuda":
        kind = [torch.version.cuda, torch.version.hip, *torch.cuda.get_device_capability(device)]
    else:  # kernels for CPUs lay K out as their instructions want it
        has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: None)
        kind = [torch.backends.cpu.get_cpu_capability(), has_tiles()]
    layers = getattr(getattr(config, "compilation_config", None), "static_forward_context", {})
    backends = {name: getattr(layers.get(name), "attn_backend", None) for name in caches}
    names = {name: backend.get_name() if backend is not None else "" for name, backend in backends.items()}
    lie = [[name, names[name], *_lie(caches[name], num_blocks)] for name in sorted(caches)]
    has_states = any(hasattr(layers.get(name), "mamba_type") for name in caches)
    return json.dumps([torch.__version__, device.type, kind, lie, *(_of_states() if has_states else ())])


def _of_states() -> list[str]:
    """How convolutions' states lie within a page, which the environment says (VLLM_SSM_CONV_STATE_LAYOUT)."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return [str(get_conv_state_layout())]


def _lie(tensor: Any, num_blocks: int) -> list[Any]:
    """Its dtype, and its dimensions with their order in memory. The number of blocks is no part of it."""
    strides, sizes = tensor.stride(), [int(size) for size in tensor.shape]
    order = sorted(range(len(sizes)), key=lambda k: (-strides[k], k))
    return [str(tensor.dtype), order, [size if size % num_blocks else f"{size // num_blocks} n" for size in sizes]]
