"""Where a model is: a folder here, a GGUF file, or a hub id.

Promises   what cannot be any of them is ``ModelLoadError``. Nothing here imports torch or asks a network, so a command
           line tells it at once; ``checkpoint`` has the same rules from here.
Does not   read weights, or ask the hub.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from kvtier.geometry.dtypes import DTYPE_ALIASES
from kvtier.machine.errors import ConfigError
from kvtier.machine.integers import shown
from runner.errors import ModelLoadError
from runner.model.gguf_header import MAGIC, checked_header

WEIGHTS = ("float32", "float16", "bfloat16", "float64", "double")
"""Names of dtypes that weights can be read as; ``DTYPE_ALIASES`` has more of them."""
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?|\.\d+")


def given_path(path_or_id: object) -> Path:
    """What was given, as a path; ``ModelLoadError`` for what is no text and no path."""
    if not isinstance(path_or_id, (str, PathLike)) or not str(path_or_id).strip():
        raise ModelLoadError(f"a model is given as a folder or a hub id, got {shown(path_or_id)}")
    return Path(path_or_id).expanduser()


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at ``path``, or in a folder without safetensors; None if there is none.

    Raises ``ModelLoadError`` for a folder with several.
    """
    if path.is_dir():
        return None if any(path.glob("*.safetensors")) else _only(path)
    try:
        with path.open("rb") as file:
            return path if path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC else None
    except OSError:
        return None


def _only(folder: Path) -> Path | None:
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4]) + (", ..." if len(found) > 4 else "")
        raise ModelLoadError(f"{folder} has {len(found)} GGUF files ({names}); name one of them")
    return found[0] if found else None


def find_here(path_or_id: str | Path) -> Path | None:
    """The folder or GGUF file on this machine; None if it is for the hub to say. Raises ``ModelLoadError``."""
    path = given_path(path_or_id)
    if (file := find_gguf(path)) is not None:
        return file
    if path.is_dir():
        return path
    name = str(path_or_id)
    if path.exists() or path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        found = "is neither a folder nor a GGUF file" if path.exists() else "is not there"
        raise ModelLoadError(
            f"{name} {found}; give a folder with config.json and *.safetensors, a GGUF file, or a hub id"
        )
    if _NUMBER.fullmatch(name.strip()):
        raise ModelLoadError(f"{shown(name)} is a number, and no model; is it the value of another option?")
    check_hub_id(name)
    return None


def check_hub_id(name: str) -> None:
    """Raises ``ModelLoadError`` for what no hub can have. The hub's own client checks it, if it is installed."""
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
    except ImportError:
        return
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelLoadError(f"{shown(name)} is neither a folder here nor a hub id: {error}") from error


def check_config_file(folder: Path) -> None:
    """Raises ``ModelLoadError`` for a folder without config.json."""
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json; give the folder that save_pretrained wrote")


def check(path_or_id: str | Path) -> None:
    """Raises ``ModelLoadError`` if no model can be there, as far as is known without torch and the hub."""
    found = find_here(path_or_id)
    if found is not None and found.is_file():
        checked_header(found)
    elif found is not None:
        check_config_file(found)


def check_config(path_or_id: str | Path) -> None:
    """The same where a config alone is enough: a config.json may be given too."""
    path = given_path(path_or_id)
    if not path.is_file() or find_gguf(path) is not None:
        check(path_or_id)


def weights_dtype_name(dtype: object) -> str:
    """torch's name of a dtype of weights, by a name or a torch.dtype; "auto" for None and "auto".

    Raises ``ConfigError``.
    """
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return "auto"
    name = (dtype if isinstance(dtype, str) else shown(dtype)).removeprefix("torch.")
    name = DTYPE_ALIASES.get(name, name)
    if name.startswith("float8_"):
        raise ConfigError(f'weights cannot be {shown(dtype)}; for K and V in 8 bits use kv_cache_dtype="fp8"')
    if name not in WEIGHTS:
        raise ConfigError(f"unknown dtype {shown(dtype)}; use float32, float16 or bfloat16")
    return name
