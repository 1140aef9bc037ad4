"""``python -m benchmarks.capacity``: how much of an arena real models' requests can use, and what stays findable.

On the shapes of real models, bookkeeping only (``device="meta"``), an arena of 100 GB, as an H200 can give. Prints
three tables and writes benchmarks/results/capacity.json with machine and commit. ``--quick``: two models, 200 requests,
and nothing is written unless it is asked for.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.capacity.measure import LENGTHS, TALKS, churn, fill, full_only, hit_rate
from benchmarks.machine import describe
from benchmarks.models import MODELS
from benchmarks.output import stdout
from kvtier import CacheSpec

ROOT = Path(__file__).parents[2]
ARENA_BYTES = 100 * 10**9
NAMES = ("gpt-oss-120b", "Gemma-3-27B", "Gemma-4-31B", "Llama-4-Scout", "Mistral-7B-v0.1", "Llama-3.1-8B")
QUICK = ("gpt-oss-120b", "Gemma-3-27B")
LONG = 90_112
OCCUPANCIES = (0.25, 0.5, 0.8, 0.95)
IN_HOST = ("in a circle", "in any order")
"""Conversations that are also served from a host tier beside a small device."""


def measure(name: str, requests: int) -> dict[str, Any]:
    """All figures of one model."""
    spec = CacheSpec.from_config(MODELS[name]())
    filled = {n: fill(spec, ARENA_BYTES, n) for n in LENGTHS}
    return {
        "model": name,
        "filled": filled,
        "filled_mean": sum(filled.values()) / len(filled),
        "static": fill(spec, ARENA_BYTES, LONG, static=True),
        "churn_long": asdict(churn(spec, ARENA_BYTES, LONG, LONG, requests // 4)),
        "churn_mixed": asdict(churn(spec, ARENA_BYTES, 2_048, LONG, requests - requests // 4)),
        "hits": {talk: _hits(spec, talk) for talk in TALKS},
        "hits_full_only": {talk: _hits(full_only(spec), talk) for talk in TALKS},
        "hits_in_host": {
            talk: {store: _hits(spec, talk, in_host=True, store=store) for store in ("eager", "lazy")}
            for talk in IN_HOST
        },
    }


def _hits(spec: CacheSpec, talk: str, **how: Any) -> dict[float, float]:
    """By occupancy."""
    return {o: hit_rate(spec, o, TALKS[talk], **how) for o in OCCUPANCIES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two models, 200 requests")
    parser.add_argument(
        "--requests",
        type=int,
        help="that come and go, a quarter of them of 90,112 tokens (default: 10,000; quick: 200)",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    requests = args.requests or (200 if args.quick else 10_000)
    path = args.json or (None if args.quick else ROOT / "benchmarks/results/capacity.json")
    names = QUICK if args.quick else NAMES
    rows = [measure(name, requests) for name in track(names, "Serving", console=Console(stderr=True))]
    console = stdout()
    console.print(_filled(rows), _churned(rows, requests), _found(rows))
    if path:
        result = {"machine": describe(), "arena_bytes": ARENA_BYTES, "requests": requests, "models": rows}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _filled(rows: list[dict[str, Any]]) -> Table:
    shown = Table("model", "90,112 tokens", "2k to 128k, mean", "static split, 90,112", title="% of 100 GB in use")
    for row in rows:
        shown.add_row(row["model"], *(_percent(x) for x in (row["filled"][LONG], row["filled_mean"], row["static"])))
    return shown


def _churned(rows: list[dict[str, Any]], requests: int) -> Table:
    shown = Table(
        "model",
        "90k: wasted %",
        "in use %",
        "2k-90k: wasted %",
        "in use %",
        "preempted",
        "blocks moved",
        title=f"While {requests:,} requests come and go",
    )
    for row in rows:
        a, b = row["churn_long"], row["churn_mixed"]
        shares = (_percent(x[what]) for x in (a, b) for what in ("wasted", "reachable"))
        shown.add_row(
            row["model"],
            *shares,
            f"{a['preemptions'] + b['preemptions']:,}",
            f"{a['moved_blocks'] + b['moved_blocks']:,}",
        )
    return shown


def _found(rows: list[dict[str, Any]]) -> Table:
    title = "Earlier turns found again, % (all layers full)"
    shown = Table("model", "conversations", "tier", *(f"{o:.0%}" for o in OCCUPANCIES), title=title)
    for row in rows:
        for talk, hits in row["hits"].items():
            pairs = zip(hits.values(), row["hits_full_only"][talk].values(), strict=True)
            shown.add_row(row["model"], talk, "device", *(f"{100 * a:.1f} ({100 * b:.1f})" for a, b in pairs))
        for talk, stores in row["hits_in_host"].items():
            for store, hits in stores.items():
                shown.add_row(row["model"], talk, f"host, {store}", *(f"{100 * a:.1f}" for a in hits.values()))
    return shown


if __name__ == "__main__":
    main()
