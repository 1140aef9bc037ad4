"""``kvtier warmup``: compiles the loops ahead of the first start, as for an image."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "warmup",
        help="compile the loops and keep their machine code, as for an image",
        description="Compiles the loops that keep a cache's books, also those that only a GPU's engine calls, and says "
        "where their machine code is kept: in KVTIER_CACHE_DIR, else in kvtier of XDG_CACHE_HOME, else in "
        "~/.cache/kvtier. Where all is there, nothing is compiled. Later starts need only read that folder.",
        epilog="Status 0: all is kept. 1: it cannot be kept, with the reason; each start would compile it. The code is "
        "for this kvtier, this Python, this numba and the CPU at hand; a folder holds code for several of each.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status of the command."""
    from kvtier import warm_up

    report = warm_up()
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        loaded = report.loops - report.compiled
        counts = f"{report.compiled} compiled, {loaded} loaded, {report.seconds:.1f} s"
        print(f"{report.loops} loops for {report.cpu}: {counts}")
        if report.kept:
            print(f"kept in {report.folder}")
    if not report.kept:
        print(f"kvtier: cannot be kept: {report.problem}", file=sys.stderr)
    return 0 if report.kept else 1
