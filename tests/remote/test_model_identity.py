"""The identity of weights: any byte of them changes it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runner.errors import ModelLoadError
from runner.model.fused import packed
from runner.model.identity import arithmetic, model_id, weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "tiny"
    place.mkdir()
    save_file({"a": torch.arange(5, dtype=torch.int8), "b": torch.ones(3)}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"rope_theta": 1e4, "torch_dtype": "float32"}))
    return place


def test_any_byte_of_the_weights_changes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.remote.weights._PIECE_BYTES", 16)  # many pieces, and the last one of a few bytes
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    found = {weights_digest(folder)}
    for i in range(len(raw)):
        file.write_bytes(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :])
        found.add(weights_digest(folder))
    for changed in (raw + b"\0", raw[:-1], raw[16:32] + raw[:16] + raw[32:]):
        file.write_bytes(changed)
        found.add(weights_digest(folder))
    assert len(found) == len(raw) + 4
    file.write_bytes(raw)
    assert weights_digest(folder) in found


def test_the_config_counts_but_for_what_says_nothing(folder: Path) -> None:
    config, first = folder / "config.json", weights_digest(folder)
    config.write_text(json.dumps({"torch_dtype": "bfloat16", "transformers_version": "9", "rope_theta": 1e4}))
    assert weights_digest(folder) == first
    config.write_text(json.dumps({"rope_theta": 2e4}))
    assert weights_digest(folder) != first


def test_a_gguf_file_is_weights_and_config_in_one(tmp_path: Path) -> None:
    files = [tmp_path / "model.gguf", tmp_path / "b" / "model.gguf"]
    files[1].parent.mkdir()
    for file in files:
        file.write_bytes(b"GGUF and tensors")
    assert weights_digest(files[0]) == weights_digest(files[1])
    files[1].write_bytes(b"GGUF and tensorS")
    assert weights_digest(files[0]) != weights_digest(files[1])


def test_how_it_is_computed_is_part_of_it(folder: Path) -> None:
    def of(**other: Any) -> str:
        fields = {"dtype": torch.float32, "attention": "reference", "device": "cpu", "linears": 0, "gates": 0} | other
        model = SimpleNamespace(
            name="tiny",
            dtype=fields["dtype"],
            attention=SimpleNamespace(name=fields["attention"]),
            device=torch.device(fields["device"]),
            fused={"experts": 0, "rope": 0, "gates": fields["gates"], "linears": fields["linears"]},
        )
        return model_id(model, folder)

    others = [of(dtype=torch.float16), of(attention="flashinfer"), of(device="cuda:0"), of(linears=9), of(gates=9)]
    assert len({of(), *others}) == 6
    assert of(linears=9) == of(linears=3), "what is fused, not how often"
    assert of(device="cuda:1") == of(device="cuda:0")
    assert of().startswith("tiny@")


def test_whose_products_an_exact_model_has_is_part_of_its_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for way in (packed.by_loops, packed.by_onednn):
        monkeypatch.setattr(packed, "fastest", lambda way=way: way)
        found.add(arithmetic(torch.float32))
    assert len(found) == 2


def test_what_cannot_be_read_is_said(folder: Path) -> None:
    (folder / "config.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"config.json cannot be read"):
        weights_digest(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        weights_digest(folder)
    index = {"weight_map": {"a": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        weights_digest(folder)
