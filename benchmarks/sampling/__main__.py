"""``python -m benchmarks.sampling [--rows N] [--repeats N] [--json PATH]``: choosing a step's tokens, CPU milliseconds.

One thread on the CPU; the median of the repeats, and the least. "by sorting" is what the runner did before: a sort of
the whole vocabulary for one row after another. Two kinds of logits: "peaked" ones have a few tokens that take nearly
all, as a model's do; "flat" ones spread over most of the vocabulary, as a high temperature's do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.output import stdout
from runner import SamplingParams
from runner.draw import Sampler, SamplingState

VOCABULARIES = (262_144, 32_000)
SPREADS = {"peaked": 5.0, "flat": 1.0}
"""Standard deviations of normal logits: of 262,144 tokens top_p=0.95 keeps some 300, or some 194,000."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "default": {},
    "top_k=64, top_p=0.95": {"top_k": 64, "top_p": 0.95},
    "top_p=0.95": {"top_p": 0.95},
    "top_p=0.5": {"top_p": 0.5},
    "top_k=5000": {"top_k": 5000},
}


def sort_each(logits: Tensor, params: SamplingParams, generators: list[torch.Generator]) -> Tensor:
    """The earlier way: logits float32 [n, vocab] -> ids int64 [n]."""
    chosen = logits.argmax(dim=-1)
    for row, generator in enumerate(generators):
        scaled, ids = torch.sort(logits[row] / params.temperature, descending=True, stable=True)
        probabilities = scaled[: params.top_k or None].softmax(dim=-1)
        if params.top_p < 1:
            before = probabilities.cumsum(dim=-1) - probabilities
            probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)
        chosen[row] = ids[torch.multinomial(probabilities, 1, generator=generator)[0]]
    return chosen


def milliseconds(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """CPU time of one call."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append((time.process_time() - start) * 1e3)
    return {"median": statistics.median(taken), "least": min(taken)}


def measure(kind: str, logits: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """Both ways on the same logits float32 [n, vocab]."""
    params = [SamplingParams(seed=row, **KINDS[kind]) for row in range(len(logits))]
    states, sampler = [SamplingState.of(p) for p in params], Sampler()

    def step() -> None:
        sampler.choose(logits, states)
        for state in states:
            state.take(0)

    generators = [torch.Generator().manual_seed(row) for row in range(len(logits) if kind != "greedy" else 0)]
    return {
        "now": milliseconds(step, repeats),
        "by_sorting": milliseconds(lambda: sort_each(logits, params[0], generators), max(1, repeats // 5)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16, help="requests in the step")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[dict[str, Any]] = []
    console = Console(stderr=True)
    for vocabulary in VOCABULARIES:
        for logits_kind, spread in SPREADS.items():
            logits = torch.randn(args.rows, vocabulary, generator=torch.Generator().manual_seed(0)) * spread
            for kind in KINDS:
                with console.status(f"{vocabulary:,} tokens, {logits_kind}, {kind}"):
                    found = measure(kind, logits, args.repeats)
                figures.append({"vocabulary": vocabulary, "logits": logits_kind, "params": kind, **found})
    if args.json:
        whole = {"machine": describe(), "rows": args.rows, "repeats": args.repeats, "figures": figures}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    shown = Table("vocabulary", "logits", "parameters", "CPU ms", "least", "by sorting, CPU ms", "ratio")
    for f in figures:
        now, then = f["now"], f["by_sorting"]
        cells = [f"{now['median']:.2f}", f"{now['least']:.2f}", f"{then['median']:.1f}"]
        cells.append(f"{then['median'] / now['median']:.1f}")
        shown.add_row(f"{f['vocabulary']:,}", f["logits"], f["params"], *cells)
    stdout().print(shown)


if __name__ == "__main__":
    main()
