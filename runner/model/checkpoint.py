"""A checkpoint, from a folder or a hub id, to a transformers model in memory.

Owns       the source of files, and the parts that a checkpoint must have (and may have: scales of K and V).
Promises   weights come from safetensors, or from one GGUF file (gguf.py), and are complete: a missing weight is an
           error, not a random tensor. Any fault of the files is ``ModelLoadError``, which names the fix.
Does not   run the model, or any code that a checkpoint brings along.
"""

from __future__ import annotations

import codecs
import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoTokenizer,
)

from kvtier.machine.errors import UnsupportedModel
from kvtier.machine.integers import shown
from runner.errors import ModelLoadError
from runner.model import gguf, mxfp4, place
from runner.model.gguf_header import Header, checked_header

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_OTHER_FORMATS = ["original/*", "metal/*", "onnx/*", "consolidated*"]
_SCALE = re.compile(r"\blayers\.(\d+)\.(?:[\w.]+\.)?(?:([kv])_scale|([kv])_proj\.output_scale)$")
"""model.layers.3.self_attn.k_scale (llm-compressor), ...k_proj.k_scale (ModelOpt), ...k_proj.output_scale (Quark)."""
_FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors' names of types that are read as the requested dtype; other types are read as they are."""
_JSON_NAMES = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


def find_folder(path_or_id: str | Path, files: Sequence[str] = _FILES) -> Path:
    """The local folder of a checkpoint: the path itself, or the hub's snapshot of that id (downloaded if need be).

    For a GGUF file, or a folder with one and without safetensors, that file. ``files``: patterns of the files wanted
    from the hub.
    """
    if (here := place.find_here(path_or_id)) is not None:
        return here
    name = str(path_or_id)
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), ignore_patterns=_OTHER_FORMATS))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelLoadError(
            f"{shown(name)} is no folder here, and the hub did not give it ({_line(error)}); check the id, "
            f"log in with `hf auth login` if it is gated, or run `hf download {name}` where there is a network"
        ) from error


def name_of(path_or_id: str | Path, folder: Path) -> str:
    """A checkpoint's name: a GGUF file's without its ending, else the folder's or the hub id."""
    if folder.is_file():
        return folder.stem
    return Path(path_or_id).name if Path(path_or_id).exists() else str(path_or_id)


def find_config(path_or_id: str | Path) -> Any:
    """The transformers config of a folder, a config.json, a GGUF file or a hub id; no weights are read or needed."""
    path = place.given_path(path_or_id)
    for file in (path, path / "config.json"):
        if file.is_file() and place.find_gguf(file) is None:
            return _config_of(file)
    return read_config(find_folder(path_or_id, ["config.json"]))


def read_config(folder: Path) -> Any:
    """The checkpoint's transformers config; for a GGUF file, from its head."""
    if folder.is_file():
        return copy.deepcopy(_config_of_gguf(checked_header(folder)))
    place.check_config_file(folder)
    return _config_of(folder / "config.json")


@lru_cache(maxsize=1)  # transformers needs seconds for a large vocabulary, and LLM asks twice
def _config_of_gguf(header: Header) -> Any:
    try:
        with gguf.arguments(header.file) as arguments:
            config = AutoConfig.from_pretrained(**arguments, trust_remote_code=False)
    except Exception as error:  # of any kind, for keys that are not as the loader expects them
        gguf.refuse_unreadable(header, error)
        raise ModelLoadError(
            f"{header.file} does not describe a model of architecture {header.architecture!r} ({_line(error)})"
        ) from error
    gguf.check_config(header, config)
    return config


def _config_of(file: Path) -> Any:
    data = _check_json(file)
    try:
        if not data.startswith(codecs.BOM_UTF8):
            return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        with TemporaryDirectory() as folder:  # transformers takes the mark for damage
            copy = Path(folder) / file.name
            copy.write_bytes(data.removeprefix(codecs.BOM_UTF8))
            return AutoConfig.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # config classes check their fields in ways of their own
        raise ModelLoadError(
            f"{file} cannot be read ({_line(error)}); if the family is newer than this transformers, upgrade it"
        ) from error


