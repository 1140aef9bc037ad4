"""GGUF files: served as transformers reads them, and refused where it would read them wrongly."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_package
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier import KVTierError, MemoryUnavailable
from kvtier.machine.errors import UnsupportedModel
from runner import LLM, SamplingParams, cli
from runner.errors import MissingPackage, ModelLoadError
from runner.model import checkpoint, gguf_header
from runner.model.gguf_header import read_header
from runner.model.hybrid import HybridModel

from . import gguf_files, zoo

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = ["the cat", "The other night the sea was calm, and the boats of the town lay still. " * 3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seldom is such a file alone: another program's files lie beside it."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    (folder / "tokenizer.json").write_text("{}")
    return gguf_files.write(folder / "tiny.gguf")


@pytest.mark.parametrize("quantized", [False, True])
def test_its_text_is_that_of_transformers(quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = gguf_files.write(tmp_path / "made of bytes.gguf", quantized)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / file.name).write_bytes(b"GGUF")
    monkeypatch.chdir(elsewhere)  # transformers looks for the name here first
    with LLM(tmp_path, device_memory="1MiB", host_memory="1MiB", dtype="auto") as llm:
        model = llm.model
        assert (model.name, model.dtype, model.max_tokens) == ("made of bytes", torch.float32, 512)
        assert model.eos_token_ids == (gguf_files.END, gguf_files.TURN), "llama.cpp ends a turn at either"
        assert llm.tokenizer.chat_template == gguf_files.CHAT
        assert model.spec().groups[0].dtype == "float32"
        for _ in ("cold", "from the cache"):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
                wanted = own.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
                assert output.token_ids == wanted.tolist()
                assert output.text == tokenizer.decode(wanted, skip_special_tokens=True)
        assert outputs[1].cached_tokens["device"] > 0


def test_the_commands_take_one(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text, scales = tiny.with_name("text.txt"), tiny.with_name("scales.json")
    text.write_text(PROMPTS[1])
    assert cli.main(["calibrate", "--model", str(tiny), "--text", str(text), "--out", str(scales)]) == 0
    assert len(json.loads(scales.read_text())) == gguf_files.LAYERS
    capsys.readouterr()
    assert cli.main(["demo", "--model", str(tiny), "--tokens", "300", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "tiny"
    assert all(len(request["expected"]) == 5 for request in report["requests"]), "the prompts ask for a number"
    monkeypatch.setattr(gguf_package, "dequantize", lambda *_: pytest.fail("weights were read"))
    assert cli.main(["plan", str(tiny), "--device-memory", "1MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["num_layers"] == gguf_files.LAYERS


def test_without_a_vocabulary_it_serves_token_ids(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf", merges=None)
    assert HybridModel.load(file, self_check=False).tokenizer is None


def test_in_float32_or_on_a_gpu_in_bfloat16(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint.weights_dtype(tiny, None, "cuda:0") is torch.bfloat16
    assert checkpoint.weights_dtype(tiny, "float16", "cuda:0") is torch.float16
    with pytest.raises(MemoryUnavailable, match="take 16,384"), monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_model", lambda *_: pytest.fail("weights were read"))
        LLM(tiny, "cpu", device_memory=12_288, host_memory=0)  # enough in bfloat16
    numbers = sum(torch.Size(shape).numel() for shape in gguf_files.SHAPES.values())
    assert checkpoint.weights_bytes(tiny, torch.bfloat16) == 2 * numbers


def test_of_several_one_must_be_named(tiny: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(tiny.read_bytes())
    with pytest.raises(ModelLoadError, match=r"has 2 GGUF files \(a.gguf, b.gguf\); name one"):
        LLM(tmp_path)
    assert HybridModel.load(tmp_path / "b.gguf", self_check=False).name == "b"
    zoo.config("llama").save_pretrained(tmp_path)
    assert checkpoint.find_config(tmp_path).model_type == "llama", "a config needs no weights"


def test_without_its_packages_it_says_how_to_get_them(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header.importlib.util, "find_spec", lambda _: None)
    for read in (LLM, checkpoint.find_config):
        with pytest.raises(MissingPackage, match=r"pip install 'kvtier\[gguf\]'"):
            read(tiny)


# --- damage ---------------------------------------------------------------------------------------------------------


def _head(data: bytes) -> bytes:
    return data[: data.index(b"tokenizer.ggml.tokens")]


def _huge_array(data: bytes) -> bytes:
    """The array of token types says that it has 2^60 of them."""
    at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    return data[:at] + struct.pack("<Q", 1 << 60) + data[at + 8 :]


DAMAGE = {
    "another file": (lambda _: b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
    "empty": (lambda _: b"", "does not begin with GGUF"),
    "cut in its first words": (lambda data: data[:10], "damaged GGUF file"),
    "cut in its head": (_head, "ends in the middle of its head"),
    "cut in its weights": (lambda data: data[:-1000], "ends .* bytes before its last weight does"),
    "an array of 2^60": (_huge_array, "ends in the middle of its head"),
    "2^60 keys": (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], "damaged GGUF file"),
    "of tomorrow": (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "version 9"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
    "no Unicode": (lambda data: data.replace(b"general.architecture", b"\xff" * 20), "damaged GGUF file"),
    "no architecture": (lambda data: data.replace(b"general.architecture", b"general.architect-re"), "no general.arch"),
    "nests without end": (
        lambda data: data[:16] + struct.pack("<QQ1sI", 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 5000,
        "damaged GGUF file",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_seen_before_transformers_reads_it(
    tiny: Path, tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(damage(tiny.read_bytes()))
    for read in (LLM, checkpoint.find_config):
        with pytest.raises(ModelLoadError, match=message) as refused:
            read(file)
        assert str(refused.value).count("fetch it again") <= 1


def test_an_array_is_read_past_whatever_it_holds(tmp_path: Path) -> None:
    def more(writer: GGUFWriter) -> None:
        writer.add_array("some.flags", [True, False, True])
        writer.add_array("some.lists", [[1, 2], [3]])
        writer.add_uint32("general.alignment", 64)

    header = read_header(gguf_files.write(tmp_path / "tiny.gguf", more=more))
    assert header.metadata["some.flags"] == 3
    assert {t.name: t.elements for t in header.tensors} == {
        name: torch.Size(shape).numel() for name, shape in gguf_files.SHAPES.items()
    }


def test_no_such_file() -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf is not there"):
        LLM("nowhere.gguf")


# --- what transformers' loader would serve wrongly ------------------------------------------------------------------


def _key(key: str, value: Any) -> dict[str, Any]:
    def more(writer: GGUFWriter) -> None:
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)

    return {"more": more}


def _tensor(name: str) -> dict[str, Any]:
    return {"more": lambda writer: writer.add_tensor(name, gguf_files.np.ones(8, gguf_files.np.float32))}


REFUSED: dict[str, tuple[dict[str, Any], type[KVTierError], str]] = {
    "a family of tomorrow": (
        {"architecture": "tomorrow"},
        UnsupportedModel,
        r"(?s)does not load GGUF files of architecture 'tomorrow'; give the folder .*gguf_file='model.gguf'",
    ),
    "an encoder": ({"architecture": "t5"}, UnsupportedModel, "t5"),
    "a part": (_key("split.count", 3), ModelLoadError, "one of 3 parts .*llama-gguf-split --merge"),
    "Llama 3's positions": (_tensor("rope_freqs.weight"), UnsupportedModel, r"scaling of positions \(rope_freqs"),
    "scaled positions": (_key("llama.rope.scaling.type", "linear"), UnsupportedModel, "rope.scaling.type=linear"),
    "a window": (_key("llama.attention.sliding_window", 128), UnsupportedModel, "sliding_window=128"),
    "a soft cap": (_key("llama.final_logit_softcapping", 30.0), UnsupportedModel, "softcapping=30"),
    "a weight less": ({"without": "blk.1.ffn_up.weight"}, ModelLoadError, "lacks 1 weights .*layers.1.mlp.up_proj"),
    "a broken tokenizer": ({"merges": ["no word"]}, ModelLoadError, "the tokenizer in .* cannot be read"),
}


@pytest.mark.parametrize(("how", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_served_wrongly_is_refused(
    how: dict[str, Any], error: type[KVTierError], message: str, tmp_path: Path
) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", **how)
    with pytest.raises(error, match=message):
        HybridModel.load(file)


def test_a_window_as_long_as_the_model_hides_nothing(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", **_key("llama.attention.sliding_window", 512))
    assert checkpoint.find_config(file).model_type == "llama"
