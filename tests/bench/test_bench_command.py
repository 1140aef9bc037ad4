"""``kvtier bench serve`` as users call it: against the real server, and against one that goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import FOREVER_S, PATIENCE_S
from server.running import Running

from bench.conftest import KEY
from bench.fake_server import Request, Script, fake_server
from runner.bench import drive
from runner.cli import main

ROOT = Path(__file__).parents[2]
Bench = Callable[..., dict[str, Any]]

TRACE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 32, "hash_ids": [0, 1]},
    {"timestamp": 90, "input_length": 1200, "output_length": 32, "hash_ids": [0, 1, 2]},
]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run waits before its first request; no key comes from outside."""
    monkeypatch.setattr(drive, "LEAD_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def bench(running: Running, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs it against the real server, whose cache is empty then; the report that it prints as JSON."""

    def bench(*given: str, status: int = 0) -> dict[str, Any]:
        asyncio.run(running.llm.reset_prefix_cache())
        command = ["bench", "serve", "--base-url", running.url, "--api-key", KEY, "--ignore-eos", "--json", *given]
        found = main(command)
        told = capsys.readouterr()
        assert (found, told.err) == (status, "")
        assert KEY not in told.out
        return json.loads(told.out)

    return bench


def sizes(report: dict[str, Any]) -> tuple[int, int, int]:
    """(Requests answered, their prompts' tokens, their answers' tokens)."""
    return report["counts"]["completed"], report["total_input_tokens"], report["total_output_tokens"]


def test_random_prompts(bench: Bench) -> None:
    report = bench("--num-prompts", "6", "--random-input-len", "40", "--random-output-len", "5", "--seed", "3",
                   "--request-rate", "200", "--goodput", "ttft:60000", "e2el:60000",
                   "--metadata", "why=test")  # fmt: skip
    assert report["ok"] and sizes(report) == (6, 240, 30)
    assert report["lengths"]["prompts_of_other_length"] == report["lengths"]["answers_shorter_than_planned"] == 0
    assert report["workload"]["seed"] == 3 and report["workload"]["parameters"]["request_rate"] == 200.0
    assert report["server"]["model"] == "needle" and report["server"]["owned_by"] == "kvtier"
    assert report["server"]["version"] and report["server"]["max_model_len"] == 4096 and report["date"]
    assert report["cache"]["cached_tokens"] == 0 and report["good_requests"] == 6
    assert report["max_ttft_ms"] >= report["p99_ttft_ms"] >= report["median_ttft_ms"] > 0 and report["duration"] > 0
    assert report["metadata"] == {"why": "test"} and report["requests"]["api_key"] is True
    for name in ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue"):
        assert report[f"mean_{name}_ms"] > 0 and report[f"p50_{name}_ms"] <= report[f"p99_{name}_ms"]


def test_shared_prefixes_are_found_in_the_cache(bench: Bench) -> None:
    report = bench("--dataset-name", "prefix_repetition", "--num-prompts", "6", "--prefix-repetition-prefix-len", "256",
                   "--prefix-repetition-suffix-len", "16", "--prefix-repetition-num-prefixes", "2",
                   "--prefix-repetition-output-len", "3", "--request-rate", "20", "--burstiness", "inf")  # fmt: skip
    assert sizes(report) == (6, 6 * 272, 18)
    assert report["cache"]["shareable_share"] == pytest.approx(4 * 256 / (6 * 272), abs=1e-4)
    assert report["cache"]["cached_tokens"] == 4 * 256


@pytest.mark.parametrize("form", [["--history", "answers"], ["--history", "scripted"], ["--prompt-form", "text"]])
def test_conversations_find_what_was_said_before(bench: Bench, form: list[str]) -> None:
    report = bench("--dataset-name", "conversations", "--num-prompts", "6", "--turns", "3", "--first-turn-len", "64",
                   "--turn-len", "16", "--turn-output-len", "8", "--think-time", "0.001", *form)  # fmt: skip
    answered, prompts, answers = sizes(report)
    assert (answered, answers) == (6, 48)
    assert prompts == 2 * (64 + 88 + 112) or "text" in form  # a text's tokens depend on what was answered
    assert 0.5 < report["cache"]["share"] <= report["cache"]["shareable_share"]


def test_chats(bench: Bench) -> None:
    report = bench("--endpoint", "/v1/chat/completions", "--dataset-name", "conversations", "--num-prompts", "3",
                   "--turns", "3", "--first-turn-len", "48", "--turn-len", "16", "--turn-output-len", "4",
                   "--think-time", "0")  # fmt: skip
    assert sizes(report)[0] == 3 and report["requests"]["prompt_form"] == "text"
    assert report["lengths"]["mean_extra_prompt_tokens"] > 0  # of the chat template
    assert report["cache"]["cached_tokens"] > 48


def test_back_to_back(bench: Bench) -> None:
    given = "--num-prompts", "3", "--long-len", "1600", "--long-output-len", "2"
    report = bench("--dataset-name", "back_to_back", *given)
    assert sizes(report) == (3, 4800, 6) and report["generator"]["schedule"] == "closed loop"
    assert report["cache"]["cached_tokens"] == 1600 - 16


def test_a_trace_with_a_picture_and_a_row_for_each_request(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; `make test` installs it")
    trace, picture, result = tmp_path / "t.jsonl", tmp_path / "p.png", tmp_path / "new" / "r.json"
    trace.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    report = bench("--trace", str(trace), "--length-scale", "0.25", "--time-scale", "2", "--save-detailed",
                   "--plot", str(picture), "--save-result", "--result-dir", str(result.parent),
                   "--result-filename", result.name)  # fmt: skip
    assert sizes(report) == (2, 550, 16) and json.loads(result.read_text()) == report
    first, second = report["records"]
    assert (first["due"], second["due"]) == (0.0, 0.18) and second["input_len"] == 300
    assert first["ttft"] > 0 and len(second["itls"]) <= 7
    assert report["workload"]["parameters"]["trace"] == "t.jsonl"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_printed_report_has_the_workload_and_the_seed(
    running: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "200")
    for _ in range(2):
        assert main(["bench", "serve", "--base-url", running.url, "--num-prompts", "2", "--random-input-len", "64",
                     "--random-output-len", "3", "--seed", "11"]) == 0  # fmt: skip
    told = capsys.readouterr()
    assert told.err == ""  # no progress bar if nobody watches
    for part in ("needle at http://", "kvtier, version", "workload random: num_prompts=2 random_input_len=64",
                 "request_rate=inf", "seed=11", "digest", "time to first token", "cached_tokens",
                 "2 of 2 requests answered", "Use another --seed"):  # fmt: skip
        assert part in told.out, part
    assert KEY not in told.out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--port", "1"], "no answer from http://127.0.0.1:1/v1/models"),
        (["--base-url", "localhost:8000"], "is not an address"),
        (["--percentile-metrics", "ttft,speed"], "there is no 'speed'"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--goodput", "speed:1"], "no service level objective"),
        (["--metadata", "x"], "is not KEY=VALUE"),
        (["--dataset-name", "timed_trace"], "one goes with the other"),
        (["--trace", "none.jsonl"], "cannot be read"),
        (["--output", "/proc/no/file.json"], "cannot be written"),
        (["--plot", "/"], "--plot needs the name of a file"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
    ],
)
def test_bad_input_is_status_2(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "it wants an API key"),
        (["--api-key", KEY, "--model", "other"], "does not serve 'other', but 'needle'"),
        (["--api-key", KEY, "--random-input-len", "4000"], "takes 4,096; make the workload's prompts shorter"),
        (["--api-key", KEY, "--token-ids", "900:999"], "does not take requests of this form (HTTP status: 400"),
        (["--api-key", KEY, "--extra-body", '{"no_such_field": 1}'], "no_such_field"),
        (["--api-key", KEY, "--endpoint", "/v1/chat/completions", "--prompt-form", "ids"], "chats take no token ids"),
        (["--api-key", KEY, "--tokenizer", "nowhere"], "--tokenizer nowhere"),
        (["--api-key", KEY, "--ssl-ca-certs", "nowhere"], "--ssl-ca-certs nowhere cannot be read"),
    ],
)
def test_what_the_server_cannot_do_is_told_before_the_run(
    running: Running, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", running.url, *given]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == ""


def test_without_aiohttp_the_message_has_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["bench", "serve"]) == 2
    assert "pip install 'kvtier[bench]'" in capsys.readouterr().err


