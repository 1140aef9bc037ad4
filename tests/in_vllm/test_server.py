"""vLLM's OpenAI server in three processes, with the connector as users load it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import CONNECTOR, ENGINE, prompt
from models import POOL

SIZE = 1500
HIT = 1472
START_S = 240
BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "kvtier-vllm.json"


class Server:
    """A server on a free port of 127.0.0.1."""

    def __init__(self, model: Path, log: Path, policy: str = "recompute", **options: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        extra = {"host_memory": "64MiB", "deadline_s": 30} | options
        transfer = CONNECTOR | {"kv_connector_extra_config": extra, "kv_load_failure_policy": policy}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items() if value is not True]
        flags += [f"--{name.replace('_', '-')}" for name, value in ENGINE.items() if value is True]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        flags += [f"--num-gpu-blocks-override={POOL[model.name]}", "--max-num-batched-tokens=256"]
        command += ["--served-model-name=m", "--host=127.0.0.1", f"--port={self.port}", *flags]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        environment |= {"VLLM_LOGGING_LEVEL": "INFO", "KVTIER_KEY_SECRET": "of the tests"}
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def comes_up(self) -> bool:
        """Whether it answers at last, or ends."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.5)
            else:
                return True
        return False

    def get(self, path: str, body: Any = None) -> str:
        """An answer's text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    def ids(self, seed: int) -> list[int]:
        """A prompt's text."""
        body = {"model": "m", "prompt": prompt(seed, SIZE), "max_tokens": 16, "temperature": 0}
        answer = self.get("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})
        return list(json.loads(answer)["choices"][0]["token_ids"])

    def metric(self, name: str) -> float:
        """A counter's sum."""
        found = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

    def stop(self) -> None:
        """Ends it."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture
def serve(model: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def serve(name: str, **options: Any) -> Server:
        started.append(Server(model(name), tmp_path / f"{name}{len(started)}.log", **options))
        return started[-1]

    yield serve
    for server in started:
        server.stop()


@pytest.mark.timeout(600)
def test_prompts_in_turn_over_http_hit_the_host_tier_and_a_later_server_the_store(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    shared = {"remote_uri": f"file://{tmp_path}/kv"}
    server = serve("gemma3", **shared)
    assert server.comes_up(), server.log.read_text()[-4000:]
    cold = {seed: server.ids(seed) for seed in (1, 2)}
    assert len(cold[1]) == 16 and cold[1] != cold[2]
    assert server.metric("vllm:external_prefix_cache_hits_total") == 0
    for seed in (1, 2):
        assert server.ids(seed) == cold[seed]
    assert server.metric("vllm:external_prefix_cache_hits_total") == 2 * HIT
    assert server.metric("vllm:prefix_cache_hits_total") == 0
    assert server.metric("vllm:kvtier_remote_is_on") == 1
    told, board = server.get("/metrics"), BOARD.read_text(encoding="utf-8")
    assert {name for name in re.findall(r"vllm:\w+", board) if f"\n{name}{{" not in told} == set()
    assert re.findall(r'vllm:prompt_tokens_cached_by_source_total{.*source="host".*} (\S+)', told) == [f"{2.0 * HIT}"]
    server.stop()  # what was still on its way to the store gets there
    later = serve("gemma3", **shared)
    assert later.comes_up(), later.log.read_text()[-4000:]
    for seed in (1, 2):
        assert later.ids(seed) == cold[seed]
    late = later.metric("vllm:kvtier_remote_late_looks_total")  # on a busy machine: these prompts are computed
    assert later.metric("vllm:external_prefix_cache_hits_total") == (2 - late) * HIT
    assert later.metric("vllm:kvtier_remote_fetched_bytes_total") > 0 or late == 2


def test_a_server_with_the_wrong_policy_does_not_start_and_says_why(serve: Callable[..., Server]) -> None:
    server = serve("llama", policy="fail")
    assert not server.comes_up()
    assert server.process.poll() not in (None, 0)
    assert "kv_load_failure_policy is 'fail'" in server.log.read_text()
