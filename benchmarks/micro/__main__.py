"""``python -m benchmarks.micro [--only TEXT] [--peers DIR] [--json PATH]``: the table of what the bookkeeping costs.

One thread; the median of the repeats, and their spread. With ``--peers`` vLLM's own scheduler core is measured in the
same run (see ``peers``); without it, vLLM's column was measured elsewhere, on a machine of the same kind.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.micro import peers
from benchmarks.micro.rows import Row, rows
from benchmarks.output import stdout


def measure(row: Row) -> dict[str, Any]:
    """One row's figures, as plain values in its unit."""
    gc.collect()
    gc.freeze()
    seconds = list(row.measure())
    kept = [value * row.scale for value in seconds[len(seconds) // 5 :]]  # the first ones warm caches
    return {
        "name": row.name,
        "shape": row.shape,
        "unit": row.unit,
        "median": statistics.median(kept),
        "least": min(kept),
        "most": max(kept),
        "repeats": len(kept),
        "must": row.must,
        "reach": row.reach,
        "vllm_elsewhere": row.vllm,
    }


def table(figures: list[dict[str, Any]]) -> Table:
    """For people."""
    here = any("vllm_here" in f for f in figures)
    columns = ("vLLM 0.33", "vLLM / kvtier") if here else ("vLLM 0.33 elsewhere",)
    shown = Table("work", "shape", "median", "least", "unit", "must", "reach", *columns)
    for f in figures:
        mark = "default" if f["must"] is None else "green" if f["median"] <= f["must"] else "red"
        vllm = [""] * len(columns)
        if "vllm_here" in f:
            vllm = [f"{f['vllm_here']:,.4g}", f"{f['vllm_here'] / f['median']:,.0f}"]
        elif not here and f["vllm_elsewhere"] is not None:
            vllm = [f"{f['vllm_elsewhere']:,}"]
        cells = [f"[{mark}]{f['median']:,.3g}[/]" if f["median"] < 100 else f"[{mark}]{f['median']:,.0f}[/]"]
        cells += [f"{f['least']:,.3g}", f["unit"], *(f"{f[k]:g}" if f[k] else "" for k in ("must", "reach")), *vllm]
        shown.add_row(f["name"], f["shape"], *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name or shape contains this")
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    parser.add_argument("--peers", type=Path, help="folder with vLLM's scheduler core: measure it in this run")
    args = parser.parse_args()
    console, figures = Console(stderr=True), []
    for row in rows():
        if args.only in f"{row.name} {row.shape}":
            with console.status(f"{row.name}, {row.shape}"):
                figures.append(measure(row))
    if args.peers:
        with console.status("vLLM's scheduler core: two minutes"):
            theirs = peers.measure(args.peers)
        for f in figures:
            if (f["name"], f["shape"]) in theirs:
                f["vllm_here"] = theirs[f["name"], f["shape"]]
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "rows": figures}, indent=1) + "\n", encoding="utf-8")
    stdout().print(table(figures))


if __name__ == "__main__":
    main()
