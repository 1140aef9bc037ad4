"""Serving, measured beside transformers' own ``generate`` and continuous batching, vLLM and llama.cpp.

    python -m benchmarks.serving [--model PATH] [--json OUT] [--llama] [--vllm PYTHON]

One thread of torch, float32, greedy. Seconds are CPU seconds of the process that serves: another program on the machine
makes wall times longer, and these hardly. Each row is served by all in turn; medians of ``--repeats``,
but ``first`` and ``same`` are served once.

``cold``       so many prompts at once that nobody has seen.
``decode``     the same, less what one token of each takes: the tokens after the first.
``turns``      conversations that grow by a question and its answer, turn by turn.
``first``      the first token of one long prompt.
``same``       answers that are those of the first who serves, token for token: near ties may go the other way.
``overhead``   of a token: the engine stepped by hand; ``AsyncLLM`` on its thread; HTTP, its client in another process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks import machine
from benchmarks.serving import overhead
from benchmarks.serving.llama import Llama, unpacked
from benchmarks.serving.subjects import (
    Continuous,
    Generate,
    Kvtier,
    Prompts,
    Subject,
    cpu_seconds,
    note,
    transformers_model,
    vllm,
)
from runner.model.device import ask_for_large_pages
from runner.model.place import find_gguf
from runner.needle import weights_path

Fresh = Callable[[int, int], Prompts]
"""(how many prompts, of how many tokens) that nobody has seen."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.serving", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=None, help="a folder or a .gguf file; default: the bundled model")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--first", type=int, nargs="+", default=[4096, 32768], help="tokens of the long prompts")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama", action="store_true", help="also llama.cpp, on the same GGUF's weights; needs "
                        "xllamacpp from the package index")  # fmt: skip
    parser.add_argument("--vllm", metavar="PYTHON", help="also the vLLM of that Python")
    parser.add_argument("--without", nargs="+", default=[], choices=("generate", "generate_batch"),
                        help="leave out these two of transformers")  # fmt: skip
    parser.add_argument("--no-overhead", action="store_true", help="leave out what a token costs beside the model")
    parser.add_argument("--json", type=Path, help="write the figures there, with machine and commit")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = weights_path() if args.model is None else args.model
    file = find_gguf(path) if args.llama else None
    if args.llama and file is None:
        parser.error("--llama needs a GGUF file as --model")
    rows = []
    environment = dict(os.environ)
    ask_for_large_pages("cpu")  # as ``LLM`` does if there was no tensor before it
    model = transformers_model(path)
    with nullcontext() if file is None else unpacked(file) as float32, vllm(args.vllm, model, environment) as theirs:
        subjects = _subjects(path, model, args.without) + theirs
        subjects += [] if float32 is None else [Llama(float32)]
        vocabulary = subjects[0].llm.model.vocab_size  # type: ignore[attr-defined]
        for row in _rows(subjects, args, vocabulary):
            note(f"{row['what']}: {row['median']}")
            rows.append(row)
    if not args.no_overhead:
        rows += overhead.rows(path, args.repeats)
    _show(path.name, [s.name for s in subjects], rows)
    if args.json:
        found = {"machine": machine.describe(), "model": path.name, "rows": rows}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _subjects(path: Path, model: Any, without: Sequence[str]) -> list[Subject]:
    """All who can serve the model; who cannot is left out, with the reason on stderr."""
    subjects: list[Subject] = [Kvtier(path, 256, "1GiB", "1GiB")]
    if "generate" not in without:
        subjects.append(Generate(model))
    if "generate_batch" not in without:
        continuous = Continuous(model)
        try:
            continuous.serve([[5, 6, 7]], 2)
            subjects.append(continuous)
        except Exception as problem:
            note(f"{continuous.name} cannot serve it: {type(problem).__name__}: {problem}")
    return subjects


def _rows(subjects: Sequence[Subject], args: argparse.Namespace, vocabulary: int) -> Any:
    new, rng = args.new_tokens, np.random.default_rng(0)

    def fresh(count: int, length: int) -> Prompts:
        return [rng.integers(10, vocabulary, length).tolist() for _ in range(count)]

    for subject in subjects:
        subject.serve(fresh(2, 40), 4)
    for running in args.running:
        note(f"{running} at once")
        found = _in_turn(subjects, args.repeats, partial(_cold_of, fresh, running, new))
        yield _row(f"cold, {running} x (60 + {new}), CPU s", {k: [a for a, _ in v] for k, v in found.items()})
        yield _row(
            f"decode, {running} running, tokens per CPU s",
            {k: [running * (new - 1) / (a - b) for a, b in v] for k, v in found.items()},
        )
    prompts = fresh(16, 60)
    answers = {subject.name: subject.serve(prompts, new) for subject in subjects}
    same = {name: float(sum(map(eq, mine, answers[subjects[0].name]))) for name, mine in answers.items()}
    yield _row(f"same, of 16 x (60 + {new})", {name: [count] for name, count in same.items()})
    note("turns")
    turns = _in_turn(subjects, args.repeats, lambda s: _turns(s, fresh(4, 600), fresh(4, 60), 4, 32))
    yield _row("turns, 4 conversations x 4 turns of 600 + 60 x n, CPU s", turns)
    for length in args.first:
        note(f"first token of {length}")
        first = _in_turn(subjects, 1, partial(_first_of, fresh, length))
        yield _row(f"first token of {length:,}, CPU s", first)


def _cold_of(fresh: Fresh, running: int, new: int, subject: Subject) -> tuple[float, float]:
    return _cold(subject, fresh(running, 60), new)


def _first_of(fresh: Fresh, length: int, subject: Subject) -> float:
    return cpu_seconds(lambda: subject.serve(fresh(1, length), 1), subject.clock)


def _cold(subject: Subject, prompts: Prompts, new: int) -> tuple[float, float]:
    """CPU seconds of all tokens, and of the first ones alone, of prompts of equal length."""
    whole = cpu_seconds(lambda: subject.serve(prompts, new), subject.clock)
    others = [prompt[::-1] for prompt in prompts]
    return whole, cpu_seconds(lambda: subject.serve(others, 1), subject.clock)


def _turns(subject: Subject, beginnings: Prompts, questions: Prompts, turns: int, new: int) -> float:
    def talk() -> None:
        texts = [list(text) for text in beginnings]
        for _ in range(turns):
            for text, question in zip(texts, questions, strict=True):
                text += question
            for text, answer in zip(texts, subject.serve(texts, new), strict=True):
                text += answer

    return cpu_seconds(talk, subject.clock)


def _in_turn(subjects: Sequence[Subject], repeats: int, work: Callable[[Subject], Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {subject.name: [] for subject in subjects}
    for _ in range(repeats):
        for subject in subjects:
            found[subject.name].append(work(subject))
    return found


def _row(what: str, found: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "what": what,
        "median": {name: statistics.median(values) for name, values in found.items()},
        "all": found,
    }


def _show(model: str, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    for wanted in (names, overhead.NAMES):
        table = Table("", *wanted, title=model)
        for row in rows:
            if set(row["median"]) <= set(wanted):
                values = (row["median"].get(name) for name in wanted)
                table.add_row(row["what"], *("" if v is None else f"{v:,.4g}" for v in values))
        Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
