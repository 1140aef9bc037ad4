"""A GGUF file as a checkpoint, through transformers' own loader.

Owns       the refusal of files that this loader would serve wrongly.
Promises   the file and transformers' config agree about positions, windows and soft caps, or the file is refused: the
           loader passes over unknown keys. Ends of a turn end a text, as in llama.cpp.
Does not   read weights: checkpoint.py does, with ``arguments``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import transformers
from transformers.utils import logging

from kvtier.integrations.transformers import text_config
from kvtier.machine.errors import UnsupportedModel
from runner.model.gguf_header import Header, checked_header

_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SAME = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of the file, and the config's fields that must agree."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Ends of a text, of a turn, of a message: llama.cpp stops at each."""
_ORIGINAL = "give the folder of the model that it was made of, with config.json and *.safetensors"
_RECIPE = """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={name!r}, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True)).save_pretrained("converted")
    AutoTokenizer.from_pretrained({folder!r}, gguf_file={name!r}).save_pretrained("converted")"""


@contextmanager
def arguments(file: Path) -> Iterator[dict[str, Any]]:
    """The arguments of ``from_pretrained`` for ``file``, without any file beside it."""
    from transformers import modeling_gguf_pytorch_utils as loader

    switched = mock.patch.object(loader, "tqdm", logging.tqdm)  # its bar is shown if transformers' others are
    with TemporaryDirectory() as nothing, switched if hasattr(loader, "tqdm") else nullcontext():
        yield {
            "pretrained_model_name_or_path": nothing,
            "gguf_file": str(file.absolute()),
            "local_files_only": True,
        }


def loading_options() -> dict[str, Any]:
    """Further arguments that leave no weights packed, so that it is a model as any other."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def default_dtype(device: str) -> torch.dtype:
    """The dtype that the device computes fastest; the file's weights are stored in types of their own."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def weights_bytes(file: Path, dtype: torch.dtype) -> int:
    """Bytes of the weights as ``dtype``."""
    return sum(tensor.elements for tensor in checked_header(file).tensors) * dtype.itemsize


def has_tokenizer(file: Path) -> bool:
    """Whether the file brings a vocabulary."""
    return checked_header(file).metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")


def refuse_unreadable(found: Header, problem: Exception) -> None:
    """Raises ``UnsupportedModel`` if ``problem`` means that transformers' loader does not know the family."""
    if "not supported" in str(problem):
        recipe = _RECIPE.format(folder=str(found.file.parent), name=found.file.name)
        raise UnsupportedModel(
            f"{found.file}: transformers {transformers.__version__} does not load GGUF files of architecture "
            f"{found.architecture!r}; {_ORIGINAL}, or convert it with a transformers that does and give the folder "
            f"'converted':\n{recipe}"
        ) from problem


def check_config(found: Header, config: Any) -> None:
    """Raises ``UnsupportedModel`` if transformers' loader has passed over a key that changes the model's text."""
    text = text_config(config)
    lost = [name for name in _ROPE_TENSORS if any(tensor.name == name for tensor in found.tensors)]
    scaling = found.of_model("rope.scaling.type")
    if scaling not in (None, "none"):
        lost.append(f"rope.scaling.type={scaling}")
    if lost and not _scales_positions(text):
        _refuse(found, f"the scaling of positions ({', '.join(lost)})")
    for key, name in _SAME.items():
        told, has = found.of_model(key), getattr(text, name, None)
        if not isinstance(told, (int, float)) or told == 0:
            continue
        beyond = name == "sliding_window" and told >= (found.of_model("context_length") or math.inf)
        if not beyond and (has is None or not math.isclose(told, has)):
            _refuse(found, f"{key}={told} (it has {name}={has})")


def _scales_positions(text: Any) -> bool:
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)


def _refuse(found: Header, what: str) -> None:
    raise UnsupportedModel(
        f"{found.file}: transformers' GGUF loader drops {what} of this {found.architecture} model, and would serve "
        f"another text; {_ORIGINAL}"
    )


def end_token_ids(found: Header) -> list[int]:
    """The ids that end a text or a turn of it."""
    told = [found.metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS]
    return [i for i in told if isinstance(i, int)]
