"""fp8 K and V through the whole engine: text, both tiers, options, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from breadth import sample, sized
from families.conftest import Family
from safetensors.torch import save_file

from kvtier import ConfigError
from runner import LLM, SamplingParams
from runner.cli import main
from runner.engine.calibrate import calibrate, calibrate_on_text
from runner.errors import ModelLoadError
from runner.model.hybrid import HybridModel
from runner.model.kv_scales import read_scales, save_scales
from runner.needle import make_prompt, weights_path
from runner.verify import kit
from runner.verify.scenarios import SCENARIOS

GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPTS = [make_prompt(900, seed=seed) for seed in (0, 1)]
SMALL = {"full": 90, "sliding": 60, "chunked": 60}


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return HybridModel.load(weights_path())


def served(model: HybridModel, host: int, **options: Any) -> tuple[list[str], dict[str, Any], int]:
    """Answers to both prompts in turn, three times over, on a device pool that holds one and a half of them."""
    hosts = dict.fromkeys(SMALL, host) if host else 0
    with LLM(model, "cpu", SMALL, hosts, max_batched_tokens=256, max_running=1, **options) as llm:
        turns = [llm.generate([p.token_ids], GREEDY, use_tqdm=False)[0] for p in PROMPTS * 3]
        assert llm.audit() == []
        return [t.text for t in turns], llm.stats()["cache"], sum(t.cached_tokens["host"] for t in turns)


@pytest.mark.parametrize("calibrated", sample([False, True], [True]))
def test_text_with_the_host_tier_is_the_text_without_and_right(model: HybridModel, calibrated: bool) -> None:
    scales = calibrate(model, [PROMPTS[0].token_ids]) if calibrated else None
    options = {"kv_cache_dtype": "fp8", "kv_scales": scales}
    alone, _, none = served(model, 0, **options)
    both, stats, loaded = served(model, 400, verify="full", **options)
    plain, wide, _ = served(model, 400, verify="full")
    assert (none, loaded > 1000) == (0, True)
    assert alone == both == plain == [p.answer.removesuffix(" .") for p in PROMPTS] * 3
    assert 4 * stats["device_bytes"] == wide["device_bytes"] and 4 * stats["host_bytes"] == wide["host_bytes"]


@pytest.mark.parametrize("name", sample(["gemma3", "llama4"], ["gemma3"]))
def test_every_byte_comes_back_from_the_host(family: Callable[[str], Family], name: str) -> None:
    """The kit compares raw K and V, and logits, with the cold run's, and demands every bit of hits."""
    subject = family(name)
    scales = calibrate(subject.model, [ids.tolist() for ids in subject.sequences])
    names = sized(("host hit", "bad copies"), ("host hit", "mixed hit", "bad copies", "lazy stores"))
    hits = [s for s in SCENARIOS if s.name in names]
    report = kit.run(
        subject.model, tokens=120, prompts=2, new_tokens=8, scenarios=hits, kv_cache_dtype="fp8", kv_scales=scales
    )
    assert report.ok, [(r.name, r.missing, r.difference, r.violations) for r in report.results]
    assert report.dtype == "float32, K and V in float8_e4m3fn"
    assert [r.exact for r in report.results] == [True] * (2 + len(hits))
    assert all(r.largest_difference == r.largest_kv_difference == 0 for r in report.results)


@pytest.mark.usefixtures("unaudited")
def test_the_commands_take_the_option(
    model: HybridModel,
    family: Callable[[str], Family],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hits = [s for s in SCENARIOS if s.name in ("device hit", "host hit")]
    monkeypatch.setattr(kit, "run", partial(kit.run, scenarios=hits))
    file = tmp_path / "scales.json"
    save_scales({i: {"k": 0.5, "v": 0.5} for i in range(len(model.spec().layers))}, file)
    options = ["--kv-cache-dtype", "fp8", "--kv-scales", str(file)]
    assert main(["demo", "--tokens", "600", "--json", *options]) == 0
    narrow = json.loads(capsys.readouterr().out)
    assert main(["demo", "--tokens", "600", "--json"]) == 0
    wide = json.loads(capsys.readouterr().out)
    assert narrow["right_answers"] and narrow["same_answers"]
    assert 4 * narrow["stats"]["cache"]["host_bytes"] == wide["stats"]["cache"]["host_bytes"]
    subject = family("gemma3")
    save_scales(calibrate(subject.model, [ids.tolist() for ids in subject.sequences]), file)
    small = ["--model", str(subject.folder), "--tokens", "120", "--prompts", "2", "--new-tokens", "4"]
    assert main(["verify", *small, "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"].endswith("K and V in float8_e4m3fn")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-cache-dtype", "fp9"], "unknown dtype 'fp9'"),
        (["--kv-cache-dtype", "int8"], "unknown dtype 'int8'"),
        (["--kv-scales", "scales.json"], 'use kv_cache_dtype="fp8"'),
        (["--kv-cache-dtype", "bfloat16", "--kv-scales", "scales.json"], 'use kv_cache_dtype="fp8"'),
        (["--kv-cache-dtype", "fp8", "--kv-scales", "no/such/file"], "cannot be read"),
    ],
)
def test_options_that_cannot_work_end_with_status_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("demo", "verify"):
        assert main([command, *options]) == 2
        assert message in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(HybridModel, "load", lambda *_: pytest.fail("a model was loaded"))
    for options in (
        {"kv_cache_dtype": "fp9"},
        {"kv_cache_dtype": torch.int8},
        {"kv_scales": {0: {"k": 1.0, "v": 1.0}}},
        {"kv_cache_dtype": "float16", "kv_scales": {0: {"k": 1.0, "v": 1.0}}},
        {"kv_cache_dtype": "fp8", "kv_scales": 7},
        {"kv_cache_dtype": "fp8", "kv_scales": tmp_path / "none.json"},
        {"kv_cache_dtype": "fp8", "kv_scales": tmp_path},
        {"kv_cache_dtype": "fp8", "kv_scales": {"first": {"k": 1.0, "v": 1.0}}},
    ):
        with pytest.raises(ConfigError):
            LLM("some/model", "cpu", **options)