def _check_json(file: Path) -> bytes:
    """The file's bytes, if it holds an object with a model_type; transformers raises any error for other files."""
    try:
        data = file.read_bytes()
        fields = json.loads(data.decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON ({_line(error)}); fetch it again") from error
    found = None if isinstance(fields, dict) else f"holds {_JSON_NAMES.get(type(fields), 'a number')}"
    if found is None and (not isinstance(fields.get("model_type"), str) or not fields["model_type"]):
        found = "has no model_type"
    if found is not None:
        raise ModelLoadError(
            f"{file} {found}; it must be a JSON object with a model_type, as save_pretrained writes it"
        )
    return data


def _line(error: Exception) -> str:
    """An error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def auto_class(config: Any) -> Any:
    """transformers' class that loads models of ``config``: of text, or of text beside images or sound.

    Raises ``UnsupportedModel`` for a config of a model that does not generate text.
    """
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModel(
        f"{config.model_type}: transformers has no language model that generates text for this config "
        f"({type(config).__name__})"
    )


def read_model(
    folder: Path, config: Any, dtype: torch.dtype | str, attn_implementation: str, *, packed: bool = False
) -> Any:
    """The model on the CPU, in evaluation mode. ``dtype`` "auto" keeps the checkpoint's (a GGUF file has none).

    ``packed``: weights in MXFP4 stay as they are (mxfp4.py); else they become ``dtype``.
    """
    auto = auto_class(config)
    if not folder.is_file() and not any(folder.glob("*.safetensors")):
        raise ModelLoadError(f"{folder} has no *.safetensors weights; convert it with save_pretrained and try again")
    try:
        with _source(folder) as source:
            loaded: Any = auto.from_pretrained(
                **source,
                **mxfp4.loading_options(config, packed),
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                output_loading_info=True,
            )
    except Exception as error:  # safetensors, transformers and torch each raise their own kind for damaged files
        _check_family(auto, config)
        if isinstance(error, KeyError) and error.args == (attn_implementation,):
            raise UnsupportedModel(
                f"{config.model_type}: the family picks its attention from a table of its own, not from transformers' "
                "AttentionInterface, so it cannot attend through the cache"
            ) from error
        raise ModelLoadError(
            f"the weights in {folder} cannot be loaded ({type(error).__name__}: {error}); fetch them again"
        ) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}; fetch it again, "
            "or check that config.json belongs to these weights"
        )
    if folder.is_file():
        ends = dict.fromkeys([*eos_token_ids(model), *gguf.end_token_ids(checked_header(folder))])
        model.generation_config.eos_token_id = list(ends) or None
    return model.eval().requires_grad_(False)


@contextmanager
def _source(folder: Path) -> Iterator[dict[str, Any]]:
    """The source of weights for ``from_pretrained``."""
    if folder.is_file():
        with gguf.arguments(folder) as arguments:
            yield {**arguments, **gguf.loading_options()}
    else:
        yield {"pretrained_model_name_or_path": folder, "use_safetensors": True, "local_files_only": True}


def _check_family(auto: Any, config: Any) -> None:
    """Raises ``UnsupportedModel`` if transformers cannot make the model at all, whatever the weights are."""
    try:
        with torch.device("meta"):
            auto.from_config(config, trust_remote_code=False)
    except Exception as error:  # modeling code of any family
        raise UnsupportedModel(
            f"{config.model_type}: transformers cannot make a model of this config ({_line(error)}); if config.json is "
            "as it was published, this transformers does not support the model"
        ) from error


def weights_dtype(folder: Path, dtype: Any, device: str) -> torch.dtype | str:
    """The dtype to load weights in: ``torch_dtype``'s, except for "auto" of a GGUF file, whose types are no
    torch.dtype."""
    wanted = torch_dtype(dtype)
    return gguf.default_dtype(device) if wanted == "auto" and folder.is_file() else wanted


def weights_bytes(folder: Path, dtype: torch.dtype | str, *, packed: bool = True) -> int:
    """Bytes of the weights once they are read as ``dtype`` ("auto": as stored); only the files' heads are read.

    ``packed``: as for ``read_model``. Raises ``ModelLoadError`` for damaged files, and for MXFP4 that is none.
    """
    if folder.is_file():
        assert isinstance(dtype, torch.dtype)
        return gguf.weights_bytes(folder, dtype)
    total, heads = 0, dict[str, tuple[str, list[int]]]()
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    tensor = tensors.get_slice(name)
                    stored = tensor.get_dtype()
                    heads[name] = stored, tensor.get_shape()
                    bits = int((re.findall(r"\d+", stored) or [8])[0])  # of BF16, F8_E4M3, I64, BOOL
                    if isinstance(dtype, torch.dtype) and stored in _FLOATS:
                        bits = 8 * dtype.itemsize
                    if not packed:
                        bits = mxfp4.unpacked_bits(name, dtype, bits)
                    total += math.prod(tensor.get_shape()) * bits // 8
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{file} cannot be read ({_line(error)}); fetch it again") from error
    if problem := mxfp4.damage(heads):
        raise ModelLoadError(f"the weights in {folder} are damaged ({problem}); fetch them again")
    return total


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: the index's, else model.safetensors, else all."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} cannot be read ({_line(error)}); fetch it again") from error


def read_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer; None if it has none (weights alone serve token ids)."""
    if folder.is_file():
        return _tokenizer_of_gguf(folder) if gguf.has_tokenizer(folder) else None
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelLoadError(f"the tokenizer in {folder} cannot be read ({error}); fetch its files again") from error


def _tokenizer_of_gguf(file: Path) -> Any:
    try:
        with gguf.arguments(file) as arguments:
            return AutoTokenizer.from_pretrained(**arguments)
    except Exception as error:  # of any kind, for words that are not as the loader expects them
        raise ModelLoadError(f"the tokenizer in {file} cannot be read ({_line(error)})") from error


def kv_scales(path: Path) -> dict[int, dict[str, Any]] | None:
    """Scales of float8 K and V among the tensors of a .safetensors file, or of all in a folder; None without any.

    By model layer, "k" and "v", lists of one number or one per KV head. Raises ``ModelLoadError`` for damaged files.
    """
    if not path.is_dir() and place.find_gguf(path) is not None:
        return None
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found: dict[int, dict[str, Any]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    match = _SCALE.search(name)
                    if match and "vision" not in name:
                        scale = tensors.get_tensor(name).float().flatten().tolist()
                        found.setdefault(int(match[1]), {})[match[2] or match[3]] = scale
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{file} cannot be read ({error}); fetch it again") from error
    return found or None


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """The ids that end a generation: the generation config's, else the config's."""
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids]))
    return ()


def bos_token_id(model: Any) -> int | None:
    """The id that texts begin with (``model``: a HybridModel), if the model knows it; None if it has none."""
    text = model.config.get_text_config(decoder=True)
    named = (getattr(model.tokenizer, "bos_token_id", None), getattr(text, "bos_token_id", None))
    return next((n for n in named if isinstance(n, int) and 0 <= n < model.vocab_size), None)


def torch_dtype(dtype: Any) -> torch.dtype | str:
    """A torch.dtype from a name, a torch.dtype, or None and "auto" (the checkpoint's own)."""
    name = place.weights_dtype_name(dtype)
    if name == "auto":
        return name
    found: torch.dtype = getattr(torch, name)
    return found
