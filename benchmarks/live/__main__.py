"""What the live page costs the server, and pictures of the page.

    python -m benchmarks.live [--json OUT]
    python -m benchmarks.live --screenshots docs/images

The server is a process of its own with the bundled model, its clients another one, those that watch a third.

``decode``   tokens a second of 16 running requests, with nobody who watches and with 50, in turn. CPU seconds of the
             serving process by token are told beside: another program on the machine makes wall times longer, and
             these hardly.
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
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import machine, output
from benchmarks.live import cost, pictures


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.live", description=__doc__.split("\n")[0])
    parser.add_argument("--listeners", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7, help="rounds without and with listeners, in turn")
    parser.add_argument("--snapshots", type=int, default=3600, help="of the hour")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="only make pictures of the page, there")
    parser.add_argument("--json", type=Path, help="write the figures there, with machine and commit")
    args = parser.parse_args()
    if args.screenshots is not None:
        return pictures.make(args.screenshots)
    found: dict[str, Any] = {
        "decode": cost.decode(args.listeners, args.repeats),
        "idle": cost.idle(args.listeners),
        "sample": cost.sample(),
        "hour": cost.hour(args.listeners, args.snapshots),
    }
    _show(found, args.listeners)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine.describe(), **found}, indent=2) + "\n")
    return 0


def _show(found: dict[str, Any], listeners: int) -> None:
    rounds, console = found["decode"], output.stdout()
    table = Table("16 running", "nobody watches", f"{listeners} watch", "ratio, median of pairs", title="Decode")
    for name, what in (("tokens_per_s", "tokens a second"), ("cpu_us_per_token", "CPU us a token, whole process")):
        none, some = ([one[name] for one in rounds if one["listeners"] == n] for n in (0, listeners))
        ratio = statistics.median(b / a for a, b in zip(none, some, strict=True))
        table.add_row(what, f"{statistics.median(none):,.1f}", f"{statistics.median(some):,.1f}", f"{ratio:.4f}")
    console.print(table)
    table = Table("", "before", "after", title=f"{found['hour']['snapshots']:,} snapshots, {listeners} listeners")
    for name, (before, after) in found["hour"]["memory"].items():
        table.add_row(name, f"{before:,.1f}", f"{after:,.1f}")
    console.print(table)
    told = ", ".join(f"{value:.2f} with {name} listeners" for name, value in found["idle"].items())
    console.print(f"CPU milliseconds a second of an idle server: {told}")
    console.print(", ".join(f"{name} {value:,.4g}" for name, value in found["sample"].items()))


if __name__ == "__main__":
    sys.exit(main())
