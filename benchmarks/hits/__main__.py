"""``python -m benchmarks.hits [--vllm PYTHON] [--quick] [--json PATH] ...``: hit rates of kvtier beside vLLM's, and beside
the bound of a cache without limits.

A memory is a share of the working set: the full layers of all tokens, and a window for each session; both engines have
the same bytes. Everything is real but the bytes' content and the answers, which are given. ``--vllm`` is a Python in whose
environment vLLM is; without it only kvtier is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.hits.rows import KVTIER, VLLM, Cell, Engines, Memory, Row
from benchmarks.hits.shapes import SHAPES
from benchmarks.hits.workloads import WORKLOADS
from benchmarks.machine import describe
from benchmarks.output import stdout

MARGIN = 0.005
"""A row whose rate is lower than vLLM's by more than this is named."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--memories", nargs="+", metavar="DEVICE[+HOST]", help="shares of the working set",
                        default=["0.1", "0.25", "0.5", "1", "0.25+1"])  # fmt: skip
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16], help="requests that run at a time")
    parser.add_argument("--requests", type=int, help="of each workload, from its beginning (default: all)")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that can import vLLM")
    parser.add_argument("--known", type=Path, help="a result: its figures of vLLM are taken for the same texts")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    cells = [
        Cell(workload, shape, Memory.parse(memory), at_once, args.requests)
        for workload in args.workloads
        for shape in args.shapes
        for memory in args.memories
        for at_once in args.at_once
    ]
    pythons = {KVTIER: sys.executable} | ({VLLM: args.vllm} if args.vllm else {})
    engines = Engines(pythons, None)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "known")}
    result: dict[str, Any] = {"machine": describe(), "settings": settings, "rows": []}
    before = _known(args.known)
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
    _show(result["rows"])
    return 0


def _cell(row: Row) -> Cell:
    return Cell(row["workload"], row["shape"], Memory.parse(row["memory"]), row["at_once"], row["requests"])


def _known(path: Path | None) -> dict[tuple[Cell, str], Row]:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path else []
    return {(_cell(row), row["digest"]): row[VLLM] for row in rows if VLLM in row}


def _line(row: Row) -> str:
    rates = ", ".join(f"{name} {100 * row[name]['rate']:.1f}" for name in (KVTIER, VLLM) if name in row)
    return f"{_name(row)}: {rates} of {100 * row['bound']:.1f}"


def _name(row: Row) -> str:
    return f"{row['workload']} {row['shape']} {row['memory']} x{row['at_once']}"


def below(row: Row) -> bool:
    """Whether vLLM finds more than kvtier, and by more than the margin."""
    return VLLM in row and bool(row[KVTIER]["rate"] < row[VLLM]["rate"] - MARGIN)


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
    worse = [row for row in rows if below(row)]
    print(f"{len(worse)} of {len(rows)} rows are below vLLM by more than {100 * MARGIN:g} points"
          + "".join(f"\n  {_line(row)}" for row in worse))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
