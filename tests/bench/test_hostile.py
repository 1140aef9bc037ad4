"""Servers that tell nonsense, and reports that are written all the same."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bench.fake_server import FakeServer, Request, Script, fake_server
from runner.bench import drive, show
from runner.cli import main

SMALL = "--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "2"
DEEP = b"[" * 100_000


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run waits before its first request; no key comes from outside."""
    monkeypatch.setattr(drive, "LEAD_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def whole(request: Request) -> None:
    await request.whole(2)


def bench(
    script: Script,
    *given: str,
    told: Mapping[str, Any] | None = None,
    url: Callable[[str], str] = lambda url: url,
) -> tuple[int, FakeServer]:
    """Its status against such a server, and the server."""

    async def go() -> tuple[int, FakeServer]:
        async with fake_server(script, told) as fake:
            return await asyncio.to_thread(main, ["bench", "serve", "--base-url", url(fake.url), *SMALL, *given]), fake

    return asyncio.run(go())


def models(*cards: Any) -> dict[str, Any]:
    return {"/v1/models": {"data": list(cards)}}


@pytest.mark.parametrize(
    ("told", "given", "message"),
    [
        (models("m"), [], "the server lists no model"),
        (models("m"), ["--model", "m"], ""),
        (models({"id": "m", "max_model_len": "4096", "owned_by": 5, "root": [1]}), [], ""),
        ({"/v1/models": DEEP}, [], "say which model it serves with --model"),
        ({"/version": {"version": [1]}}, [], ""),
        ({"/tokenize": {"tokens": "abc"}}, [], "answers /tokenize with no token ids"),
        ({"/tokenize": {"tokens": None}}, [], "answers /tokenize with no token ids"),
        ({"/tokenize": {"tokens": [2**70] * 20}}, [], "answers /tokenize with no token ids"),
        ({"/tokenize": DEEP}, [], "has no /tokenize that could be used"),
        ({"/detokenize": {"prompt": 5}}, ["--prompt-form", "text"], "answers /detokenize with no text"),
    ],
)
def test_what_a_server_says_of_itself_may_be_of_any_type(
    told: Mapping[str, Any], given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = bench(whole, *given, told=told)
    assert status == (2 if message else 0) and message in capsys.readouterr().err


def test_the_error_s_text_breaks_no_terminal_and_loses_no_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    count = iter(range(100))

    async def script(request: Request) -> None:
        bad = b'{"error": {"message": "\\ud800 [red]x[/] [/bold] \\u001b[31m"}}'
        await (request.answer(bad, "500 Oops") if next(count) else request.whole(2))

    assert bench(script, "--output", str(tmp_path / "r.json"))[0] == 1
    out = capsys.readouterr().out
    assert "500: ? [red]x[/] [/bold] ?[31m" in " ".join(out.split()) and "\x1b" not in out
    assert json.loads((tmp_path / "r.json").read_text())["counts"]["failed"] == 4


def test_the_file_is_written_before_anything_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any) -> NoReturn:
        raise BrokenPipeError

    monkeypatch.setattr(show, "show", fails)
    with pytest.raises(BrokenPipeError):
        bench(whole, "--output", str(tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text())["ok"]


def test_a_full_disk_loses_no_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert bench(whole, "--json", "--output", str(tmp_path / "r.json"))[0] == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["ok"] and "r.json cannot be written: No space left" in told.err


def test_the_json_has_no_number_that_json_lacks(tmp_path: Path) -> None:
    def refuse(name: str) -> NoReturn:
        raise AssertionError(name)

    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n' * 2)
    given = ["--trace", str(trace), "--no-self-timed", "--request-rate", "500", "--burstiness", "inf"]
    assert bench(whole, *given, "--output", str(tmp_path / "r.json"))[0] == 0
    report = json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)
    assert report["workload"]["parameters"]["burstiness"] == "inf"


@pytest.mark.parametrize(
    "given",
    [
        ["--timeout", "0"],
        ["--connect-timeout", "0"],
        ["--extra-body", '{"a": NaN}'],
        ["--extra-body", '{"a": 1e999}'],
        ["--extra-body", '{"a": %s}' % ("[" * 100_000)],
        ["--time-scale", "inf"],
        ["--length-scale", "inf"],
        ["--timed-trace-sec-multiplier", "inf"],
    ],
)
def test_numbers_that_cannot_work_are_usage_errors(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *given])
    assert ended.value.code == 2 and f"argument {given[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--random-input-len", str(10**12)], ["--random-input-len", str(10**30)]])
def test_a_prompt_that_no_memory_holds_is_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(whole, "--model", "m", *given, told={"/v1/models": b""})[0] == 2
    assert "16,777,216" in capsys.readouterr().err


def test_a_password_in_the_address_is_used_and_told_nowhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def with_user(url: str) -> str:
        return url.replace("http://", "http://me:s%2Fcret@")

    output = tmp_path / "r.json"
    status, fake = bench(whole, "--output", str(output), url=with_user)
    sent = {request.headers["authorization"] for request in fake.requests}
    assert status == 0 and sent == {"Basic " + base64.b64encode(b"me:s/cret").decode()}
    report = json.loads(output.read_text())
    assert report["server"]["base_url"] == fake.url and report["requests"]["basic_auth"] is True
    assert bench(whole, "--api-key", "k", url=with_user)[0] == 2
    for url in ("me:s%2Fcret@host", "http://me:s%2Fcret@host:x", "http://me:s/cret@host", "http://me:s%2Fcret@"):
        assert main(["bench", "serve", "--base-url", url]) == 2
    told = capsys.readouterr()
    assert "use one of them" in told.err and not any("cret" in text for text in (*told, output.read_text()))


def test_a_server_that_redirects_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    async def moved(request: Request) -> None:
        await request.answer(b"", "308 Permanent Redirect", "location: http://127.0.0.1:1/v1/models\r\n")

    def moved_path(url: str) -> str:
        return url + "/old"  # the fake has no such paths, so that its script answers

    assert bench(moved, url=moved_path)[0] == 2
    assert "308: a redirect to http://127.0.0.1:1/v1/models, which is not followed" in capsys.readouterr().err


def test_lengths_that_differ_are_told_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    extra = iter([0, -3, 3, 0, 0])

    async def script(request: Request) -> None:
        await request.whole(2, prompt_tokens=8 + next(extra) if len(request.body["prompt"]) == 8 else 16)

    assert bench(script)[0] == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 prompts had another length than planned, says the server: by -3 to +3 tokens" in out and "+0.0" not in out
