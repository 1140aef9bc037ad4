"""How a server ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import httpx
import openai
import pytest
from patience import FOREVER_S, PATIENCE_S

from runner import AsyncLLM, needle
from runner.server import lifecycle
from server.running import Running, gate, serving

PROMPT = needle.make_prompt(200, seed=3)
ASK = {"prompt": PROMPT.text, "temperature": 0}
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
ENDLESS = {"prompt": "w1", "max_tokens": 20_000, "ignore_eos": True, "stream": True, "skip_special_tokens": False}


class Stream(threading.Thread):
    """A client that reads a stream to its end."""

    def __init__(self, running: Running, body: dict) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.events: list[str] = []
        self._url, self._body = f"{running.url}/v1/completions", body
        self.start()
        assert self.begun.wait(PATIENCE_S)

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                self.events += [line.removeprefix("data: ")] if line else []
                self.begun.set()


def test_it_drains_then_ends(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those inside end by themselves, those who come are sent away, and nothing waits once they have."""
    gate(monkeypatch, llm, *[None] * 5, go_on := threading.Event())
    with serving(llm, drain_timeout_s=FOREVER_S) as running:
        stream = Stream(running, ENDLESS | {"max_tokens": 100})
        running.server.stop()
        refused = httpx.post(f"{running.url}/v1/completions", json=ASK)
        assert refused.status_code == httpx.get(f"{running.url}/ready").status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(f"{running.url}/health").status_code == 200
        go_on.set()
        stream.join(PATIENCE_S)
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive()
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"


def test_who_does_not_end_in_time_is_told(llm: AsyncLLM) -> None:
    with serving(llm, drain_timeout_s=0.2) as running:
        stream = Stream(running, ENDLESS)
        running.server.stop()
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive()
        stream.join(PATIENCE_S)
    assert json.loads(stream.events[-2])["error"]["code"] == "stopping"
    assert llm.load()["running"] == 0


def test_a_second_signal_does_not_wait(llm: AsyncLLM) -> None:
    with serving(llm, drain_timeout_s=FOREVER_S) as running:
        stream = Stream(running, ENDLESS)
        running.server.stop()
        running.server.stop()
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive()
        stream.join(PATIENCE_S)
        assert not stream.is_alive()


def test_who_has_not_been_queued_yet_is_told_as_well(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One waits for a grammar that is being compiled, and of another the body has not come."""
    compiling = threading.Event()

    def begin(_: object) -> Future[Any]:
        compiling.set()
        return Future()

    monkeypatch.setattr(llm.grammars, "begin", begin)
    monkeypatch.setattr(lifecycle, "_TELL_S", 0.01)
    monkeypatch.setattr(lifecycle, "_CLOSE_S", 0)
    answers: list[httpx.Response] = []
    with serving(llm, drain_timeout_s=0.01) as running:
        url, body = f"{running.url}/v1/completions", ASK | {"guided_choice": ["7", "8"]}
        waiting = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body)))
        waiting.start()
        assert compiling.wait(PATIENCE_S)
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port), PATIENCE_S) as half:
            half.sendall(HALF)
            httpx.get(f"{running.url}/health")  # comes behind it
            running.server.stop()
            told = half.recv(2**16)
        waiting.join(PATIENCE_S)
        running.thread.join(PATIENCE_S)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "stopping"
    assert told.startswith(b"HTTP/1.1 503")
    assert not [record for record in caplog.records if record.exc_info]


def test_the_command_serves_and_ends_on_sigterm() -> None:
    """With OpenAI's client; `test_deadline.py` has the same in a server that has trouble to end."""
    command = [
        sys.executable,
        "-m",
        "runner.cli",
        "serve",
        "--port",
        "0",
        "--device-memory",
        "16MiB",
        "--host-memory",
        "0",
    ]
    env = os.environ | {"KVTIER_API_KEY": "secret", "KVTIER_AUDIT": "0"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            told = ""
            while "/v1/completions" not in told:
                line = process.stderr.readline()
                assert line, told
                told += line
            url = re.search(r"http://127\.0\.0\.1:\d+/v1", told)[0]
            assert "16.0 MiB of device memory (--device-memory): contexts of" in told
            assert "no host tier" in told
            with openai.OpenAI(base_url=url, api_key="secret", max_retries=5) as client:
                for _ in range(2000):
                    try:
                        answer = client.completions.create(model="needle", **ASK)
                        break
                    except openai.APIConnectionError:
                        time.sleep(0.05)
                assert answer.choices[0].text + " ." == PROMPT.answer
            with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=url, api_key="x") as client:
                client.models.list()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
