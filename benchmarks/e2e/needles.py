"""Does the bundled model find what was hidden? Needles at random depths, through the engine, cold each.

python -m benchmarks.e2e.needles --count 20 --tokens 90112
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from transformers.utils import logging

from benchmarks import machine
from runner import LLM, SamplingParams
from runner.demo import job as demo
from runner.model.hybrid import HybridModel
from runner.needle import make_prompt, weights_path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=demo.TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    model, draw = HybridModel.load(weights_path()), random.Random(args.seed)
    params = SamplingParams(max_tokens=demo.MAX_NEW_TOKENS, temperature=0)
    found, rows = 0, []
    blocks = demo.pool_blocks(model.spec(), args.tokens, demo.DEVICE_REQUESTS)
    with LLM(model, "cpu", blocks, 0, max_batched_tokens=demo.MAX_BATCHED_TOKENS) as llm:
        for i in range(args.count):
            prompt = make_prompt(args.tokens, seed=args.seed * 1000 + i, ask_gap=draw.choice([16, 24, 100, 240]))
            start = time.perf_counter()
            (output,) = llm.generate(prompt.token_ids, params, use_tqdm=False)
            answer = llm.tokenizer.decode(output.token_ids)
            found += answer == prompt.answer
            rows.append({"depth": prompt.needle.start / args.tokens, "right": answer == prompt.answer})
            print(f"{i + 1}/{args.count}: {answer} ({time.perf_counter() - start:.1f} s)", file=sys.stderr)
    result = {
        "benchmark": "e2e/needles",
        "machine": machine.describe(),
        "tokens": args.tokens,
        "found": found,
        "needles": rows,
    }
    print(json.dumps(result, indent=2))
    return 0 if found >= 0.95 * args.count else 1


if __name__ == "__main__":
    sys.exit(main())
