"""``python -m benchmarks.products [--rows 1 4 16 64 512] [--json PATH]``: a model's products on a CPU, by each way.

torch's own, oneDNN's with packed weights, and kvtier's loops take turns, in float32 on one thread. A turn multiplies
with the weights of all layers in a model's order, so that they come from memory as in a step. CPU milliseconds,
medians of the turns. The shapes are Gemma-3-270M's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.output import stdout
from runner.model.device import ask_for_large_pages
from runner.model.fused import packed

LAYERS, HEAD = 18, ("head", 262_144, 640)
LAYER = (
    ("q", 1024, 640),
    ("k", 256, 640),
    ("v", 256, 640),
    ("o", 640, 1024),
    ("gate, up", 4096, 640),
    ("down", 640, 2048),
)
TURNS = 9
MOST_OF_THE_HEAD = 64
"""A step of prompts has no more rows whose logits are computed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.products", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--json", type=Path, help="write the figures there, with machine and commit")
    args = parser.parse_args()
    ask_for_large_pages("cpu")
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = measure(args.rows)
    table = Table(title=f"CPU ms of all products of a step; {packed.chosen(torch.float32).__name__} is taken here")
    names = [name for name, *_ in (*LAYER, HEAD)]
    for column in ("rows", "way", *names, "all"):
        table.add_column(column, justify="right")
    for row in found:
        ms = [row["ms"].get(name, 0.0) for name in names]
        table.add_row(str(row["rows"]), row["way"], *[f"{each:.1f}" for each in ms], f"{sum(ms):.1f}")
    stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "rows": found}, indent=2) + "\n")
    return 0


def measure(rows: list[int]) -> list[dict[str, Any]]:
    """For each number of rows and each way, ms by name."""
    places = [*LAYER * LAYERS, HEAD]
    weights = [torch.randn(n, k) for _, n, k in places]
    ways = {"torch": packed.by_torch, "oneDNN": packed.by_onednn, "loops": packed.by_loops}
    products = {name: [way(weight, None) for weight in weights] for name, way in ways.items()}
    found = []
    for count in rows:
        inputs = {k: torch.randn(count, k) for _, _, k in places}
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(TURNS if count <= MOST_OF_THE_HEAD else 3):
            for name, each in products.items():
                ms = dict.fromkeys((place for place, *_ in places), 0.0)
                for product, (place, _, k) in zip(each, places, strict=True):
                    if place == HEAD[0] and count > MOST_OF_THE_HEAD:
                        continue
                    begun = time.thread_time()
                    product(inputs[k])
                    ms[place] += 1e3 * (time.thread_time() - begun)
                turns[name].append(ms)
        for name, of in turns.items():
            medians = {place: round(statistics.median(ms[place] for ms in of), 2) for place in of[0]}
            found.append({"rows": count, "way": name, "ms": medians})
    return found


if __name__ == "__main__":
    raise SystemExit(main())
