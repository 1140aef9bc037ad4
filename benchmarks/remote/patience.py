"""``python -m benchmarks.remote.patience [--json PATH]``: what slow remotes give, by patience of requests.

The own engine (``LLM`` with the bundled model, on the CPU) over a directory whose answers to questions are held back.
One engine computes prompts and stores them. Others ask for the same, one after the other, each with a delay and a
``patience``. Told are hits, as a share of those of a remote that answers at once, how much longer the first token took
than with no remote at all, and how many objects were written a second time. ``--load`` busy processes run beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.output import stdout
from kvtier.remote.backends.directory import DirectoryBackend
from kvtier.remote.backends.uri import PATIENCE
from runner import LLM, SamplingParams, needle

DELAYS_S = (0.0, 0.005, 0.04, 0.2)
PATIENCES = (0.05, 0.25, 0.5, 1.0)

Figures = dict[str, Any]


def spin() -> None:
    """A busy process."""
    while True:
        sum(range(10**6))


@contextmanager
def answers_after(delay_s: float) -> Iterator[None]:
    """Questions to directories take so much longer."""
    exists = DirectoryBackend._exists

    def held_back(self: DirectoryBackend, names: Sequence[str]) -> list[bool]:
        time.sleep(delay_s)
        return exists(self, names)

    DirectoryBackend._exists = held_back  # type: ignore[method-assign]
    try:
        yield
    finally:
        DirectoryBackend._exists = exists  # type: ignore[method-assign]


def serve(prompts: Sequence[str], folder: Path | None, delay_s: float = 0.0, patience: float = PATIENCE) -> Figures:
    """One engine, over a remote in ``folder``. The first prompt tells it how fast it is; the others count."""
    store: Figures = {}
    if folder is not None:
        store = {"remote_uri": f"file://{folder}?patience={patience}", "key_secret": b"s"}
    hits, times, again = 0, list[float](), dict[str, int]()
    with (
        answers_after(delay_s),
        LLM(needle.weights_path(), "cpu", device_memory="64MiB", host_memory="128MiB", **store) as llm,
    ):
        for k, prompt in enumerate(prompts):
            began = time.perf_counter()
            output = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)[0]
            if k:
                times.append(time.perf_counter() - began)
                hits += sum(output.cached_tokens.values())
        while (stats := llm.cache.stats().remote) is not None and stats.live:
            time.sleep(0.01)
        if stats is not None:
            again = {"looks": stats.looks, "late": stats.late_looks, "written": stats.spilled_objects}
    return {"hit_tokens": hits, "median_s": statistics.median(times), **again}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(arguments.load)]
    for process in busy:
        process.start()
    texts = [needle.make_prompt(arguments.tokens, seed=50 + k).text for k in range(arguments.prompts)]
    console, rows = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as scratch, console.status("...") as status:
        folder = Path(scratch) / "store"
        cold = serve(texts, None)
        written = serve(texts, folder)
        first = serve(texts, folder)
        for patience in PATIENCES:
            for delay_s in DELAYS_S:
                status.update(f"patience {patience}, answers after {delay_s} s")
                figures = serve(texts, folder, delay_s, patience)
                share = figures["hit_tokens"] / first["hit_tokens"]
                rows.append({"patience": patience, "delay_s": delay_s, "hit_share": share, **figures})
    for process in busy:
        process.terminate()
    table = Table("patience", "answers after", "hits", "TTFT", "without a remote", "late", "written again")
    for row in rows:
        again = f"{row['written']} of {written['written']}"
        cells = [f"{row['patience']}", f"{1e3 * row['delay_s']:g} ms", f"{row['hit_share']:.0%}"]
        cells += [f"{row['median_s']:.2f} s", f"{cold['median_s']:.2f} s", f"{row['late']}", again]
        table.add_row(*cells)
    stdout().print(table)
    if arguments.json is not None:
        found = {"machine": describe(), "load": arguments.load, "tokens": arguments.tokens}
        found |= {"cold": cold, "first": written, "at_once": first, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
