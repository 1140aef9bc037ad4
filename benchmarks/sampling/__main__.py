"""``python -m benchmarks.sampling [--rows N] [--repeats N] [--json PATH]``: choosing a step's tokens, CPU milliseconds.

One thread on the CPU; the median of the repeats, and the least. "by sorting" is what the runner did before: a sort of
the whole vocabulary for one row after another. Two kinds of logits: "peaked" ones have a few tokens that take nearly
all, as a model's do; "flat" ones spread over most of the vocabulary, as a high temperature's do.

Penalties count a prompt of 1,000 tokens and the answer. "structured" is within a string of a JSON schema, where most
of a made-up vocabulary may follow, and has the cost of its grammar in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.machine import describe
from benchmarks.output import stdout
from runner import SamplingParams
from runner.sampling.draw import Sampler, SamplingState
from runner.sampling.grammars.matching import Grammar
from runner.sampling.grammars.structured import GrammarCompiler
from runner.sampling.grammars.structured_outputs import StructuredOutputs

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
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
STRUCTURED = StructuredOutputs(json={"type": "object", "properties": {"name": {"type": "string"}}})
MORE: dict[str, dict[str, Any]] = {
    "penalties, min_p=0.05": {**PENALTIES, "min_p": 0.05},
    "greedy, logprobs=5": {"temperature": 0.0, "logprobs": 5},
    "logprobs=5": {"logprobs": 5},
    "greedy, structured": {"temperature": 0.0, "structured_outputs": STRUCTURED},
    "structured": {"structured_outputs": STRUCTURED},
}
"""What the earlier way did not have."""

PROMPT_TOKENS = 1000


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


def made_up_grammar(vocabulary: int) -> Grammar:
    """``STRUCTURED`` for a byte-level tokenizer of random words."""
    random = np.random.default_rng(0)
    letters = list('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"{}:,[]-_Ġ')
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(tokens) < vocabulary - 1:
        tokens["".join(random.choice(letters, random.integers(2, 9)))] = None
    whole = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    whole.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<eos>")
    return GrammarCompiler(tokenizer, vocabulary, [vocabulary - 1]).compile(STRUCTURED)


def measure_more(kind: str, logits: Tensor, grammar: Grammar, repeats: int) -> dict[str, dict[str, float]]:
    """The present way on logits float32 [n, vocab]."""
    random = np.random.default_rng(0)
    states, sampler = [], Sampler(len(logits))
    for row in range(len(logits)):
        params = SamplingParams(seed=row, **MORE[kind])
        matcher = None if params.structured_outputs is None else grammar.matcher()
        if matcher is not None:
            matcher.inner.accept_string('{"name": "ab')
        prompt = random.integers(0, logits.shape[1], PROMPT_TOKENS)
        states.append(SamplingState.of(params, prompt, [logits.shape[1] - 1], matcher))
        sampler.rows.enter(row, states[-1])
    rows, drawn = np.arange(len(logits)), np.zeros(len(logits), np.uint64)

    def step() -> None:
        chosen = sampler.choose(logits, rows, drawn)
        drawn[:] += 1
        for state, token in zip(states, chosen.ids.tolist(), strict=True):
            if state.matcher is None:
                state.take(token)

    return {"now": milliseconds(step, repeats)}


def measure(kind: str, logits: Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """Both ways on the same logits float32 [n, vocab]."""
    params = [SamplingParams(seed=row, **KINDS[kind]) for row in range(len(logits))]
    sampler = Sampler(len(logits))
    for row, one in enumerate(params):
        sampler.rows.enter(row, SamplingState.of(one))
    rows, drawn = np.arange(len(logits)), np.zeros(len(logits), np.uint64)

    def step() -> None:
        sampler.choose(logits, rows, drawn)
        drawn[:] += 1

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
        grammar = made_up_grammar(vocabulary)
        for logits_kind, spread in SPREADS.items():
            logits = torch.randn(args.rows, vocabulary, generator=torch.Generator().manual_seed(0)) * spread
            for kind in (*KINDS, *MORE):
                with console.status(f"{vocabulary:,} tokens, {logits_kind}, {kind}"):
                    if kind in KINDS:
                        found = measure(kind, logits, args.repeats)
                    else:
                        found = measure_more(kind, logits, grammar, args.repeats)
                figures.append({"vocabulary": vocabulary, "logits": logits_kind, "params": kind, **found})
    if args.json:
        whole = {"machine": describe(), "rows": args.rows, "repeats": args.repeats, "figures": figures}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    shown = Table("vocabulary", "logits", "parameters", "CPU ms", "least", "by sorting, CPU ms", "ratio")
    for f in figures:
        now, then = f["now"], f.get("by_sorting")
        cells = [f"{now['median']:.2f}", f"{now['least']:.2f}"]
        cells += [f"{then['median']:.1f}", f"{then['median'] / now['median']:.1f}"] if then else ["", ""]
        shown.add_row(f"{f['vocabulary']:,}", f["logits"], f["params"], *cells)
    stdout().print(shown)


if __name__ == "__main__":
    main()
