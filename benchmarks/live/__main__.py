"""What the live page costs the server, and pictures of the page.

    python -m benchmarks.live [--parts decode idle sample hour] [--json OUT]
    python -m benchmarks.live --screenshots docs/images

The server is a process of its own with the bundled model, its clients another one, those that watch a third.

``decode``   tokens a second of 16 running requests, with nobody who watches and with 50, in turn, and 20 snapshots a
             second instead of one: the cost of one is a twentieth. CPU seconds of the serving process by token are
             told beside: another program on the machine makes wall times longer, and these less.
``hour``     resident memory of the server before and after as many snapshots as an hour has, taken faster, for 50
             listeners, one of which never reads. With a browser at hand, the page's own memory over the same time.
``idle``     CPU time of a server that has nothing else to do.
``sample``   what one snapshot costs, with 16 running requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import machine, output
from benchmarks.live import cost, pictures


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.live", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=["decode", "idle", "sample", "hour"], help="default: all")
    parser.add_argument("--listeners", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7, help="rounds without and with listeners, in turn")
    parser.add_argument("--snapshots", type=int, default=3600, help="of the hour")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="only make pictures of the page, there")
    parser.add_argument("--json", type=Path, help="write the figures there, with machine and commit")
    args = parser.parse_args()
    if args.screenshots is not None:
        return pictures.make(args.screenshots)
    parts: dict[str, Callable[[], Any]] = {
        "decode": lambda: cost.decode(args.listeners, args.repeats),
        "idle": lambda: cost.idle(args.listeners),
        "sample": cost.sample,
        "hour": lambda: cost.hour(args.listeners, args.snapshots),
    }
    found = {name: parts[name]() for name in args.parts or parts}
    _show(found, args.listeners)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine.describe(), **found}, indent=2) + "\n")
    return 0


def _show(found: dict[str, Any], listeners: int) -> None:
    console = output.stdout()
    if rounds := found.get("decode"):
        columns = ("nobody watches", f"{listeners} watch", "ratio, median of pairs", "that, at 1 snapshot/s")
        table = Table("16 running", *columns, title=f"Decode, {cost.TIMES} snapshots/s")
        for name, what in (("tokens_per_s", "tokens a second"), ("cpu_us_per_token", "CPU us a token, whole process")):
            none, some = ([one[name] for one in rounds if one["listeners"] == n] for n in (0, listeners))
            ratio = statistics.median(b / a for a, b in zip(none, some, strict=True))
            medians = (f"{statistics.median(values):,.1f}" for values in (none, some))
            table.add_row(what, *medians, f"{ratio:.3f}", f"{1 + (ratio - 1) / cost.TIMES:.4f}")
        console.print(table)
    if hour := found.get("hour"):
        table = Table("", "before", "after", title=f"{hour['snapshots']:,} snapshots, {hour['listeners']} listeners")
        for name, (before, after) in hour["memory"].items():
            table.add_row(name, f"{before:,.1f}", f"{after:,.1f}")
        console.print(table)
    if idle := found.get("idle"):
        told = ", ".join(f"{value:.2f} with {name} listeners" for name, value in idle.items())
        console.print(f"CPU milliseconds a second of a server without requests, {cost.TIMES} snapshots/s: {told}")
    if sample := found.get("sample"):
        console.print(", ".join(f"{name} {value:,.4g}" for name, value in sample.items()))


if __name__ == "__main__":
    sys.exit(main())
