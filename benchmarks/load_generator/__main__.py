"""What a streamed token costs the load generator, and how late it is, against a server that computes nothing.

    python -m benchmarks.load_generator [--json OUT]

``clients``    the same streams read by httpx and by aiohttp, lines split and JSON read: CPU seconds of this process.
``generator``  ``kvtier bench serve``'s own driver, at growing numbers of streams: CPU of a token, and lateness.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np

from benchmarks import machine, output
from runner.bench.client import Client, Target
from runner.bench.drive import Driver
from runner.bench.figures import schedule
from runner.bench.forms import IdsDialogue
from runner.bench.names import History, Shape, WorkloadName
from runner.bench.tokens import Alphabet
from runner.bench.workloads import make
from runner.display.tables import plain_table, print_table

TOKENS, GAP_S = 200, 0.02
BODY = {"model": "m", "prompt": list(range(100)), "max_tokens": TOKENS, "stream": True}


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The server in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load_generator.server", str(GAP_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def with_aiohttp(url: str, streams: int) -> int:
    """Tokens read."""

    async def one(session: aiohttp.ClientSession) -> int:
        count = 0
        async with session.post(f"{url}/v1/completions", json=BODY) as response:
            async for received in response.content.iter_any():
                count += _read(received.split(b"\n"))
        return count

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return sum(await asyncio.gather(*(one(session) for _ in range(streams))))


async def with_httpx(url: str, streams: int) -> int:
    """Tokens read."""

    async def one(client: httpx.AsyncClient) -> int:
        count = 0
        async with client.stream("POST", f"{url}/v1/completions", json=BODY) as response:
            async for received in response.aiter_raw():
                count += _read(received.split(b"\n"))
        return count

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(streams))))


def _read(lines: list[bytes]) -> int:
    return sum(bool(json.loads(line[6:])["choices"]) for line in lines if line.startswith(b"data: {"))


def cpu_us(work: Callable[[], Coroutine[Any, Any, int]]) -> float:
    """CPU microseconds of a token."""
    start_s = time.process_time()
    tokens = asyncio.run(work())
    return (time.process_time() - start_s) / tokens * 1e6


async def generator(url: str, streams: int) -> dict[str, Any]:
    """``streams`` requests that start within the first second."""
    shape = Shape(num_prompts=streams, random_input_len=1000, random_output_len=TOKENS)
    plan = make(WorkloadName.RANDOM, shape, float(streams), 1.0, 0)
    alphabet = Alphabet(range(100, 30_000), "the benchmark")
    async with Client(Target(url), time.perf_counter) as client:
        driver = Driver(plan, client, lambda n, s: IdsDialogue(n, s, BODY, alphabet, 0, History.ANSWERS))
        run = await driver.run()
    told = schedule(plan, run, [50, 99])
    tokens = sum(len(record.times) for record in run.records)
    gaps = np.concatenate([np.diff(record.times) for record in run.records])
    return {
        "streams": streams,
        "tokens_per_s": round(tokens / run.duration_s),
        "cpu_us_per_token": round(run.cpu_s / tokens * 1e6, 1),
        "cpu_share": told["cpu_share"],
        "lateness_p50_ms": told["lateness_ms"]["p50"],
        "lateness_p99_ms": told["lateness_ms"]["p99"],
        "loop_lag_p99_ms": told["loop_lag_ms"]["p99"],
        "gap_p99_ms": round(float(np.percentile(gaps, 99)) * 1e3, 2),
        "whole": sum(record.is_ok for record in run.records),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.load_generator", description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256], help="at once")
    parser.add_argument("--json", type=Path, help="write the figures there, with machine and commit")
    args = parser.parse_args()
    with served() as url:
        clients = [
            {"client": name, "streams": n, "cpu_us_per_token": round(cpu_us(lambda: read(url, n)), 1)}  # noqa: B023
            for n in args.streams
            for name, read in (("httpx", with_httpx), ("aiohttp", with_aiohttp))
        ]
        rows = [asyncio.run(generator(url, n)) for n in args.streams]
    for title, found in (("Clients alone", clients), ("The generator", rows)):
        names = list(found[0])
        table = plain_table(title, (names[0],), tuple(names[1:]))
        for row in found:
            table.add_row(*(str(value) for value in row.values()))
        print_table(output.stdout(), table)
    if args.json:
        versions = {"aiohttp": aiohttp.__version__, "httpx": httpx.__version__}
        data = {"machine": machine.describe(), "clients_versions": versions, "tokens": TOKENS, "gap_s": GAP_S}
        args.json.write_text(json.dumps(data | {"clients": clients, "generator": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
