"""``python -m benchmarks.hits [--vllm PYTHON] [--quick] [--json PATH] ...``: hit rates of kvtier, of vLLM, and of a
cache without limits.

A memory is a share of the working set: the full layers of all tokens, and a window for each session; both engines have
the same bytes. Everything is real but what the bytes hold, and the answers, which are given. ``--vllm`` is a Python
in whose environment vLLM is; without it only kvtier is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.hits.figure import draw
from benchmarks.hits.rows import KVTIER, MARGIN, VLLM, Cell, Engines, Memory, Row, below
from benchmarks.hits.shapes import SHAPES
from benchmarks.hits.sources import NAMES
from benchmarks.hits.workloads import WORKLOADS
from benchmarks.machine import describe
from benchmarks.output import stdout

ALL: dict[str, list[Any]] = {
    "workloads": list(WORKLOADS),
    "shapes": list(SHAPES),
    "memories": ["0.1", "0.25", "0.5", "1", "0.25+1"],
    "at_once": [1, 16],
}
QUICK: dict[str, list[Any]] = {
    "workloads": ["chat", "think", "drop40", "retrim", "roundrobin", "burst", "zipf"],
    "shapes": ["gemma3"],
    "memories": ["0.25", "1"],
    "at_once": [1],
}
TOO_SMALL = {"roundrobin": ["0.8"]}
"""Memories that a workload is measured with too: what is asked for in strict turn, and a fifth of it has no room."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=NAMES, help="default: all but traces, and these too if given")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--memories", nargs="+", metavar="DEVICE[+HOST]", help="shares of the working set")
    parser.add_argument("--at-once", nargs="+", type=int, help="requests that run at a time")
    parser.add_argument("--requests", type=int, help="of each workload, from its beginning (default: all)")
    parser.add_argument("--queued", type=int, default=0, help="requests that wait in the engine beside those that run")
    parser.add_argument("--quick", action="store_true", help="few rows, about two minutes")
    parser.add_argument("--traces", metavar="DIR", help="a folder of traces, see benchmarks/hits/traces.py")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that can import vLLM")
    parser.add_argument(
        "--known",
        type=Path,
        nargs="+",
        default=[],
        help="results: vLLM's figures of the same rows and texts are taken from them",
    )
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    parser.add_argument("--figure", type=Path, help="draw the shares of the bound here (a .png)")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ALL}
    chosen = {name: given[name] or (QUICK if args.quick else ALL)[name] for name in ALL}
    if args.traces and not args.workloads and not args.quick:
        chosen["workloads"] = list(NAMES)
    cells = [
        Cell(workload, shape, Memory.parse(memory), at_once, args.requests, args.queued)
        for workload in chosen["workloads"]
        for shape in chosen["shapes"]
        for memory in chosen["memories"] + ([] if given["memories"] else TOO_SMALL.get(workload, []))
        for at_once in chosen["at_once"]
    ]
    pythons = {KVTIER: sys.executable} | ({VLLM: args.vllm} if args.vllm else {})
    engines = Engines(pythons, args.traces)
    settings = {"quick": args.quick, "requests": args.requests, "queued": args.queued, **chosen}
    result: dict[str, Any] = {"machine": describe(), "settings": settings, "rows": []}
    known = [json.loads(path.read_text(encoding="utf-8")) for path in args.known]
    before = {(_cell(row), row["digest"]): row[VLLM] for of in known for row in of["rows"] if VLLM in row}
    result["known"] = [{"machine": of["machine"], "versions": of.get("versions")} for of in known]
    for row in engines.serve_all(cells, lambda cell, digest: before.get((cell, digest)), args.jobs):
        print(_line(row), file=sys.stderr, flush=True)
        result["versions"] = engines.versions
        result["rows"].append(row)
        if args.json:  # after each row: a run takes hours
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    place = {cell[:4]: n for n, cell in enumerate(cells)}
    result["rows"].sort(key=lambda row: place[_cell(row)[:4]])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.figure:
        draw(result, args.figure)
    _show(result["rows"])
    return 0


def _cell(row: Row) -> Cell:
    return Cell(
        row["workload"],
        row["shape"],
        Memory.parse(row["memory"]),
        row["at_once"],
        row["requests"],
        row.get("queued", 0),
    )


def _line(row: Row) -> str:
    rates = ", ".join(f"{name} {100 * row[name]['rate']:.1f}" for name in (KVTIER, VLLM) if name in row)
    return f"{_name(row)}: {rates} of {100 * row['bound']:.1f}"


def _name(row: Row) -> str:
    waiting = f"+{row['queued']}" if row["queued"] else ""
    return f"{row['workload']} {row['shape']} {row['memory']} x{row['at_once']}{waiting}"


def _show(rows: list[Row]) -> None:
    numbers = ("kvtier", "vLLM", "bound", "difference", "of the bound", "failed")
    table = Table("workload", "shape", "memory", "at once", *numbers, "")
    for row in rows:
        rate, bound, theirs = row[KVTIER]["rate"], row["bound"], row.get(VLLM)
        cells = [f"{100 * rate:.1f}", "", f"{100 * bound:.1f}", "", f"{100 * rate / bound:.1f} %"]
        failed = str(row[KVTIER]["failed"])
        if theirs:
            cells[1], cells[3] = f"{100 * theirs['rate']:.1f}", f"{100 * (rate - theirs['rate']):+.1f}"
            failed += f" / {theirs['failed']}"
        place = row["workload"], row["shape"], row["memory"], str(row["at_once"])
        table.add_row(*place, *cells, failed, "below" if below(row) else "")
    stdout().print(table)
    worse, compared = [row for row in rows if below(row)], sum(VLLM in row for row in rows)
    if compared:
        print(f"{len(worse)} of {compared} rows are below vLLM by more than {100 * MARGIN:g} points")
    for row in worse:
        print(f"  {_line(row)}")


if __name__ == "__main__":
    sys.exit(main())
