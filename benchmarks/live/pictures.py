"""Pictures of the page while three long conversations run: ``kvtier serve`` and a browser, both for real."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.live import browser
from benchmarks.output import stdout
from runner import needle

DESK, PHONE = (1280, 1800), (390, 1560)
TOKENS, TURNS, NEW_TOKENS = 9000, 6, 220
RUNS_S = 75.0
MOST_BYTES = 200_000


def make(folder: Path) -> int:
    """Writes page-desktop.png, page-desktop-dark.png and page-phone.png; an exit status."""
    path = browser.find()
    if path is None:
        print(f"none of {', '.join(browser.NAMES)} is installed", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    with _serve() as url, browser.running(path) as found, found.tab() as tab:
        tab.size(*DESK)
        tab.open(f"{url}/")
        talks = [threading.Thread(target=_talk, args=(url, which), daemon=True) for which in range(3)]
        for talk in talks:
            talk.start()
            time.sleep(2)
        time.sleep(RUNS_S)
        # both of them: a picture of requests that run and one that waits tells more
        tab.until("document.querySelector('#open tr.waiting') && document.querySelector('#open tr.decode')", 60)
        _shoot(tab, folder / "page-desktop.png", DESK[1])
        tab.prefer(prefers_color_scheme="dark")
        _shoot(tab, folder / "page-desktop-dark.png", DESK[1])
        tab.prefer(prefers_color_scheme="light")
        tab.size(*PHONE, is_phone=True)
        time.sleep(2)
        _shoot(tab, folder / "page-phone.png", PHONE[1])
    return 0


@contextlib.contextmanager
def _serve() -> Iterator[str]:
    """The command, with pools that hold two of the conversations, a host tier that holds no more, and a store."""
    sizes = ("--device-memory", "12MiB", "--host-memory", "12MiB", "--max-num-batched-tokens", "256")
    command = [sys.executable, "-m", "runner.cli", "serve", "--port", "0", "--disable-uvicorn-access-log", *sizes]
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
        [*command, "--kv-remote", f"file://{folder}"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVTIER_KEY_SECRET": "of the pictures"},
    ) as child:
        try:
            assert child.stderr is not None
            said = (re.search(r"at (http://\S+)/v1", line) for line in child.stderr)
            yield next(match[1] for match in said if match)
        finally:
            child.terminate()


def _talk(url: str, which: int) -> None:
    """Conversations one after the other, each growing by a question and its answer, turn by turn; until all ends."""
    with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=url, timeout=120) as web:
        for seed in itertools.count(50 + which, 3):
            text = needle.make_prompt(TOKENS, seed=seed).token_ids
            for turn in range(1, TURNS + 1):
                body = {"prompt": text, "max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
                name = {"X-Request-Id": f"conversation-{seed - 49}-turn-{turn}"}
                told = web.post("/v1/completions", json=body, headers=name).raise_for_status().json()
                text = [*text, *told["choices"][0]["token_ids"], *needle.make_prompt(60, seed=turn).token_ids]
                time.sleep(0.5)


def _shoot(tab: browser.Tab, path: Path, most: int) -> None:
    """The top of the page, down to the requests that have finished."""
    from PIL import Image

    time.sleep(1.5)
    end = tab.run("document.getElementById('finished-title').parentNode.getBoundingClientRect().top")
    with Image.open(io.BytesIO(tab.screenshot())) as picture:
        top = picture.convert("RGB").crop((0, 0, picture.width, min(most, int(end) - 4)))
        few = top.quantize(256, kmeans=3, dither=Image.Dither.NONE)  # rare colours stay what they are
        few.save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES
    stdout().print(f"{path}: {path.stat().st_size:,} bytes")