def bench_fake(script: Script, *given: str) -> int:
    """Its status against a server with this script."""

    async def go() -> int:
        async with fake_server(script) as fake:
            return await asyncio.to_thread(main, ["bench", "serve", "--base-url", fake.url, "--json", *given])

    return asyncio.run(go())


def test_errors_are_counted_and_are_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    count = iter(range(100))

    async def script(request: Request) -> None:
        if next(count) % 3 == 1:
            await request.answer({"error": {"message": "busy"}}, "503 Service Unavailable")
        else:
            await request.whole(2)

    assert bench_fake(script, "--num-prompts", "7") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and report["counts"]["completed"] + report["counts"]["failed"] == 7
    assert report["counts"]["errors"] == [
        {"kind": "HTTP 503", "count": report["counts"]["failed"], "first": "503: busy"}
    ]


def test_a_server_without_ids_of_answers_is_told_so_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    async def script(request: Request) -> None:
        await request.whole(2)

    given = ["--dataset-name", "conversations", "--num-prompts", "4", "--turns", "2", "--think-time", "0"]
    assert bench_fake(script, *given) == 2
    assert "use --history scripted" in capsys.readouterr().err
    assert bench_fake(script, *given, "--history", "scripted") == 0
    assert json.loads(capsys.readouterr().out)["counts"]["completed"] == 4