def test_scales_that_do_not_fit_the_model_are_refused_before_a_cache_is_built(model: HybridModel) -> None:
    layers = range(len(model.spec().layers))
    for wrong in (1e-45, float("nan"), -1.0, [1.0] * 9):
        with pytest.raises(ConfigError, match="kv_scales of layer 0: v_scale"):
            LLM(model, "cpu", SMALL, 0, kv_cache_dtype="fp8", kv_scales={i: {"k": 1.0, "v": wrong} for i in layers})
    with pytest.raises(ConfigError, match="kv_scales name no scales"):
        LLM(model, "cpu", SMALL, 0, kv_cache_dtype="fp8", kv_scales={0: {"k": 1.0, "v": 1.0}})


def test_weights_are_never_8_bits() -> None:
    for dtype in ("float8_e4m3fn", torch.float8_e5m2):
        with pytest.raises(ConfigError, match="kv_cache_dtype"):
            HybridModel.load(weights_path(), dtype=dtype)


# --- where scales come from -----------------------------------------------------------------------------------------


def test_scales_survive_a_file(model: HybridModel, tmp_path: Path) -> None:
    scales = calibrate(model, [PROMPTS[0].token_ids])
    save_scales(scales, tmp_path / "scales.json")
    for source in (tmp_path / "scales.json", str(tmp_path / "scales.json"), scales):
        assert model.spec(dtype="fp8", kv_scales=read_scales(source)) == model.spec(dtype="fp8", kv_scales=scales)
    assert model.spec(dtype="fp8", kv_scales=scales) != model.spec(dtype="fp8")


NAMES = [
    ("model.layers.{}.self_attn.{}_scale", ()),
    ("model.layers.{}.self_attn.attn.{}_scale", (1,)),
    ("model.layers.{0}.self_attn.{1}_proj.{1}_scale", (1,)),
    ("language_model.model.layers.{}.self_attn.{}_proj.output_scale", (2, 1, 1)),
]


@pytest.mark.parametrize(("pattern", "shape"), NAMES)
def test_a_checkpoint_s_own_scales_are_used(
    family: Callable[[str], Family], tmp_path: Path, pattern: str, shape: tuple[int, ...]
) -> None:
    subject = family("mistral")
    folder = tmp_path / "model"
    folder.mkdir()
    for file in subject.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = {
        pattern.format(i, which): torch.full(shape, 0.25 * (i + 1) * (1 if which == "k" else 3))
        for i in range(4)
        for which in ("k", "v")
    }
    tensors["vision_tower.layers.9.self_attn.k_scale"] = torch.ones(1)
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(1)
    save_file(tensors, folder / "scales.safetensors")
    expected = subject.model.spec(
        dtype="fp8", kv_scales={i: {"k": 0.25 * (i + 1), "v": 0.75 * (i + 1)} for i in range(4)}
    )
    assert HybridModel.load(folder, self_check=False).spec(dtype="fp8") == expected
    assert HybridModel.load(folder, self_check=False).spec() == subject.model.spec()
    for source in (folder, folder / "scales.safetensors"):
        assert subject.model.spec(dtype="fp8", kv_scales=read_scales(source)) == expected
    assert subject.model.spec(dtype="fp8") != expected, "this one's checkpoint has none"


def test_the_calibrate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: HybridModel) -> None:
    text, out = tmp_path / "text", tmp_path / "scales.json"
    text.write_text(PROMPTS[0].text)
    arguments = ["calibrate", "--model", str(weights_path()), "--text", str(text)]
    assert main([*arguments, "--out", str(out), "--tokens", "500"]) == 0
    assert "from 500 tokens" in capsys.readouterr().out
    assert read_scales(out) == calibrate(model, [PROMPTS[0].token_ids[:500]])
    assert main([*arguments, "--out", str(tmp_path / "no" / "scales.json"), "--tokens", "5"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    for content in (b"", b"\xff\xfe\xff", None):
        text.unlink() if content is None else text.write_bytes(content)
        assert main([*arguments, "--out", str(out)]) == 2
        assert str(text) in capsys.readouterr().err


def test_calibrating_on_text_needs_a_tokenizer(family: Callable[[str], Family], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        calibrate_on_text(family("llama").model, tmp_path / "text", 5)


def test_damaged_scales_are_said_to_be_damaged(tmp_path: Path) -> None:
    for text in ("[1]", "{", '{"first": {"k": 1}}'):
        (tmp_path / "scales.json").write_text(text)
        with pytest.raises(ConfigError, match=r"scales\.json"):
            read_scales(tmp_path / "scales.json")
    (tmp_path / "scales.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=r"scales\.safetensors cannot be read"):
        read_scales(tmp_path / "scales.safetensors")
