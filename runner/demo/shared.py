"""What a remote tier is for, with the bundled model: real servers in processes of their own.

1. An engine computes a long prompt. It is killed with SIGKILL, and started again: the prompt is a hit.
2. Another engine, with the same remote, hits what the first one has computed.
3. Prefill and decode apart: one engine computes a prompt (``max_tokens=1``), another one decodes from the remote.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from kvtier import ConfigError
from runner import needle
from runner.demo.job import bundled_length, check_length
from runner.model.checkpoint import find_folder, read_config

MAX_NEW_TOKENS = 8
START_S = 180.0
SETTLE_S = 60.0


@dataclass(frozen=True)
class Answered:
    """One request. Tokens are prompt tokens by source."""

    what: str
    engine: str
    ttft_s: float
    cached: dict[str, int]
    tokens: int
    text: str


@dataclass(frozen=True)
class Report:
    """``ok``: all answers to one prompt are equal, and all but the cold ones came from the remote."""

    tokens: int
    store: str
    answers: list[Answered]
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


class Engine:
    """``kvtier serve`` in a process of its own. ``memory``: of device and host; by default enough for three prompts."""

    def __init__(self, name: str, store: str, log: Path, tokens: int, memory: tuple[str, str] | None = None) -> None:
        self.name = name
        self._log = log.open("ab")
        device, host = memory or (f"{max(1, tokens // 600)}MiB",) * 2
        command = [sys.executable, "-m", "kvtier", "serve", "--port", "0", "--device", "cpu", "--kv-remote", store]
        command += ["--device-memory", device, "--host-memory", host, "--max-num-batched-tokens", "3072"]
        environment = os.environ | {"KVTIER_KEY_SECRET": "of the demo", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment
        )
        self.url = self._find_url(log)

    def _find_url(self, log: Path) -> str:
        begun, start = time.monotonic(), self._log.tell()
        while time.monotonic() < begun + START_S:
            text = log.read_bytes()[start:].decode(errors="replace")
            for word in text.split():
                if word.startswith("http://") and word.endswith("/v1"):
                    return word
            if self._process.poll() is not None:
                raise ConfigError(f"engine {self.name} did not start: {text.strip()[-500:]}")
            time.sleep(0.05)
        raise ConfigError(f"engine {self.name} did not start within {START_S:g} s")

    def complete(self, prompt: str, max_tokens: int) -> tuple[str, float, dict[str, int]]:
        """(Text, seconds to the first token, cached tokens by tier)."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        begun, first, text = time.perf_counter(), None, ""
        usage: dict[str, Any] = {}
        request = Request(f"{self.url}/completions", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as stream:
            for line in stream:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk["choices"]:
                    first = time.perf_counter() if first is None else first
                    text += chunk["choices"][0]["text"]
                usage = chunk.get("usage") or usage
        return text, (first or time.perf_counter()) - begun, usage["prompt_tokens_details"]["cached_tokens_by_tier"]

    def wait_until_stored(self) -> None:
        """Until nothing is on its way to the remote."""
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            with urlopen(self.url.removesuffix("/v1") + "/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
            busy = [line for line in lines if line.startswith(("kvtier:remote_live_moves{", "kvtier:live_transfers{"))]
            if all(line.endswith(" 0.0") for line in busy):
                return
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self.kill()


def run(tokens: int, store: str | None = None, tell: Callable[[str], None] = lambda text: None) -> Report:
    """Runs all three; ``store``: its URI, a new folder without it. ``tell`` hears what is under way.

    Prompts have up to ``tokens`` tokens. Raises ``ConfigError`` for a number that gives none.
    """
    check_length(read_config(find_folder(needle.weights_path(), ["config.json"])), tokens, "the bundled model")
    tokens = bundled_length(tokens)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-demo-")))
        uri = f"file://{folder / 'store'}" if store is None else store
        prompts = [needle.make_prompt(tokens, seed=seed) for seed in (11, 12)]
        answers: list[Answered] = []

        def engine(name: str) -> Engine:
            tell(f"starting engine {name}")
            return stack.enter_context(Engine(name, uri, folder / f"{name}.log", tokens))

        def ask(what: str, of: Engine, prompt: str, max_tokens: int = MAX_NEW_TOKENS) -> None:
            tell(f"engine {of.name}: {what}")
            text, ttft_s, cached = of.complete(prompt, max_tokens)
            answers.append(Answered(what, of.name, ttft_s, cached, tokens, text.strip()))

        one = engine("A")
        ask("cold", one, prompts[0].text)
        one.wait_until_stored()
        tell("killing engine A")
        one.kill()
        one = engine("A")
        ask("after kill -9", one, prompts[0].text)
        two = engine("B")
        ask("another engine", two, prompts[0].text)
        ask("prefill alone", one, prompts[1].text, 1)
        one.wait_until_stored()
        ask("decode alone", two, prompts[1].text)
    right = [prompt.answer.rstrip(" .") for prompt in prompts]
    return Report(tokens, uri if store else "a folder", answers, _is_well(answers, right))


def _is_well(answers: list[Answered], right: list[str]) -> bool:
    cold, again, other, prefill, decode = answers
    texts = cold.text == again.text == other.text == right[0] and decode.text == right[1]
    starts = decode.text.startswith(prefill.text)
    stored = all(answer.cached.get("remote", 0) > 0.9 * answer.tokens for answer in (again, other, decode))
    return texts and starts and stored
