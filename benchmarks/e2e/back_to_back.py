"""The main job, measured: S0, S1, S0, S0 with the host tier on and off.

    python -m benchmarks.e2e.back_to_back --out result.json

Per setting: time to first token cold, from the host (S0 after S1 has pushed it out) and from the device (S0 once more);
prompt tokens by source. Then, for tiers of 1 and 2 GiB: bytes allocated, and how far the process grows once all of them
are in use, against what was asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from transformers.utils import logging

from benchmarks import machine
from kvtier import KVCache
from runner.demo import job as demo
from runner.model.hybrid import HybridModel
from runner.needle import weights_path


def measure(tokens: int, host: bool, repeats: int) -> dict[str, Any]:
    """Runs the job ``repeats`` times; medians of times, and the last run's counts."""
    reports = [
        demo.run(tokens=tokens, requests=demo.ORDER_WITH_A_DEVICE_HIT, host_memory=None if host else 0)
        for _ in range(repeats)
    ]
    names = ("cold", "cold_again", "host_hit" if host else "pushed_out", "device_hit")
    last = reports[-1]
    return {
        "ttft_s": {n: statistics.median(r.requests[i].ttft_s for r in reports) for i, n in enumerate(names)},
        "ttft_s_all": {n: [r.requests[i].ttft_s for r in reports] for i, n in enumerate(names)},
        "prompt_tokens": {
            n: {"device": r.device_tokens, "host": r.host_tokens, "computed": r.computed_tokens}
            for n, r in zip(names, last.requests, strict=True)
        },
        "answers_right": all(r.right_answers for r in reports),
        "answers_same": all(r.same_answers for r in reports),
        "transfers": last.stats["cache"]["transfers"],
        "repeats": repeats,
    }


def measure_memory(device_bytes: int, host_bytes: int) -> dict[str, Any]:
    """What the tiers allocate of the bytes asked for, and what the process grows by once every byte is in use."""
    spec = HybridModel.load(weights_path()).spec()
    before = machine.rss_bytes()
    with KVCache(spec, device_bytes=device_bytes, host_bytes=host_bytes) as cache:
        stats = cache.stats()
        bookkeeping = machine.rss_bytes() - before
        for arena in cache.arenas:
            if arena is not None:
                arena.bytes[:] = 1
        grown = machine.rss_bytes() - before
    return {
        "device": {"asked": device_bytes, "allocated": stats.device_bytes},
        "host": {"asked": host_bytes, "allocated": stats.host_bytes},
        "process": {"asked": device_bytes + host_bytes, "grew": grown, "of_which_bookkeeping": bookkeeping},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=demo.TOKENS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    logging.disable_progress_bar()
    result = {
        "benchmark": "e2e/back_to_back",
        "machine": machine.describe(),
        "tokens": args.tokens,
        "memory_bytes": measure_memory(1 << 30, 2 << 30),
        "tier_on": measure(args.tokens, True, args.repeats),
        "tier_off": measure(args.tokens, False, args.repeats),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    sound = all(result[key][flag] for key in ("tier_on", "tier_off") for flag in ("answers_right", "answers_same"))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
