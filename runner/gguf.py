"""A GGUF file where a checkpoint is wanted: said by its name, with the way to convert it.

Owns       how such a file is known, and the recipe.
Does not   convert: that takes packages and memory that nobody asked for.
"""

from __future__ import annotations

from pathlib import Path

from runner.errors import ModelLoadError

_MAGIC = b"GGUF"
_RECIPE = """
    import copy, torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    read = AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={name!r}, dtype=torch.float32)
    config = copy.deepcopy(read.config); del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict()); model.tie_weights()
    model.generation_config = read.generation_config; model.save_pretrained("converted")
    AutoTokenizer.from_pretrained({folder!r}, gguf_file={name!r}).save_pretrained("converted")"""


def refuse(path: Path) -> None:
    """Raises ``ModelLoadError`` for a GGUF file, or a folder that has one where its weights should be."""
    file = _found(path)
    if file is not None:
        recipe = _RECIPE.format(folder=str(file.parent), name=file.name)
        raise ModelLoadError(
            f"{file} is a GGUF file, and kvtier reads safetensors; give the folder of the model that it was made of, "
            f"or convert it (`pip install gguf accelerate`) and give the folder 'converted':\n{recipe}"
        )


def _found(path: Path) -> Path | None:
    if path.is_dir():
        return min(path.glob("*.gguf"), default=None)
    try:
        with path.open("rb") as file:
            return path if path.suffix == ".gguf" or file.read(len(_MAGIC)) == _MAGIC else None
    except OSError:
        return None
