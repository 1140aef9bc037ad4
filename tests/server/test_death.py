"""The engine's death: told at once, to everybody, and the end of the process."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runner import AsyncLLM
from runner.commands import serve
from server.mortal import dies
from server.running import serving

ASK = {"prompt": "w1 w2", "max_tokens": 2, "ignore_eos": True}
ENDLESS = ASK | {"max_tokens": 5_000, "stream": True}


def kill(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step is its last."""
    monkeypatch.setattr(llm.engine, "step", dies)


def events(response: httpx.Response) -> Iterator[Any]:
    """The data of a stream, up to [DONE]."""
    told = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
    yield from (json.loads(one) for one in told if one != "[DONE]")


def deaths(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.levelno >= logging.ERROR]


def gauges(web: httpx.Client) -> dict[str, float]:
    """Those of the engine and its cache, one value of each."""
    families = text_string_to_metric_families(web.get("/metrics").text)
    found = (family for family in families if family.type == "gauge" and ":" in family.name)
    return {family.name: family.samples[0].value for family in found if family.samples}


def test_a_death_is_logged_once_with_its_traceback_however_many_ask(
    mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(mortal, exit_on_engine_death=False) as running, httpx.Client(base_url=running.url) as web:
        with web.stream("POST", "/v1/completions", json=ENDLESS) as response:
            told = events(response)
            assert "choices" in next(told)
            kill(mortal, monkeypatch)
            assert [*told][-1]["error"]["code"] == "engine_dead"
        [record] = deaths(caplog)  # before anybody has asked after it
        assert record.getMessage() == "the engine died of RuntimeError: planted death"
        assert record.exc_info is not None and "in dies" in (record.exc_text or logging.Formatter().format(record))
        told = [web.post("/v1/completions", json=ASK | {"stream": k % 2 == 0}) for k in range(20)]
        told += [web.get("/health"), web.get("/ready")]
        assert {(one.status_code, one.json()["error"]["code"]) for one in told} == {(503, "engine_dead")}
        assert len(deaths(caplog)) == 1
        assert running.thread.is_alive()


def test_metrics_say_that_the_engine_is_dead_and_no_gauge_freezes(
    mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(mortal, exit_on_engine_death=False) as running, httpx.Client(base_url=running.url) as web:
        assert web.post("/v1/completions", json=ASK).status_code == 200
        before = gauges(web)
        assert before["kvtier:engine_up"] == 1 and len(before) > 10
        kill(mortal, monkeypatch)
        assert web.post("/v1/completions", json=ASK).status_code == 503
        assert gauges(web) == {"kvtier:engine_up": 0}
        assert re.search(r"^vllm:generation_tokens_total{.*} 2\.0$", web.get("/metrics").text, re.M), "counters stay"


def test_the_server_ends_with_its_engine_once_all_have_been_told(
    mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(mortal) as running, httpx.Client(base_url=running.url, timeout=60) as web:
        with web.stream("POST", "/v1/completions", json=ENDLESS | {"n": 3}) as response:
            told = events(response)
            next(told)
            kill(mortal, monkeypatch)
            assert [*told][-1]["error"]["code"] == "engine_dead"
        running.thread.join(60)
        assert not running.thread.is_alive()


@pytest.mark.parametrize("given", [(), ("--no-exit-on-engine-death", "--disable-log-stats")])
def test_the_command_may_turn_both_off(given: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    serve.add_to(parser.add_subparsers())
    settings = serve._settings(parser.parse_args(["serve", *given]), {}, ["needle"], None)
    assert (settings.exit_on_engine_death, settings.log_stats) == (not given, not given)


def test_a_process_whose_engine_dies_ends_with_a_status(tmp_path: Path) -> None:
    options = ["--port", "0", "--device", "cpu", "--device-memory", "16MiB", "--host-memory", "0"]
    command = [sys.executable, "-m", "server.mortal", *options]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"PYTHONPATH": path, "KVTIER_AUDIT": "0"}
    with subprocess.Popen(command, env=env, **pipes) as process:
        try:
            assert process.stderr is not None
            said = []
            while "curl" not in "".join(said[-1:]):
                said.append(process.stderr.readline())
                assert said[-1], said
            url = re.search(r"curl (\S+)", said[-1])
            assert url is not None
            told = httpx.post(url[1], json=ASK, timeout=60, headers={"X-Request-Id": "mine"})
            assert (told.status_code, told.json()["error"]["code"]) == (503, "engine_dead")
            access, rest = process.communicate(timeout=60)
            assert process.returncode == 1
        finally:
            process.kill()
    assert rest.count("the engine died of RuntimeError: planted death") == 1
    assert rest.count("Traceback") == 1 and "in dies" in rest
    told_at = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    line = rf'{told_at}INFO: +\[cmpl-mine\] \S+ - "POST /v1/completions HTTP/1.1" 503 .*\n'
    assert re.fullmatch(line, access), access
    assert len(re.findall(rf"^{told_at}ERROR: +the (engine died|server ends)", rest, re.M)) == 2
