"""Loading: what comes with a model, and what a broken folder says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvtier.machine.errors import ConfigError
from runner.errors import ModelLoadError
from runner.model import checkpoint
from runner.model.hybrid import HybridModel

from . import zoo
from .conftest import Family


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.build("llama", tmp_path / "tiny")


def test_what_comes_with_a_model(family: Callable[[str], Family]) -> None:
    model = family("llama").model
    assert (model.vocab_size, model.max_tokens, model.eos_token_ids) == (zoo.VOCAB, 512, (2,))
    assert (model.dtype, model.device.type, model.tokenizer) == (torch.float32, "cpu", None)
    assert model.name.startswith("llama")
    assert model.spec(block_tokens=8).groups[0].block_tokens == 8
    assert model.spec().groups[0].dtype == "float32"
    assert model.spec(dtype="float16").groups[0].dtype == "float16"


def test_generation_config_names_the_eos_ids(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [2, 7]}))
    assert HybridModel.load(folder, self_check=False).eos_token_ids == (2, 7)


def test_the_tokenizer_of_the_folder(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    assert HybridModel.load(folder, self_check=False).tokenizer.encode("b") == [1]


def test_dtype_is_a_name_or_a_dtype(folder: Path) -> None:
    assert HybridModel.load(folder, dtype="bfloat16").dtype is torch.bfloat16
    assert HybridModel.load(folder, dtype=torch.float64, self_check=False).dtype is torch.float64
    short = {"bf16": torch.bfloat16, "fp16": torch.half, "half": torch.half, "fp32": torch.float, "float": torch.float}
    assert {name: checkpoint.torch_dtype(name) for name in short} == short
    with pytest.raises(ConfigError, match="unknown dtype 'int7'"):
        HybridModel.load(folder, dtype="int7")


# --- broken folders -------------------------------------------------------------------------------------------------


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{not json")


def _unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "of_tomorrow"}')


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _a_weight_less(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _another_shape(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 32}))


def _bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_config, "has no config.json"),
        (_bad_config, "config.json cannot be read"),
        (_unknown_family, "upgrade"),
        (_no_weights, r"no \*.safetensors weights"),
        (_cut_weights, "model.safetensors cannot be read .* fetch it again"),
        (_a_weight_less, r"lacks 1 weights of LlamaForCausalLM, such as model.layers.1.mlp.up_proj.weight"),
        (_another_shape, "cannot be loaded"),
        (_bad_tokenizer, "tokenizer in .* cannot be read"),
    ],
)
def test_broken_folders_say_what_to_do(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelLoadError, match=message):
        HybridModel.load(folder)


def test_neither_folder_nor_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match="nowhere is not there"):
        HybridModel.load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match="neither a folder here nor a hub id"):
        HybridModel.load("not an id!")

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(checkpoint, "snapshot_download", offline)
    with pytest.raises(ModelLoadError, match=r"the hub did not give it .*hf download some/model"):
        HybridModel.load("some/model")


def test_a_gguf_file_beside_safetensors_is_not_looked_at(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF\x03\x00")
    HybridModel.load(folder, self_check=False)


def test_a_hub_id_loads_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda *_, **__: str(folder))
    assert HybridModel.load("some/model", self_check=False).name == "some/model"
