"""The real ``dynamo.indexer``, in a network of its own: it listens on all addresses, and needs none outside.

A relay beside it takes questions on its standard input. Events come through sockets in the file system.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

from patience import PATIENCE_S

PYTHON = Path(os.environ.get("KVTIER_ROUTERS_PYTHON") or Path(__file__).parents[3] / ".venv-routers/bin/python")
MODEL = "canary"

RELAY = """if True:
    import fcntl, json, socket, struct, subprocess, sys, time, urllib.error, urllib.request
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # the loopback goes up
        fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))
    indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", "8090", "--threads", "2"],
                               stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
    def ask(path, body):
        sent = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request("http://127.0.0.1:8090" + path, sent, {"Content-Type": "application/json"})
        try:
            return json.loads(urllib.request.urlopen(asked, timeout=120).read() or b"{}")
        except urllib.error.HTTPError as problem:
            return {"error": problem.code, "said": problem.read().decode()}
    try:
        until = time.monotonic() + 120
        while indexer.poll() is None and time.monotonic() < until:
            try:
                urllib.request.urlopen("http://127.0.0.1:8090/health", timeout=20)
                break
            except OSError:
                time.sleep(0.05)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            print(json.dumps(ask(*json.loads(line))), flush=True)
    finally:
        indexer.kill()
        indexer.wait()
"""


def why_not() -> str | None:
    """Why it cannot run here; None if it can."""
    if not PYTHON.exists():
        return "dynamo.indexer is not installed; `make routers` does that"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        return "dynamo.indexer listens on all addresses and no network namespace can be made: turn user namespaces on"
    return None


class Indexer:
    """Runs from ``with`` to its end."""

    def __init__(self, log: Path, block_tokens: int) -> None:
        self._log, self._block_tokens = log, block_tokens

    def __enter__(self) -> Self:
        self._errors = self._log.open("wb")
        self._relay = subprocess.Popen(
            ["unshare", "-rn", str(PYTHON), "-c", RELAY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        )
        assert self._line() == "ready", self._log.read_text()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._relay.stdin is not None and self._relay.stdout is not None
        self._relay.stdin.close()
        self._relay.stdout.close()
        try:
            self._relay.wait(PATIENCE_S)
        finally:
            self._relay.kill()
            self._errors.close()

    def _line(self) -> Any:
        assert self._relay.stdout is not None
        return json.loads(self._relay.stdout.readline() or "null")

    def ask(self, path: str, body: Any = None) -> Any:
        assert self._relay.stdin is not None
        print(json.dumps([path, body]), file=self._relay.stdin, flush=True)
        return self._line()

    def register(self, engine: int, endpoint: str, replay_endpoint: str | None) -> None:
        replay = {} if replay_endpoint is None else {"replay_endpoint": replay_endpoint}
        body = {"instance_id": engine, "endpoint": endpoint, "model_name": MODEL, "block_size": self._block_tokens}
        assert self.ask("/register", body | replay) == {"status": "ok"}

    def matched(self, tokens: list[int], engine: int) -> tuple[int, int]:
        """Tokens of the longest prefix that it thinks an engine has; and on the device."""
        body = {"token_ids": tokens, "model_name": MODEL, "block_size": self._block_tokens}
        told = self.ask("/query", body)["instances"].get(str(engine))
        return (0, 0) if told is None else (told["longest_matched"], told["gpu"])

    def by_tier(self, tokens: list[int], engine: int) -> dict[str, int]:
        """The same on the device, with the host tier, and with the remote."""
        body = {"token_ids": tokens, "model_name": MODEL, "block_size": self._block_tokens}
        told = self.ask("/query", body)["instances"].get(str(engine), {})
        return {name: told.get(name, 0) for name in ("gpu", "cpu", "disk")}

    def warnings(self) -> list[str]:
        """What it did not like: a block without its parent, a batch that it could not read."""
        self._errors.flush()
        lines = self._log.read_text(errors="replace").splitlines()
        late = ("Gap detected", "started_after_requested")  # it came later than the first batch
        return [
            line for line in lines if ("WARN" in line or "ERROR" in line) and not any(said in line for said in late)
        ]
