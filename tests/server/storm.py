"""Many clients at once, some of whom leave, over a link that fails: ``python -m tests.server.storm --minutes 10``.

Streams of mixed lengths, a share of which is cut off by its client; a share of all copies between the tiers fails. A
process of its own asks for ``/health`` all the while. Prints what came; status 1 if there was an error that was not
planted, a wrong answer, ``/health`` late, memory that grew, or an audit that found something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx

DOCUMENTS = 24
LENGTHS = (64, 200, 500, 1000, 2000, 4000)
PROBE_EVERY_S = 0.1
LATE_S = 0.1
GROWTH_MIB = 32.0
"""What may stay beyond the memory after the first minute: arenas of malloc are not given back in one piece."""


# --- the server's process -------------------------------------------------------------------------


def serve(options: argparse.Namespace) -> int:
    """Serves until SIGTERM; then audits, and prints what it found as JSON."""
    from model.memory import held

    from kvtier.cpu_offload.engines.by_name import engine_factory
    from kvtier.cpu_offload.engines.simulated import Faults
    from kvtier.testing.faulty import FaultyLink
    from runner import AsyncLLM, needle
    from runner.server.app import create_app
    from runner.server.lifecycle import Server
    from runner.server.settings import Settings
    from runner.server.sockets import bind, raise_file_limit

    raise_file_limit(4096)
    link = FaultyLink(engine_factory(None, "cpu", True), Faults(fail=options.failing))
    llm = AsyncLLM(
        needle.weights_path(),
        device="cpu",
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        copy_engine=link,
        max_waiting_requests=4096,
    )
    app = create_app(llm, Settings(names=("needle",), drain_timeout_s=60))

    @app.get("/storm/held")
    def now_held() -> dict[str, float]:
        return held()._asdict()

    sock = bind("127.0.0.1", 0)
    print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
    server = Server(app, log_level="warning", access_log=False)
    server.run(sockets=[sock])
    violations = llm.thread.call(llm.cache.audit).result(60)
    told = {
        "audit": [str(v) for v in violations],
        "load": llm.load(),
        "transfers": llm.cache.stats().to_dict()["transfers"],
        "tickets": len(server.served.admission.tickets),
    }
    llm.close()
    print(json.dumps(told), flush=True)
    return 0


# --- who asks for /health -------------------------------------------------------------------------


def probe(options: argparse.Namespace) -> int:
    """Asks until SIGTERM, each time on a connection that is there; then prints the seconds that it took."""
    took: list[float] = []
    over = [False]
    signal.signal(signal.SIGTERM, lambda *_: over.__setitem__(0, True))
    with httpx.Client(base_url=options.url, timeout=60) as web:
        while not over[0]:
            start = time.perf_counter()
            web.get("/health").raise_for_status()
            took.append(time.perf_counter() - start)
            time.sleep(PROBE_EVERY_S)
    print(json.dumps(took), flush=True)
    return 0


# --- the clients ----------------------------------------------------------------------------------


class Clients:
    """All of them, and what they have seen."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        from runner import needle

        self._url = url
        self._options = options
        rnd = random.Random(options.seed)
        self._documents = [needle.make_prompt(rnd.choice(LENGTHS), seed=seed) for seed in range(DOCUMENTS)]
        self.seen: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.tokens = 0
        self.first_s: list[float] = []

    async def run(self, seconds: float, count: int | None = None) -> None:
        """``count`` clients for so long, each with one request after another."""
        until = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as web:
            await asyncio.gather(*(self._client(web, n, until) for n in range(count or self._options.clients)))

    async def _client(self, web: httpx.AsyncClient, number: int, until: float) -> None:
        rnd = random.Random(f"{self._options.seed}/{number}")
        while time.monotonic() < until:
            try:
                await self._one(web, rnd)
            except httpx.HTTPError as problem:
                self.errors[f"{type(problem).__name__}: {problem}"[:200]] += 1

    async def _one(self, web: httpx.AsyncClient, rnd: random.Random) -> None:
        prompt = rnd.choice(self._documents)
        asks = rnd.choice(prompt.distractors) if prompt.distractors and rnd.random() < 0.5 else None
        if asks is not None:
            prompt = prompt.asking(asks)
        long = rnd.random() < 0.4
        body = {"prompt": prompt.token_ids, "stream": True, "temperature": 0, "cache_salt": rnd.choice("ab"),
                "max_tokens": rnd.choice((40, 80, 160)) if long else 12, "ignore_eos": long,
                "stream_options": {"include_usage": True}}  # fmt: skip
        leaves_after = rnd.randrange(0, 8) if rnd.random() < self._options.leaving else None
        text, ended, start = "", False, time.perf_counter()
        async with web.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                told = (await response.aread()).decode()
                self.errors[f"{response.status_code} {told}"[:200]] += 1
                return
            chunks = 0
            async for line in response.aiter_lines():
                if leaves_after is not None and chunks >= leaves_after:
                    self.seen["left"] += 1
                    return
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    continue
                told = json.loads(line[6:])
                if "error" in told:
                    self.errors[told["error"]["message"][:200]] += 1
                    return
                if not chunks:
                    self.first_s.append(time.perf_counter() - start)
                chunks += 1
                text += "".join(choice["text"] for choice in told["choices"])
                if told.get("usage"):
                    self.tokens += told["usage"]["completion_tokens"]
                    cached = told["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
                    self.seen.update({f"tokens cached on {tier}": n for tier, n in cached.items()})
        answer = prompt.answer.removesuffix(" .")
        self.seen["answered" if ended else "cut short"] += 1
        if not ended or not (text == answer or (long and text.startswith(answer))):
            self.errors[f"a wrong answer: {text[:40]!r} for {answer!r}"] += 1


def _own(*arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"KVTIER_AUDIT": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.server.storm", *arguments], stdout=subprocess.PIPE, text=True, env=env
    )


def storm(options: argparse.Namespace) -> dict[str, Any]:
    """Runs it all; returns what is printed."""
    shared = ["--failing", str(options.failing), "--device-memory", options.device_memory]
    server = _own("--as", "server", *shared, "--host-memory", options.host_memory)
    url = f"http://127.0.0.1:{json.loads(server.stdout.readline())['port']}"  # type: ignore[union-attr]
    probing = None
    try:
        clients = Clients(url, options)
        for _ in range(600):
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        asyncio.run(clients.run(min(60.0, options.minutes * 6)))  # pools, code and buffers are as they will be
        before = _quiet(url)
        warm, clients = clients, Clients(url, options)
        probing = _own("--as", "probe", "--url", url)
        start = time.monotonic()
        asyncio.run(clients.run(options.minutes * 60))
        seconds = time.monotonic() - start
        probing.send_signal(signal.SIGTERM)
        took = sorted(json.loads(probing.communicate(timeout=90)[0]))
        after = _quiet(url)
        server.send_signal(signal.SIGTERM)
        told = json.loads(server.communicate(timeout=120)[0].splitlines()[-1])
    finally:
        for process in (server, probing):
            if process is not None and process.poll() is None:
                process.kill()
    return {
        "minutes": round(seconds / 60, 2),
        "clients": options.clients,
        "seen": dict(clients.seen),
        "tokens": clients.tokens,
        "tokens_per_s": round(clients.tokens / seconds, 1),
        "first_token_median_s": round(statistics.median(clients.first_s), 3),
        "errors": dict(warm.errors + clients.errors),
        "health": {
            "asked": len(took),
            "median_ms": round(1e3 * statistics.median(took), 2),
            "p99_ms": round(1e3 * took[int(len(took) * 0.99)], 2),
            "worst_ms": round(1e3 * took[-1], 2),
        },
        "memory_before": before,
        "memory_after": after,
        "server_status": server.returncode,
        **told,
    }


def _quiet(url: str) -> dict[str, float]:
    """What the server holds once nothing is open."""
    while any(httpx.get(f"{url}/load").json().values()):
        time.sleep(0.1)
    time.sleep(6)  # connections that were kept open are closed by then
    return {name: round(value, 2) for name, value in httpx.get(f"{url}/storm/held").json().items()}


def is_good(report: dict[str, Any]) -> bool:
    """Whether only what was planted has gone wrong."""
    grown = report["memory_after"]["resident"] - report["memory_before"]["resident"]
    quiet = not any(report["load"].values()) and not report["tickets"] and not report["audit"]
    in_time = report["health"]["p99_ms"] < 1e3 * LATE_S
    return not report["errors"] and quiet and in_time and grown < GROWTH_MIB and report["server_status"] == 0


def main(argv: list[str] | None = None) -> int:
    """Exit status of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--leaving", type=float, default=0.1, help="share of requests that their client leaves")
    parser.add_argument("--failing", type=float, default=0.01, help="share of copies that fail")
    parser.add_argument("--device-memory", default="24MiB")
    parser.add_argument("--host-memory", default="48MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--as", dest="part", choices=["server", "probe"], help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.part is not None:
        return {"server": serve, "probe": probe}[options.part](options)
    report = storm(options)
    print(json.dumps(report, indent=2))
    return 0 if is_good(report) else 1


if __name__ == "__main__":
    sys.exit(main())
