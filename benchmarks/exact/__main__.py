"""``python -m benchmarks.exact [--shapes NAME ...] [--dtypes NAME ...] [--episodes N] [--json PATH]``.

Episodes: a system prompt that all share, a task, then turns of a tool's result and a greedy answer. Each turn is served
cold and alone in one chunk first; then with hits, beside other episodes, from the host, from the remote tier after a
restart, and cold in other chunks. Counted are episodes of another text, and logits of other bits. Models have random
weights in the shapes of real ones; nothing is downloaded. One thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.machine import describe
from benchmarks.models import gemma_3_270m, smollm2_135m
from benchmarks.output import stdout
from runner import LLM, SamplingParams
from runner.model.hybrid import HybridModel

SHAPES = {"SmolLM2-135M": smollm2_135m, "Gemma-3-270M": gemma_3_270m}
SYSTEM_TOKENS, TASK_TOKENS, RESULT_TOKENS = 64, (20, 60), (30, 90)
TURNS, NEW_TOKENS = 2, 4
TOGETHER = 8
CHUNK = 48
PLENTY = 12_000
"""Tokens that a tier has room for where nothing shall be lost."""

Text = tuple[int, ...]
Ask = Callable[[list[Text]], list[Text]]
"""From prompts to the texts with their answers."""


def write(shape: str, folder: Path) -> Path:
    """A model of that shape with seeded random weights."""
    config = SHAPES[shape]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(0.0 if "gemma" in config.model_type else 1.0)
            else:
                weight.normal_(0, 0.5 if "embed" in name else weight.shape[-1] ** -0.5, generator=generator)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


class Watched:
    """A model that keeps the logits of each sample of each request."""

    def __init__(self, model: HybridModel) -> None:
        self._model = model
        self.logits: dict[str, dict[int, Tensor]] = {}
        """By request and number of tokens that the sample saw."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, step: Any, cache: Any) -> Tensor:
        """As the model's."""
        logits = self._model.forward(step, cache)
        for row, entry in zip(logits, step.sample_rows, strict=True):
            self.logits.setdefault(step.request_ids[entry], {})[int(step.seq_lens[entry])] = row
        return logits


