"""``python -m benchmarks.scaling``: step cost against running requests, context, pool size and groups.

Writes benchmarks/results/scaling.json (with machine and commit) and docs/figures/scaling.png, and prints a table. With
``--quick`` the points are few and small, to see that it runs, and nothing is written unless it is asked for.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.output import stdout
from benchmarks.scaling.figure import draw
from benchmarks.scaling.sweeps import SWEEPS, measure, points

ROOT = Path(__file__).parents[2]


def table(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    shown = Table("varies", "value", "shape", "step, us", "least", "without pages, us", "least")
    for row in rows:
        cells = [f"{row[name][what]:,.1f}" for name in ("with_pages", "without_pages") for what in ("median", "least")]
        shown.add_row(row["sweep"], f"{row['value']:,}", row["shape"], *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="sweeps whose name contains this")
    parser.add_argument("--quick", action="store_true", help="few and small points")
    parser.add_argument("--repeats", type=int, help="steps measured per point (default: 160; quick: 16)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--figure", type=Path, help="draw them here (needs matplotlib)")
    parser.add_argument("--redraw", type=Path, metavar="JSON", help="draw these figures, measure nothing")
    args = parser.parse_args()
    whole = not args.quick and not args.only
    json_path = args.json or (ROOT / "benchmarks/results/scaling.json" if whole and not args.redraw else None)
    figure_path = args.figure or (ROOT / "docs/figures/scaling.png" if whole or args.redraw else None)
    if args.redraw:
        result = json.loads(args.redraw.read_text(encoding="utf-8"))
    else:
        result = {"machine": describe(), "quick": args.quick, "rows": _measure_all(args)}
        stdout().print(table(result["rows"]))
    if json_path:
        json_path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if figure_path:
        draw(result, figure_path)


def _measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    repeats, rows, console = args.repeats or (16 if args.quick else 160), [], Console(stderr=True)
    for sweep in SWEEPS:
        if args.only not in sweep.name:
            continue
        for point in points(sweep, args.quick):
            with console.status(f"{point.sweep} {point.value:,}, {point.shape}"):
                rows.append(measure(point, repeats))
    return rows


if __name__ == "__main__":
    main()
