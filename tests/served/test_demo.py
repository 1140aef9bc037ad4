"""The main job as a command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from breadth import sample
from families import zoo
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvtier import DeviceUnavailable
from runner.cli import main
from runner.demo import job as demo
from runner.demo.questions import ask
from runner.demo.show import show, verdict
from runner.model import checkpoint
from runner.model.hybrid import HybridModel


@pytest.mark.parametrize("tokens", sample([8_192, 90_112], [8_192]))
def test_the_main_job(tokens: int) -> None:
    """Three requests on a pool for 1.6 of them: S1 evicts S0, whose prefix then comes back from the host.

    90,112 tokens is its full size, on a pool of 145k.
    """
    report = demo.run(tokens=tokens)
    assert report.ok, report
    assert [s.tokens for s in report.requests] == [tokens] * 3
    assert [s.answer for s in report.requests] == [s.expected for s in report.requests]
    first, second, again = report.requests
    assert (first.host_tokens, second.host_tokens) == (0, 0)
    assert again.host_tokens > tokens // 9
    assert again.computed_tokens == 16
    assert report.stats["cache"]["device"]["full"]["usable"] * 16 < 1.62 * tokens


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tokens", "4096", "--requests", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["same_answers"] and report["right_answers"]
    assert [r["tokens"] for r in report["requests"]] == [4096] * 3


def test_tables_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tokens", "4096"]) == 0
    out = capsys.readouterr().out
    assert "S0's second answer equals its first" in " ".join(out.split())
    assert "stores" in out and "loads" in out
    assert "attention by reference: FlashInfer runs on CUDA and the device is cpu" in " ".join(out.split())


def test_without_a_host_tier_the_answer_is_recomputed() -> None:
    report = demo.run(tokens=4096, host_memory=0)
    assert report.ok
    assert report.stats["cache"]["transfers"]["stored_blocks"] == 0


def test_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = zoo.build("gemma3", tmp_path)
    assert main(["demo", "--model", str(folder), "--tokens", "300"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "equals its first" in out and "Prompts were random tokens" in out


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A tiny model with random weights, and a tokenizer of single bytes."""
    folder = zoo.build("gemma3", tmp_path, vocab_size=300, max_position_embeddings=4096)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<s>"], initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return folder


def test_a_model_with_a_tokenizer_is_asked_for_a_number(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights find nothing, and that is said; what the answers are judged by is not theirs to know."""
    steps: list[tuple[int, int, int]] = []
    report = demo.run(str(reader), tokens=2600, progress=lambda *now: steps.append(now))
    assert report.ok and not report.right_answers and not report.retrieves
    assert "equals its first (not the number: this model does not find it)" in verdict(report)
    first = [done for request, done, total in steps if request == 0]
    assert first[0] == 0 and len(set(first)) > 2, "the bar moves from the beginning on"
    right = [replace(s, answer=f"{s.expected}. The") for s in report.requests]
    assert "equals its first and is right;" in verdict(replace(report, requests=right))
    assert replace(right[0], answer=f"{right[0].expected}1").right is False
    show(replace(report, requests=right), Console())
    assert capsys.readouterr().out.count("✓") == 3


def test_a_question_is_as_long_as_asked_for_and_its_answer_is_in_it(reader: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reader)
    asked = [ask(tokenizer, 700, seed) for seed in (0, 1)]
    for ids, number in asked:
        text = tokenizer.decode(ids)
        city = text.rsplit("The secret number of ", 1)[1].removesuffix(" is")
        assert len(ids) == 700 and text.count(number) == 1
        assert f"the secret number of {city} is {number}." in text
    assert asked[0][0][:8] != asked[1][0][:8], "they share no prefix"
    assert ask(tokenizer, 100, 0) is None, "no room for the question"


def test_a_wrong_answer_is_said_loudly() -> None:
    report = demo.run(tokens=2048)
    broken = demo.Report(**{**vars(report), "requests": [*report.requests[:2], report.requests[1]]})
    assert not demo.Report(**{**vars(report), "violations": ["I1: x"]}).ok
    assert "DIFFERS" in verdict(
        demo.Report(
            **{
                **vars(report),
                "requests": [report.requests[0], demo.Served(**{**vars(report.requests[1]), "prompt": "S0"})],
            }
        )
    )
    assert broken.repeats == [(report.requests[1], report.requests[1])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "./nowhere"], "is not there"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--device", "tpu"], "tpu"),
        (["--device", "gpu"], "'cuda:0' is the first GPU"),
        (["--device", "meta"], "no model runs on device 'meta'"),
        (["--tokens", "2000000"], "the bundled model was made for 1,048,576 tokens; use --tokens 1048560 or fewer"),
        (["--attention", "flashinfer"], "runs on CUDA"),
        (["--attention", "fast"], "auto, flashinfer, reference"),
        (["--device-memory", "many"], "many"),
        (["--device-memory", "1KiB"], "device_memory"),
        (["--host-memory", "100TiB"], "host_memory"),
        (["--tokens", "10"], "10"),
        (["--device-memory", "2MiB"], "can never fit"),
    ],
)
def test_input_that_cannot_work_ends_with_status_2_and_the_fix(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if message != "can never fit":
        monkeypatch.setattr(checkpoint, "read_model", lambda *_: pytest.fail("weights were read"))
    assert main(["demo", *arguments]) == 2
    said = capsys.readouterr()
    assert message in " ".join(said.err.split())
    assert said.out == "", "results go to stdout, and there are none"
    assert said.err.startswith("kvtier: "), "and no empty line comes before the message"


@pytest.mark.parametrize("columns", [80, 60, 40])
def test_nothing_is_cut_off_in_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["demo", "--tokens", "1024", "--requests", "1"]) == 0
    said = capsys.readouterr()
    assert "…" not in said.out + said.err and "1024/1024" in said.err
    assert max(map(len, (said.out + said.err).splitlines())) <= columns
    assert ("most in use: " in said.out) == (columns < 80)
    assert "7 8 0 0 6 ." in said.out and "✓" in said.out


@pytest.mark.parametrize("host_memory", [None, "1GiB"])
def test_a_gpu_without_cupy_is_refused_before_weights_are_read(
    host_memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(HybridModel, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(DeviceUnavailable, match=r"need CuPy.*or use host_memory=0"):
        demo.run(device="cuda:0", host_memory=host_memory)
    for none in (0, "0", "0GiB"):
        with pytest.raises(pytest.fail.Exception, match="weights were read"):
            demo.run(device="cuda:0", host_memory=none)