def test_a_server_that_dies_is_a_report_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drive, "DEAD_AFTER_S", 0.05)

    async def go() -> int:
        seen: list[Request] = []

        async def script(request: Request) -> None:
            await request.whole(1)
            seen.append(request)
            if len(seen) == 4:  # the first one is the trial
                fake.server.close()

        async with fake_server(script) as fake:
            given = ["--num-prompts", "5000", "--request-rate", "100", "--json"]
            return await asyncio.to_thread(main, ["bench", "serve", "--base-url", fake.url, *given])

    assert asyncio.run(go()) == 1
    report = json.loads(capsys.readouterr().out)
    counts = report["counts"]
    assert report["ending"] == "the server no longer takes connections" and counts["completed"] >= 3
    assert counts["errors"][0]["kind"] == "no connection" and counts["not_sent"] > 0
    assert counts["sent"] + counts["not_sent"] == 5000


def test_ctrl_c_is_a_report_and_status_130() -> None:
    async def go() -> tuple[int, dict[str, Any]]:
        under_way = asyncio.Event()

        async def script(request: Request) -> None:
            if len(fake.requests) < 4:
                await request.whole(2)
                return
            under_way.set()
            await asyncio.sleep(FOREVER_S)

        async with fake_server(script) as fake:
            command = [sys.executable, "-m", "runner.cli", "bench", "serve", "--base-url", fake.url, "--json",
                       "--num-prompts", "50", "--request-rate", "50", "--burstiness", "inf",
                       "--max-concurrency", "1"]  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
            await asyncio.wait_for(under_way.wait(), PATIENCE_S)
            process.send_signal(signal.SIGINT)
            out, _ = await process.communicate()
            return process.returncode or 0, json.loads(out)

    status, report = asyncio.run(go())
    assert status == 130 and report["ending"] == "interrupted" and not report["ok"]
    counts = report["counts"]
    assert counts["completed"] == 2 and counts["interrupted"] == 1 and counts["errors"] == []
    assert report["request_throughput"] > 0


def test_the_generator_needs_no_torch() -> None:
    code = (
        "import sys, runner.bench.run, runner.bench.report, runner.bench.show, runner.bench.traces, runner.bench.plot; "
        "sys.exit(repr({'torch', 'numba', 'transformers'} & set(sys.modules) or ''))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ran.stderr.strip() == "''"
