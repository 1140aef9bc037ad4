"""The main job as a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from breadth import sample
from families import zoo

from kvtier import DeviceUnavailable
from runner import demo
from runner.cli import main
from runner.model import HybridModel
from runner.show import verdict


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
    assert "equals its first" in " ".join(capsys.readouterr().out.split())


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
        (["--model", "./nowhere"], "not a folder"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--device", "tpu"], "tpu"),
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
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


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
