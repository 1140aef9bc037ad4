"""A model's identity in a shared remote tier: a name with a digest of the weights and of how they are computed.

Promises   equal identities have equal weights and an equal config, byte by byte, but for a chance of 2^-64. They also
           have the same dtype, attention backend and kind of device: with others K and V differ in rounding. Every byte
           of the weights is read: two fine-tunes may differ in a few numbers of one tensor. From memory that takes
           about a second for 10 GB a core; files that are not in the page cache are read from the disk.
           An exact model's K and V have this CPU and torch in their name, too (``arithmetic``).
Does not   tell apart versions of torch, transformers or a kernel library, nor GPUs of two kinds. Give ``model_id``
           where that matters. It is no defence against weights that were made to have the digest of others.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

import kvtier
from kvtier.machine.loops.machine_code import target
from kvtier.remote import weights
from runner.errors import ModelLoadError
from runner.model.checkpoint import weight_files
from runner.model.fused import packed


def model_id(model: Any, folder: Path) -> str:
    """``folder``: the folder or GGUF file that ``model``, a ``HybridModel``, was loaded from. Raises
    ``ModelLoadError``."""
    computed = [str(model.dtype), str(model.attention.name), str(model.device.type)]
    computed += [sort for sort, modules in model.fused.items() if modules]
    whole = hashlib.blake2b(json.dumps([weights_digest(folder), *computed]).encode(), digest_size=16)
    return f"{model.name or 'model'}@{whole.hexdigest()}"


def arithmetic(dtype: torch.dtype) -> str:
    """Names what the bits of an exact model of ``dtype`` depend on beside itself: this CPU, as torch and loops use it,
    torch, this version, and whose products its weights have."""
    products = packed.chosen(dtype).__name__
    parts = torch.__version__, torch.backends.cpu.get_cpu_capability(), target(), kvtier.__version__, products
    return f"exact@{hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()}"


def weights_digest(folder: Path) -> str:
    """32 hexadecimal digits, of the weights and config.json in a folder, or of a GGUF file."""
    files = [folder] if folder.is_file() else weight_files(folder)
    if not files:
        raise ModelLoadError(f"{folder} has no weights: no *.safetensors")
    config = {} if folder.is_file() else _config(folder)
    try:
        return weights.weights_digest(files, config)
    except OSError as problem:
        raise ModelLoadError(f"the weights in {folder} cannot be read ({problem})") from problem


def _config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError) as problem:
        raise ModelLoadError(f"{folder / 'config.json'} cannot be read ({problem})") from problem
