"""gpt-oss from checkpoints as they are published: experts in MXFP4, as blocks and scales beside bfloat16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.api.llm import LLM
from runner.errors import ModelLoadError
from runner.model import checkpoint, mxfp4
from runner.model.fused import table
from runner.model.hybrid import HybridModel
from runner.sampling.params import SamplingParams

from . import mxfp4_files as stored, zoo

PROMPT = [5, 9, 77, 31, 8, 120, 44]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny gpt-oss as it would be published, and another with the weights that it means, in bfloat16."""
    packed, plain = zoo.build("gpt_oss", tmp_path / "packed"), tmp_path / "plain"
    config = json.loads((packed / "config.json").read_text()) | {"dtype": "bfloat16"}
    published, meant = {}, {}
    for i, (name, weight) in enumerate(weights_of(packed).items()):
        published[name] = meant[name] = weight.bfloat16()
        if name.endswith("_proj") and weight.ndim == 3:
            blocks, scales = stored.random_weights(weight.shape, i)
            del published[name]
            published |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = stored.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    plain.mkdir()
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    save_file(published, packed / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    named = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    (packed / "config.json").write_text(json.dumps(config | named))
    return packed, plain


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels run, which are Triton's interpreter's here."""
    for module in (mxfp4, table):
        monkeypatch.setattr(module, "runs_kernel", lambda device: True)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_on_a_cpu_the_weights_are_what_the_blocks_mean(folders: tuple[Path, Path], dtype: Any) -> None:
    packed, plain = (HybridModel.load(folder, dtype=dtype, self_check=False).model for folder in folders)
    assert packed.dtype is (torch.float32 if dtype else torch.bfloat16)
    own = dict(plain.named_parameters())
    same = {n for n, w in packed.named_parameters() if torch.equal(w.nan_to_num(), own[n].nan_to_num())}
    assert same == set(own), "a packed layer's dense weight is NaN"


def test_a_cpu_answers_from_it_as_from_the_weights_that_it_means(folders: tuple[Path, Path]) -> None:
    answers = []
    for folder in folders:
        with LLM(folder, dtype="float32", device_memory=1 << 21, host_memory=0) as llm:
            answers.append(llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) > 1


def test_kept_packed_it_gives_the_logits_of_the_weights_that_it_means(
    folders: tuple[Path, Path], on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = stored.dot_scaled(monkeypatch)
    packed, plain = (
        checkpoint.read_model(folder, checkpoint.read_config(folder), "auto", "eager", packed=folder is folders[0])
        for folder in folders
    )
    assert table.fuse(packed, torch.device("cpu"))["experts"] == 4
    products.clear()
    ids = torch.tensor([PROMPT])
    found, expected = (model(ids, use_cache=False).logits.float() for model in (packed, plain))
    assert products, "its own kernels ran"
    assert float((found - expected).norm() / expected.norm()) < 3e-2


def test_where_kernels_run_a_model_keeps_its_experts_packed(folders: tuple[Path, Path], on_a_gpu: None) -> None:
    packed = HybridModel.load(folders[0], self_check=False).model
    names = {name.rpartition(".")[2] for name, _ in packed.named_parameters() if ".experts." in name}
    assert names == {f"{w}_proj_{end}" for w in ("gate_up", "down") for end in ("blocks", "scales", "bias")}


def test_the_bytes_of_packed_weights_are_known_before_they_are_read(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for packed, dtype in ((True, "auto"), (False, "auto"), (False, torch.float32)):
        config = checkpoint.read_config(folders[0])
        model = checkpoint.read_model(folders[0], config, dtype, "eager", packed=packed)
        held = sum({p.data_ptr(): p.nbytes for p in model.state_dict().values()}.values())
        assert checkpoint.weights_bytes(folders[0], dtype, packed=packed) == held


def test_it_stays_packed_only_beside_bfloat16_and_where_kernels_run(
    folders: tuple[Path, Path], on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, plain = (checkpoint.read_config(folder) for folder in folders)
    assert mxfp4.stays_packed(packed, "cuda", "auto")
    assert mxfp4.stays_packed(packed, "cuda", torch.bfloat16)
    assert not mxfp4.stays_packed(packed, "cuda", torch.float16)
    assert not mxfp4.stays_packed(plain, "cuda", "auto")
    monkeypatch.undo()
    assert not mxfp4.stays_packed(packed, "cpu", "auto")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lost", ["blocks", "scales"])
def test_a_checkpoint_without_all_of_a_layer_s_experts_is_refused(
    folders: tuple[Path, Path], packed: bool, lost: str
) -> None:
    weights = weights_of(folders[0])
    del weights[f"model.layers.1.mlp.experts.down_proj_{lost}"]
    save_file(weights, folders[0] / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="down_proj" if packed else "conversion"):
        checkpoint.read_model(folders[0], checkpoint.read_config(folders[0]), "auto", "eager", packed=packed)


PART = "model.layers.1.mlp.experts.down_proj_"
DAMAGED: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no scales": ("scales", lambda x: None, "down_proj_scales is missing"),
    "no blocks": ("blocks", lambda x: None, "down_proj_blocks is missing"),
    "numbers, not exponents": ("scales", lambda x: x.view(torch.float8_e8m0fnu), "scales is F8_E8M0, and MXFP4"),
    "signed blocks": ("blocks", lambda x: x.view(torch.int8), "blocks is I8, and MXFP4"),
    "a column without scales": ("scales", lambda x: x[:, :-1].contiguous(), "does not go with _proj_scales"),
    "a flat block": ("blocks", lambda x: x.flatten(2), "does not go with _proj_scales"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_packed_weights_that_are_none_are_refused_before_they_are_read(
    folders: tuple[Path, Path], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers casts scales that are numbers, and answers with other weights."""
    end, made, reason = DAMAGED[case]
    weights = weights_of(folders[0])
    changed = made(weights.pop(PART + end))
    if changed is not None:
        weights[PART + end] = changed
    save_file(weights, folders[0] / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(checkpoint, "read_model", None)
    with pytest.raises(ModelLoadError, match=reason):
        HybridModel.load(folders[0])


def test_rows_that_blocks_cannot_hold_are_refused(folders: tuple[Path, Path]) -> None:
    """Else the rows would be cut to whole blocks."""
    config = json.loads((folders[0] / "config.json").read_text()) | {"intermediate_size": 100}
    (folders[0] / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="down_proj has rows of 100, and MXFP4 stores multiples of 32"):
        checkpoint.read_model(folders[0], checkpoint.read_config(folders[0]), "auto", "eager", packed=True)
