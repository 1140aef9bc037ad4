"""The process ends when it has to, whatever it does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from queue import SimpleQueue

import httpx
import pytest

from runner import AsyncLLM, needle
from runner.server.deadline import GRACE_S, Deadline
from server.mortal import dies
from server.running import serving

WAIT_S = 60


def test_the_nearest_moment_counts() -> None:
    now, ended = [0.0], SimpleQueue[int]()
    deadline = Deadline(status=lambda: 7, clock=lambda: now[0], end=ended.put)
    deadline.within(1000.0)
    deadline.within(100.0)
    now[0] = 99.0
    deadline.within(2000.0)
    assert ended.empty()
    now[0] = 101.0
    deadline.within(2000.0)
    assert ended.get(timeout=WAIT_S) == 7


def test_a_log_that_takes_nothing_does_not_keep_it(monkeypatch) -> None:
    ended, never = SimpleQueue[int](), threading.Event()
    monkeypatch.setattr("runner.server.deadline._TELL_S", 0.01)
    monkeypatch.setattr("runner.server.deadline.log.warning", lambda *_: never.wait())
    Deadline(status=lambda: 0, end=ended.put).within(0.0)
    assert ended.get(timeout=WAIT_S) == 0
    never.set()


def test_a_death_of_the_engine_brings_it_near(mortal: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    now, ended = [0.0], SimpleQueue[int]()
    deadline = Deadline(status=lambda: 1, clock=lambda: now[0], end=ended.put)
    with serving(mortal, deadline=deadline) as running:
        monkeypatch.setattr(mortal.engine, "step", dies)
        assert httpx.post(f"{running.url}/v1/completions", json={"prompt": [7]}, timeout=WAIT_S).status_code == 503
        running.thread.join(WAIT_S)
    now[0] = GRACE_S
    deadline.within(1000.0)
    assert ended.get(timeout=WAIT_S) == 1


STUCK = """
import sys, threading
from runner.cli import main
from runner.server import lifecycle, served

def stuck(self, *_):
    print("it is stuck", file=sys.stderr, flush=True)
    threading.Event().wait()

served.Served.decode = stuck
lifecycle.GRACE_S = 0.5
sys.exit(main(sys.argv[1:]))
"""
BOMB = "|".join(f"[78 ]{{{i},1000}}" for i in range(300))


def test_the_command_serves_and_sigterm_ends_it_while_a_thread_is_stuck_and_a_grammar_compiles() -> None:
    """The interpreter alone would wait for the thread for ever, and for the grammar for minutes."""
    prompt = needle.make_prompt(200, seed=3)
    env = os.environ | {"KVTIER_API_KEY": "secret", "KVTIER_AUDIT": "0"}
    options = ["--port", "0", "--device-memory", "16MiB", "--host-memory", "0", "--drain-timeout", "0.1"]
    command = [sys.executable, "-c", STUCK, "serve", *options, "--grammar-compile-limit", "100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server:
        try:
            told = _until(server, "/v1/completions")
            url = re.search(r"http://127\.0\.0\.1:\d+", told)[0]
            assert "16.0 MiB of device memory (--device-memory): contexts of" in told and "no host tier" in told
            answer = _ask(f"{url}/v1/completions", {"prompt": prompt.text, "temperature": 0})
            assert answer.json()["choices"][0]["text"] + " ." == prompt.answer
            assert _ask(f"{url}/v1/models", key="x").status_code == 401
            asked = ("/detokenize", {"tokens": [7]}), ("/v1/completions", {"prompt": [7], "guided_regex": f"({BOMB})*"})
            for path, body in asked:
                threading.Thread(target=_ask, args=(url + path, body), daemon=True).start()
            _until(server, "it is stuck")
            server.send_signal(signal.SIGTERM)
            told = server.communicate(timeout=WAIT_S)[1]
            assert server.returncode == 0
            assert re.search(r"these threads still there: .*kvtier-read-short_0", told)
        finally:
            server.kill()


def _ask(url: str, body: dict | None = None, key: str = "secret") -> httpx.Response | None:
    """The answer, or None if the server ends before it."""
    headers = {"Authorization": f"Bearer {key}"}
    try:
        return httpx.request("POST" if body else "GET", url, json=body, headers=headers, timeout=WAIT_S)
    except httpx.TransportError:
        return None


def _until(server: subprocess.Popen, word: str) -> str:
    """What it says until then."""
    told = ""
    while word not in told:
        line = server.stderr.readline()
        assert line, told
        told += line
    return told
