"""``python -m benchmarks.hits [--workloads ...] [--shapes ...] [--budgets ...] [--json PATH]``: hit rates beside the
bound of a cache without limits.

A budget is a share of the working set: the full layers of all tokens, and a window for each session. Everything is
real but the bytes, of which there are four a token and layer, and the answers, which are given.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.hits.bound import measure
from benchmarks.hits.serve import SHAPES, serve
from benchmarks.hits.workloads import WORKLOADS, first_of
from benchmarks.machine import describe
from benchmarks.output import stdout

BLOCK_TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["gemma3"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.25, 1.0], help="shares of the working set")
    parser.add_argument("--host", type=float, default=0.0, help="of the host tier, a share of the working set too")
    parser.add_argument("--at-once", type=int, default=1, help="requests that run at a time")
    parser.add_argument("--requests", type=int, help="of each workload, from its beginning (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    rows = []
    for name in args.workloads:
        asked = first_of(WORKLOADS[name](), args.requests)
        whole = measure(asked, BLOCK_TOKENS)
        for shape in args.shapes:
            size = SHAPES[shape].working_set(whole.distinct_tokens, whole.sessions)
            for budget in args.budgets:
                sizes = int(budget * size), int(args.host * size)
                found = serve(asked, SHAPES[shape], BLOCK_TOKENS, *sizes, at_once=args.at_once)
                row: dict[str, Any] = {"workload": name, "shape": shape, "budget": budget, "bound": whole.rate}
                row |= {"rate": found.rate, "tiers": found.tiers, "failed": found.failed, "seconds": found.seconds}
                rows.append(row)
                print(f"{name} {shape} {budget:g}: {100 * found.rate:.1f} of {100 * whole.rate:.1f}", file=sys.stderr)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    if args.json:
        result = {"machine": describe(), "settings": settings, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = Table("workload", "shape", "budget", "hits", "bound", "share of it", "failed")
    for row in rows:
        rate, bound = row["rate"], row["bound"]
        cells = f"{100 * rate:.1f} %", f"{100 * bound:.1f} %", f"{100 * rate / bound:.1f} %", str(row["failed"])
        table.add_row(row["workload"], row["shape"], f"{row['budget']:g}", *cells)
    stdout().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
