"""``python -m benchmarks.vllm.gpu``: kvtier's connector inside vLLM on a CUDA machine. **Not yet run.**

No GPU has run this script: it says what a GPU must show, and how it is to be measured. It needs vLLM for CUDA, 0.30 to
0.33. The model has the shape of Gemma-3-12B, or of another name in ``benchmarks.models``, with random weights: no hub,
no tokenizer. Each engine has a process of its own.

* ``reload``  S0, S1, S0 with prompts of 90,112 tokens and a device pool of one and a half of them: time to the first
              token of the second S0 without a connector, with kvtier's, and with vLLM's own
              ``SimpleCPUOffloadConnector``; the load's bytes and seconds by kvtier's statistics; whether texts are
              equal.
* ``steps``   the time of a step of 64 requests that generate, while a prompt of 90,112 tokens comes in between and its
              blocks are stored: without a connector, with kvtier's that only reads ("store": "off"), and with its
              stores. A store that the compute stream waits for, or bandwidth that it takes, shows in the last one.

Marks: the second S0 at least 20 times faster than computed; a step beside stores at most 5 % slower at the median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import describe
from benchmarks.models import MODELS
from benchmarks.output import stdout
from benchmarks.vllm.engine import ENVIRONMENT, ask, books_of, in_new_process
from benchmarks.vllm.simulated import CONNECTORS, KVTIER, SIMPLE

BLOCK_TOKENS = 16
CHUNK_TOKENS = 8192
PROMPT_TOKENS = 90_112
NUM_DECODING = 64
HOST_BYTES = 64 << 30
RESULT = Path(__file__).parents[2] / "benchmarks/results/vllm_connector_gpu.json"


def start(model: str, num_blocks: int, connector: dict[str, Any] | None) -> Any:
    """vLLM's ``LLM`` of a model with random weights."""
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"})
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        config = MODELS[model]()
        config.save_pretrained(folder)
        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=PROMPT_TOKENS + CHUNK_TOKENS,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=NUM_DECODING + 1,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=True,
            seed=0,
            disable_log_stats=False,
            **({"kv_transfer_config": {"kv_role": "kv_both", **connector}} if connector else {}),
        )


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Random tokens, none of them special in any of the models."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 30_000) for _ in range(num_tokens)]


def reload(model: str, name: str | None) -> dict[str, Any]:
    """S0, S1, S0, after a short prompt that warms the engine up."""
    windows = sum(kind != "full_attention" for kind in MODELS[model]().layer_types)
    groups = 1 + -(-windows // max(1, len(MODELS[model]().layer_types) - windows))
    blocks = PROMPT_TOKENS // BLOCK_TOKENS + groups * (CHUNK_TOKENS + 1024) // BLOCK_TOKENS
    llm = start(model, blocks * 3 // 2, CONNECTORS[name](HOST_BYTES) if name else None)
    ask(llm, prompt(9, CHUNK_TOKENS))
    answers = [ask(llm, prompt(seed, PROMPT_TOKENS)) for seed in (0, 1, 0)]
    found: dict[str, Any] = {"connector": name or "none", "answers": answers}
    if name == KVTIER:
        stats = books_of(llm).stats()
        found["loaded_bytes"], found["load_s"] = stats.transfers.loaded_bytes, stats.load_latency.sum_s
    return found


def steps(model: str, store: str | None) -> dict[str, Any]:
    """Times of steps in which all requests generate, from the long prompt's last chunk on: its stores are under way."""
    from vllm import SamplingParams

    connector = CONNECTORS[KVTIER](HOST_BYTES) if store else None
    if connector is not None:
        connector["kv_connector_extra_config"]["store"] = store
    llm = start(model, 100_000, connector)
    engine = llm.llm_engine
    parameters = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
    for i in range(NUM_DECODING):
        engine.add_request(f"d{i}", {"prompt_token_ids": prompt(i, 1024)}, parameters)
    for _ in range(50):
        engine.step()
    engine.add_request("long", {"prompt_token_ids": prompt(1000, PROMPT_TOKENS)}, parameters)
    generating = False
    while not generating:
        generating = any(output.request_id == "long" and output.outputs[0].token_ids for output in engine.step())
    times = []
    for _ in range(100):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    ordered = sorted(times)
    return {"store": store or "no connector", "median_s": statistics.median(times), "p99_s": ordered[98]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="Gemma-3-12B")
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args()
    reloads = [in_new_process(reload, args.model, name) for name in (None, KVTIER, SIMPLE)]
    beside = [in_new_process(steps, args.model, store) for store in (None, "off", "eager")]
    shown = Table("connector", "ttft of S0, s", "of S0 again, s", "hit tokens", "texts equal")
    for row in reloads:
        first, _, again = row["answers"]
        equal = [answer["text"] for answer in row["answers"]] == [answer["text"] for answer in reloads[0]["answers"]]
        times = f"{first['ttft_s']:.3f}", f"{again['ttft_s']:.3f}"
        shown.add_row(row["connector"], *times, f"{again['hit_tokens']:,}", str(equal))
    stdout().print(shown)
    shown = Table("store", "step, ms: median", "p99")
    for row in beside:
        shown.add_row(row["store"], f"{1e3 * row['median_s']:.2f}", f"{1e3 * row['p99_s']:.2f}")
    stdout().print(shown)
    result = {"machine": describe(), "model": args.model, "reload": reloads, "steps": beside}
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
