"""The processes: engines of ``kvtier serve``, each with KV events, and a router before them.

Owns       the processes and their ports, all on 127.0.0.1.
Promises   whatever happens, no process outlives the block.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

READY_S = 120.0
ENGINE_OPTIONS = ("--device-memory", "64MiB", "--host-memory", "64MiB", "--disable-uvicorn-access-log")
ROUTER_OPTIONS = (
    "--health-check-interval-secs",
    "1",
    "--health-failure-threshold",
    "1",
    "--health-success-threshold",
    "1",
)


class Failed(Exception):
    """A process did not come up; the message has the end of its log."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Process:
    """A server with a log of its own."""

    def __init__(self, name: str, command: list[str], url: str, folder: Path) -> None:
        self.name, self.url = name, url
        self._command = command
        self._log = folder / f"{name}.log"
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Does not wait until it is ready."""
        with self._log.open("ab") as log:
            self._running = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait(self) -> None:
        """Until it answers; raises ``Failed``."""
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self._running is not None and self._running.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=1.0).status_code == 200:
                    return
            time.sleep(0.1)
        said = self._log.read_text(errors="replace").splitlines()[-12:]
        raise Failed("\n".join([f"{self.name} does not answer at {self.url}/health. Its log ends with:", *said]))

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends it and waits until it has gone."""
        if self._running is None:
            return
        self._running.send_signal(how)
        try:
            self._running.wait(20)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()
        self._running = None


class Fleet:
    """``engines`` engines of the bundled model and a ``vllm-router`` with ``policy``."""

    def __init__(
        self,
        router: Path,
        policy: str,
        engines: int,
        folder: Path,
        options: list[str],
        of_engines: Sequence[str] = ENGINE_OPTIONS,
    ) -> None:
        """``options``: of the router."""
        ports = free_ports(3 * engines + 2)
        os.environ["OMP_NUM_THREADS"] = "1"  # of engines that share a machine
        self.engines = [
            _engine(f"engine-{i + 1}", ports[3 * i : 3 * i + 3], folder, of_engines) for i in range(engines)
        ]
        events = [tuple(f"tcp://127.0.0.1:{port}" for port in ports[3 * i + 1 : 3 * i + 3]) for i in range(engines)]
        command = [str(router), "--host", "127.0.0.1", "--port", str(ports[-2]), "--prometheus-host", "127.0.0.1"]
        command += ["--prometheus-port", str(ports[-1]), "--policy", policy, *ROUTER_OPTIONS]
        command += ["--worker-urls", *(engine.url for engine in self.engines)]
        if policy == "kv_aware":
            command += ["--kv-event-block-size", "16", "--kv-event-model", "needle"]
            for engine, (endpoint, replay) in zip(self.engines, events, strict=True):
                command += ["--kv-event-source", f"{engine.url}={endpoint}"]
                command += ["--kv-event-replay-source", f"{engine.url}={replay}"]
        self.url = f"http://127.0.0.1:{ports[-2]}"
        self.router = Process(f"router-{policy}", [*command, *options], self.url, folder)

    def __enter__(self) -> Self:
        try:
            for engine in self.engines:
                engine.start()
            for engine in self.engines:
                engine.wait()
            self.router.start()
            self.router.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in (self.router, *self.engines):
            process.end()


def _engine(name: str, ports: list[int], folder: Path, options: Sequence[str]) -> Process:
    port, endpoint, replay = ports
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{endpoint}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
    }
    serve = [sys.executable, "-m", "runner.cli", "serve", "--port", str(port), *options]
    names = ["--served-model-name", name, "needle"]  # an answer to whoever names no model names the engine
    return Process(name, [*serve, *names, "--kv-events-config", json.dumps(config)], f"http://127.0.0.1:{port}", folder)


def counted(engine: Process) -> dict[str, float]:
    """What an engine's own metrics say of the prompts that it has served."""
    wanted = {
        "vllm:prompt_tokens_total": "prompt_tokens",
        "vllm:prompt_tokens_cached_total": "cached_tokens",
        "vllm:request_success_total": "requests",
    }
    found = dict.fromkeys(wanted.values(), 0.0)
    for line in httpx.get(f"{engine.url}/metrics", timeout=10.0).text.splitlines():
        name = line.partition("{")[0]
        if name in wanted:
            found[wanted[name]] += float(line.rpartition(" ")[2])
    return found