class Bits:
    """Logits of the cold run, by text, and what differs from them."""

    def __init__(self) -> None:
        self.known: dict[Text, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Counts anew."""
        self.compared = self.other = 0
        self.largest = 0.0
        self.hits = Counter[str]()
        """Prompt tokens found, by tier."""

    def see(self, text: Text, logits: Tensor) -> None:
        """A later sample. After another text than in the cold run there is nothing to compare with."""
        first = self.known.get(text)
        if first is None:
            return
        self.compared += 1
        if not torch.equal(first, logits):
            self.other += 1
            self.largest = max(self.largest, float((first - logits).abs().max()))


def asking(llm: LLM, bits: Bits, learn: bool = False) -> Ask:
    """Serves prompts, all at once, and compares their logits or keeps them."""
    engine: Any = llm.engine
    watched = engine.model = Watched(llm.model)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)

    def ask(prompts: list[Text]) -> list[Text]:
        watched.logits.clear()
        texts = []
        for output in llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False):
            texts.append((*output.prompt_token_ids, *output.token_ids))
            bits.hits.update(output.cached_tokens)
            for n, logits in watched.logits[output.request_id].items():
                if learn:
                    bits.known[texts[-1][:n]] = logits.clone()
                else:
                    bits.see(texts[-1][:n], logits)
        return texts

    return ask


class Episodes:
    """What users and tools say; answers are the model's."""

    def __init__(self, count: int, vocabulary: int) -> None:
        rng = np.random.default_rng(0)

        def words(least: int, most: int) -> Text:
            return tuple(rng.integers(10, vocabulary, rng.integers(least, most)).tolist())

        system = words(SYSTEM_TOKENS, SYSTEM_TOKENS + 1)
        self._said = [
            [(*system, *words(*TASK_TOKENS)), *(words(*RESULT_TOKENS) for _ in range(TURNS - 1))] for _ in range(count)
        ]

    def play(self, turns: Iterator[Ask], together: int = 1) -> list[Text]:
        """The episodes' texts. All play a turn before one plays the next; ``turns``: who is asked in each."""
        texts: list[Text] = [()] * len(self._said)
        for turn, ask in zip(range(TURNS), turns, strict=False):
            for i in range(0, len(texts), together):
                prompts = [(*text, *said[turn]) for text, said in zip(texts, self._said, strict=True)][i : i + together]
                texts[i : i + together] = ask(prompts)
        return texts


def engine(model: HybridModel, device_tokens: int = PLENTY, host: bool = False, **options: Any) -> LLM:
    """Served with so much room on the device, and with plenty or nothing on the host."""
    spec = model.spec()
    device = {g.name: max(device_tokens // g.block_tokens, g.peak_blocks(device_tokens)) for g in spec.groups}
    plenty: Any = {g.name: PLENTY // g.block_tokens for g in spec.groups} if host else 0
    return LLM(model, "cpu", device, plenty, **({"max_batched_tokens": 4096, "max_running": TOGETHER} | options))


def measure(model: HybridModel, episodes: Episodes, progress: Callable[[str], object]) -> dict[str, Any]:
    """Each situation's figures; the first is the cold run."""
    bits, found = Bits(), dict[str, Any]()

    def note(what: str, texts: list[Text], begun: float) -> None:
        found[what] = {
            "episodes": len(texts),
            "episodes_of_another_text": sum(a != b for a, b in zip(texts, expected, strict=True)),
            "logits": bits.compared,
            "logits_of_other_bits": bits.other,
            "largest_difference": bits.largest,
            "hit_tokens": dict(bits.hits),
            "cpu_s": time.process_time() - begun,
        }
        bits.begin()
        progress(what)

    def cold(chunk: int, learn: bool) -> list[Text]:
        with engine(model, max_batched_tokens=chunk) as llm:
            inner = asking(llm, bits, learn)

            def ask(prompts: list[Text]) -> list[Text]:
                llm.reset_prefix_cache()
                return inner(prompts)

            return episodes.play(iter([ask] * TURNS))

    begun = time.process_time()
    expected = cold(4096, learn=True)
    bits.compared = len(bits.known)
    note("cold", expected, begun)
    ways: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("hits on the device", {}, 1),
        (f"beside others, {TOGETHER} at once", {}, TOGETHER),
        ("from the host", {"device_tokens": 400, "host": True}, 1),
    )
    for what, options, together in ways:
        begun = time.process_time()
        with engine(model, **options) as llm:
            note(what, episodes.play(iter([asking(llm, bits)] * TURNS), together), begun)
    begun = time.process_time()
    note(f"cold, in chunks of {CHUNK}", cold(CHUNK, learn=False), begun)
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as store:

        def turns() -> Iterator[Ask]:
            for _ in range(TURNS):
                remote: Any = {"remote_uri": f"file://{store}", "key_secret": b"episodes", "model_id": "episodes"}
                with engine(model, host=True, **remote) as llm:
                    yield asking(llm, bits)

        note("from the remote tier, after a restart", episodes.play(turns()), begun)
    return found


def main() -> None:
    """Measures, prints a table, and writes JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact", description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    said, runs = Console(stderr=True), []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            path = write(shape, Path(folder) / shape)
            for dtype in args.dtypes:
                for exact in (True, False):
                    model = HybridModel.load(path, "cpu", dtype, exact=exact)
                    name = f"{shape}, {dtype}, {'exact' if exact else 'as it is'}"
                    episodes = Episodes(args.episodes, min(model.vocab_size, 32_000))
                    found = measure(model, episodes, partial(said.print, f"{name}:"))
                    runs.append({"shape": shape, "dtype": dtype, "exact": exact, "situations": found})
                    if args.json:
                        args.json.write_text(json.dumps({"machine": describe(), "runs": runs}, indent=2) + "\n")
    show(runs)


def show(runs: list[dict[str, Any]]) -> None:
    """A row for each situation."""
    columns = ("model", "dtype", "exact", "situation", "episodes differ", "bits differ", "of", "largest", "hit tokens")
    table = Table(*columns, title="Against each turn cold and alone")
    for run in runs:
        for what, found in run["situations"].items():
            differ = f"{found['episodes_of_another_text']} of {found['episodes']}"
            bits = found["logits_of_other_bits"], found["logits"], f"{found['largest_difference']:.2g}"
            hits = sum(found["hit_tokens"].values())
            row = run["shape"], run["dtype"], "yes" if run["exact"] else "", what, differ, *map(str, (*bits, hits))
            table.add_row(*row)
    stdout().print(table)


if __name__ == "__main__":
    main()
