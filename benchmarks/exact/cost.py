"""``python -m benchmarks.exact.cost [--shapes NAME ...] [--dtypes NAME ...] [--json PATH]``: what exact answers cost.

CPU seconds of one thread, exact and as it is in turns in one process; medians of the rounds. A decode's time is that of
its answer less that of its first token, by the number of the other tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.exact.__main__ import SHAPES, write
from benchmarks.machine import describe
from benchmarks.output import stdout
from runner import LLM, SamplingParams
from runner.model.hybrid import HybridModel

ROUNDS = 3
CASES = {
    "a token of one request": (1, 100, 9),
    "a token for each of 16": (16, 32, 9),
    "first token of 2,048": (1, 2048, 1),
    "first token of 512": (1, 512, 1),
    "first tokens of 10 x 200": (10, 200, 1),
}
"""Requests, tokens of a prompt, tokens of an answer."""


def served_s(llm: LLM, requests: int, prompt: int, answer: int) -> float:
    """CPU seconds of cold prompts and their answers."""
    prompts = [np.random.default_rng(i).integers(5, 30_000, prompt).tolist() for i in range(requests)]
    llm.reset_prefix_cache()
    begun = time.process_time()
    llm.generate(prompts, SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True), use_tqdm=False)
    return time.process_time() - begun


def case_s(llm: LLM, requests: int, prompt: int, answer: int) -> float:
    """CPU seconds of a first token, or of each later one."""
    whole = served_s(llm, requests, prompt, answer)
    return whole if answer == 1 else (whole - served_s(llm, requests, prompt, 1)) / (answer - 1)


def measure(path: Path, dtype: str) -> dict[str, Any]:
    """Seconds by case, exact and as it is, and those of loading."""
    loads, llms = {}, {}
    for exact in (False, True):
        begun = time.process_time()
        model = HybridModel.load(path, "cpu", dtype, exact=exact)
        loads[exact] = time.process_time() - begun
        llms[exact] = LLM(model, "cpu", "1200MiB", 0, max_running=16, exact=exact)
    found: dict[str, Any] = {"loading": {"as_it_is_s": loads[False], "exact_s": loads[True]}}
    for name, sizes in CASES.items():
        taken: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(ROUNDS):
            for exact in (turn % 2 == 0, turn % 2 == 1):
                taken[exact].append(case_s(llms[exact], *sizes))
        found[name] = {"as_it_is_s": statistics.median(taken[False]), "exact_s": statistics.median(taken[True])}
    for llm in llms.values():
        llm.close()
    return found


def main() -> None:
    """Measures, prints, and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact.cost", description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            path = write(shape, Path(folder) / shape)
            for dtype in args.dtypes:
                cases = measure(path, dtype)
                runs.append({"shape": shape, "dtype": dtype, "cases": cases})
                for name, taken in cases.items():
                    own, ours = taken["as_it_is_s"], taken["exact_s"]
                    stdout().print(f"{shape}, {dtype}, {name}: {own:.3f} s, exact {ours:.3f} s, x {ours / own:.2f}")
                if args.json:
                    args.json.write_text(json.dumps({"machine": describe(), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
