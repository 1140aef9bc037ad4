"""``python -m benchmarks.states [--only NAME ...] [--traces DIR] [--json PATH]``: what states cost, and what is found.

    decode  a decode step of 256 rows, with a group of states and with a window in its place
    copies  bytes of the snapshots that a prompt of 8,192 tokens leaves, against those of the weights that it reads
    replay  200 prompts fill a host tier, and 8 of them are asked again (SGLang's issue 39436)
    curve   150 requests of agents in room for few states (SGLang's issue 40865); needs the traces
    agents  the whole agentic trace, with states and without (about an hour a memory); needs the traces

All are bookkeeping alone, by real schedulers and pools at the sizes of real models. Without ``--only``: all that do not
need the traces, and with ``--traces`` the curve too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.states import measure

SECTIONS = "decode", "copies", "replay", "curve", "agents"
OF_TRACES = "curve", "agents"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--traces", type=Path, metavar="DIR", help="the folder of the traces, see benchmarks.hits")
    parser.add_argument("--gib", type=int, nargs="+", default=[256, 1024], help="memories of the agents")
    parser.add_argument(
        "--every", type=int, default=1, help="take each n-th session of the agents, and 1/n of the memory"
    )
    parser.add_argument("--at-once", type=int, default=16, help="requests of the agents that run at a time")
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    chosen = args.only or [name for name in SECTIONS[:4] if args.traces or name not in OF_TRACES]
    if args.traces is None and any(name in OF_TRACES for name in chosen):
        raise SystemExit(f"{', '.join(OF_TRACES)} need --traces")
    measures: dict[str, Callable[[], Any]] = {
        "decode": measure.decode_steps,
        "copies": measure.copies,
        "replay": measure.replay,
        "curve": lambda: measure.curve(args.traces),
        "agents": lambda: list(measure.agents(args.traces, args.gib, args.every, args.at_once, _tell)),
    }
    result: dict[str, Any] = {"machine": describe()}
    if args.json and args.json.exists() and args.only:  # other sections stay
        result = json.loads(args.json.read_text(encoding="utf-8"))
    for name in chosen:
        _tell(name)
        result[name] = measures[name]()
        print(f"{name}:", json.dumps(result[name], indent=1), flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _tell(news: str) -> None:
    print(news, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
