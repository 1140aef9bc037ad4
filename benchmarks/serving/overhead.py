"""What a token costs beside the model: the engine's thread, streams, HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.serving.subjects import cpu_seconds
from kvtier import Request
from runner import AsyncLLM, RequestOutputKind, SamplingParams

NAMES = ("engine by hand", "AsyncLLM", "HTTP")
RUNNING, NEW, LENGTH = 16, 256, 60

_CLIENT = """
import asyncio, json, sys
import httpx

async def one(client, prompt, new):
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    count = 0
    async with client.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=600) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            count += line.startswith("data: {")
    return count

async def main():
    prompts = json.load(sys.stdin)
    async with httpx.AsyncClient() as client:
        print(sum(await asyncio.gather(*(one(client, p, int(sys.argv[2])) for p in prompts))))

asyncio.run(main())
"""


def rows(path: Path, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of CPU a token, 16 running: in all, by who asks. The model's own part is the same in each."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    llm = AsyncLLM(path, "cpu", "256MiB", 0, dtype="float32")
    rng = np.random.default_rng(1)

    def fresh() -> list[list[int]]:
        return [rng.integers(10, llm.model.vocab_size, LENGTH).tolist() for _ in range(RUNNING)]

    served = Served(path)
    ways: dict[str, Callable[[], float]] = {
        NAMES[0]: lambda: cpu_seconds(lambda: llm.thread.call(lambda: _by_hand(llm, fresh())).result()),
        NAMES[1]: lambda: cpu_seconds(lambda: asyncio.run(_streamed(llm, fresh()))),
        NAMES[2]: lambda: served.cpu_seconds(lambda: _over_http(served.url, fresh())),
    }
    try:
        for turn in range(repeats + 1):
            for name, way in ways.items():
                seconds = way()
                if turn:  # the first one warms up
                    found[name].append(1e6 * seconds / (RUNNING * NEW))
    finally:
        served.close()
        llm.close()
    what = f"a token, {RUNNING} running, us of CPU"
    return [{"what": what, "median": {k: statistics.median(v) for k, v in found.items()}, "all": found}]


def _params(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, **more)


def _by_hand(llm: AsyncLLM, prompts: list[list[int]]) -> None:
    for i, prompt in enumerate(prompts):
        llm.engine.add(Request(f"by hand {i}", prompt, NEW), _params())
    while llm.engine.has_requests():
        llm.engine.step()


async def _streamed(llm: AsyncLLM, prompts: list[list[int]]) -> None:
    async def one(prompt: list[int]) -> None:
        async for _ in llm.generate(prompt, _params(output_kind=RequestOutputKind.DELTA)):
            pass

    await asyncio.gather(*map(one, prompts))


def _over_http(url: str, prompts: list[list[int]]) -> None:
    client = [sys.executable, "-c", _CLIENT, url, str(NEW)]
    subprocess.run(client, input=json.dumps(prompts), text=True, check=True, capture_output=True)


class Served:
    """``kvtier serve`` in a process of its own."""

    def __init__(self, model: Path) -> None:
        with socket.socket() as any_free:
            any_free.bind(("127.0.0.1", 0))
            port = any_free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = ["--port", str(port), "--device", "cpu", "--device-memory", "256MiB", "--host-memory", "0"]
        command = [sys.executable, "-c", "from runner.cli import main; raise SystemExit(main())", "serve", str(model)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, *options, "--dtype", "float32"], env=environment, stdout=subprocess.DEVNULL
        )
        for _ in range(3000):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/ready").status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError("kvtier serve did not become ready")

    def cpu_seconds(self, work: Callable[[], object]) -> float:
        """Of the server, while ``work`` runs."""
        begun = self._spent()
        work()
        return self._spent() - begun

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _spent(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
