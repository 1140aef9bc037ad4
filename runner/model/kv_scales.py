"""Scales of float8 K and V from a user's source.

Owns       the forms in which scales come: a mapping, a JSON file, a checkpoint's tensors.
Promises   scales by model layer, {0: {"k": [per KV head], "v": [...]}, ...}, as ``CacheSpec.with_kv_scales`` takes and
           checks them.
Does not   compute scales (calibrate.py) or choose when to quantise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier import ConfigError
from kvtier.geometry.dtypes import DTYPE_BYTES, dtype_name
from kvtier.machine.integers import shown

LayerScales = dict[int, dict[str, Any]]
"""Scales by model layer: "k" and "v", each a number or one number per KV head."""


def read_scales(source: str | Path | Mapping[Any, Any]) -> LayerScales:
    """Scales from a mapping, a .json file that ``save_scales`` wrote, a .safetensors file, or a checkpoint's folder.

    Raises ``ConfigError`` for a source that cannot be read as scales, ``ModelLoadError`` for a damaged .safetensors
    file.
    """
    if isinstance(source, Mapping):
        return _by_layer(source, "kv_scales")
    path = _there(source)
    if not _has_tensors(path):
        return _of_json(path)
    from runner.model import checkpoint  # which imports torch

    found = checkpoint.kv_scales(path)
    if found is None:
        raise ConfigError(f"{path} has no tensors named k_scale and v_scale")
    return found


def _there(source: object) -> Path:
    if not isinstance(source, (str, Path)):
        raise ConfigError(f"kv_scales is a path or a mapping from layers to scales, got {type(source).__name__}")
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(f"kv_scales cannot be read from {path}: No such file or directory")
    return path


def _has_tensors(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".safetensors"


def _of_json(path: Path) -> LayerScales:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"kv_scales cannot be read from {path}: {problem}") from None
    if not isinstance(content, dict):
        raise ConfigError(f'{path} must hold {{"0": {{"k": [...], "v": [...]}}, ...}}')
    return _by_layer(content, str(path))


def check_kv_options(kv_cache_dtype: Any, kv_scales: str | Path | Mapping[Any, Any] | None) -> LayerScales | None:
    """The scales of these options of ``LLM``; ``ConfigError`` for options that no model could be served with."""
    check_kv_names(kv_cache_dtype, kv_scales is not None)
    return None if kv_scales is None else read_scales(kv_scales)


def check_kv_text(kv_cache_dtype: str | None, kv_scales: str | None) -> None:
    """Raises what ``check_kv_options`` would, as far as no tensors need be read for it."""
    check_kv_names(kv_cache_dtype, kv_scales is not None)
    if kv_scales is not None and not _has_tensors(path := _there(kv_scales)):
        _of_json(path)


def check_kv_names(kv_cache_dtype: Any, has_scales: bool) -> None:
    """Raises ``ConfigError`` for a dtype that kvtier does not store, and for scales of one that takes none."""
    is_narrow = False
    if kv_cache_dtype not in (None, "auto"):
        is_narrow = DTYPE_BYTES[dtype_name(kv_cache_dtype, "kv_cache_dtype")] == 1
    if has_scales and not is_narrow:
        raise ConfigError('kv_scales are for K and V in 8 bits: use kv_cache_dtype="fp8" with them')


def save_scales(scales: LayerScales, path: str | Path) -> None:
    """Writes ``scales`` as JSON, for ``read_scales``. Raises ``ConfigError`` if nothing can be written."""
    try:
        Path(path).write_text(json.dumps(scales, indent=1) + "\n", encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"scales cannot be written to {path}: {problem}") from None


def _by_layer(content: Mapping[Any, Any], where: str) -> LayerScales:
    """Keys as integers; JSON has only strings."""
    try:
        return {int(layer): pair for layer, pair in content.items()}
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: layers are numbers, got {shown(list(content)[:3])}") from None
