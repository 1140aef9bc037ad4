"""What those that watch cost the server: time of its steps, and memory."""

from __future__ import annotations

import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.live import browser
from benchmarks.live.served import Process, started, watched
from runner.server.page.finished import KEPT as FINISHED
from runner.server.page.history import KEPT

RUNNING, PROMPT_TOKENS, NEW_TOKENS = 16, 60, 1000
FAST_S = 0.02
"""Between two snapshots of the hour that is not waited for."""
TIMES = 20
"""As many snapshots a second as a server takes: what they cost shows above the noise of a machine."""


def decode(listeners: int, repeats: int) -> list[dict[str, Any]]:
    """Rounds of 16 requests, without and with listeners in turn, after one that is not counted; ``TIMES`` as many
    snapshots as usual."""
    rng, found = np.random.default_rng(0), []
    with started(str(1 / TIMES)) as server:
        _round(server, rng)
        for at in range(repeats):
            for watching in (0, listeners) if at % 2 == 0 else (listeners, 0):
                with watched(server.url, watching):
                    found.append({"listeners": watching, **_round(server, rng)})
                _note(f"round {at + 1}, {found[-1]}")
    return found


def _round(server: Process, rng: np.random.Generator) -> dict[str, float]:
    prompts = rng.integers(10, 400, (RUNNING, PROMPT_TOKENS)).tolist()
    body = {"prompt": prompts, "max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
    cpu_s, start = server.cpu_s, time.perf_counter()
    told = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).raise_for_status().json()
    seconds, cpu_s = time.perf_counter() - start, server.cpu_s - cpu_s
    tokens = told["usage"]["completion_tokens"]
    return {"tokens_per_s": tokens / seconds, "cpu_us_per_token": cpu_s / tokens * 1e6, "seconds": seconds}


def idle(listeners: int, seconds: float = 20.0) -> dict[str, float]:
    """CPU milliseconds a second of a server that has no requests, without and with listeners; ``TIMES`` as many
    snapshots as usual."""
    found = {}
    with started(str(1 / TIMES)) as server:
        for watching in (0, listeners):
            with watched(server.url, watching):
                time.sleep(2)
                cpu_s, start = server.cpu_s, time.perf_counter()
                time.sleep(seconds)
                found[str(watching)] = 1000 * (server.cpu_s - cpu_s) / (time.perf_counter() - start)
    return found


def sample(repeats: int = 200) -> dict[str, float]:
    """Microseconds of a snapshot, its JSON included, and its bytes, in this process and with 16 running requests."""
    import asyncio

    from runner import AsyncLLM, SamplingParams, needle
    from runner.server.app import create_app
    from runner.server.settings import Settings

    async def go(llm: AsyncLLM) -> dict[str, float]:
        sampler = create_app(llm, Settings(names=("needle",))).state.sampler
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)

        async def ask(first: int) -> None:
            async for _ in llm.generate({"prompt_token_ids": [first + 10] * PROMPT_TOKENS}, params):
                pass

        asked = [asyncio.create_task(ask(i)) for i in range(RUNNING)]
        while llm.load()["running"] < RUNNING:
            await asyncio.sleep(0.01)
        listener, took = sampler.listen(), []
        for _ in range(repeats):
            start = time.thread_time()
            sampler.sample()
            took.append(time.thread_time() - start)
            await asyncio.sleep(0)
        size, past = len(sampler._newest[listener.owner]), len(sampler._history())
        listener.close()
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        return {"snapshot_cpu_us": float(np.median(took)) * 1e6, "snapshot_bytes": size, "history_bytes_of_200": past}

    with AsyncLLM(needle.weights_path(), device="cpu", device_memory="48MiB", host_memory="48MiB") as llm:
        return asyncio.run(go(llm))


def hour(listeners: int, snapshots: int) -> dict[str, Any]:
    """Memory before and after so many snapshots, while requests come and go.

    Before: the pools have been written, the history and the list of finished requests are full, and all listen.
    """
    memory: dict[str, list[float]] = {}
    path, ends = browser.find(), threading.Event()
    with started(str(FAST_S)) as server:
        _fill_pools(server.url)
        with watched(server.url, listeners - 2), _never_reads(server.url), _page(path, server.url) as page:
            busy = threading.Thread(target=_keep_busy, args=(server.url, ends))
            busy.start()
            _pass(server.url, KEPT + 100)
            before = {"server, MiB resident": server.rss_mib, **page()}
            start = time.perf_counter()
            _pass(server.url, snapshots)
            took = time.perf_counter() - start
            for name, value in {"server, MiB resident": server.rss_mib, **page()}.items():
                memory[name] = [before[name], value]
            ends.set()
            busy.join()
    return {"snapshots": snapshots, "listeners": listeners, "seconds": took, "memory": memory}


def _fill_pools(url: str) -> None:
    """Until blocks of both tiers have been given up for others, so that all of their memory has been touched."""
    rng = np.random.default_rng(1)
    for _ in range(FINISHED):
        body = {"prompt": rng.integers(10, 400, 6000).tolist(), "max_tokens": 2}
        httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()


def _pass(url: str, snapshots: int) -> None:
    """Waits until so many snapshots have come."""
    with httpx.stream("GET", f"{url}/watch", timeout=60) as told:
        for line in told.iter_lines():
            snapshots -= line == "event: snapshot"
            if snapshots <= 0:
                return


def _keep_busy(url: str, ends: threading.Event) -> None:
    for at in itertools.count():
        if ends.is_set():
            return
        body = {"prompt": [10 + at % 400] * 400, "max_tokens": 50, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


@contextmanager
def _never_reads(url: str) -> Iterator[None]:
    """A listener that opens the stream and leaves it at that."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as sock:
        sock.sendall(b"GET /watch HTTP/1.1\r\nHost: here\r\n\r\n")
        yield


@contextmanager
def _page(path: str | None, url: str) -> Iterator[Any]:
    """The page in a browser; what it gives says what the page takes."""
    if path is None:
        yield dict
        return
    with browser.running(path) as found, found.tab() as tab:
        tab.open(f"{url}/")

        def look() -> dict[str, float]:
            tab.call("HeapProfiler.collectGarbage")
            heap, nodes = tab.call("Runtime.getHeapUsage")["usedSize"], tab.call("Memory.getDOMCounters")["nodes"]
            return {"page, MiB of JavaScript": heap / 2**20, "page, nodes": nodes}

        yield look


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


