"""``python -m benchmarks.remote.ttft [--mooncake] [--json PATH]``: TTFT of a long prompt, by where its KV is.

Real servers (``kvtier serve`` with the bundled model, on the CPU) in processes of their own, and the time from sending
a request to its first token, over HTTP. In each round, with prompts that nobody has sent before:

    cold                 nothing of the prompt is anywhere; prompts A, B and C
    device hit           A at once again
    host hit             A after B and C, which have taken its place on the device
    after a restart      A, when the engine was killed by SIGKILL and started again: its first request
    store hit            B and C, which only the remote has now
    decode elsewhere     D on another engine, once this one has computed it with ``max_tokens=1``

A request whose prompt did not come from where it should (a look that was late, say) counts as missed, not as a time.
The remote is a directory. With --mooncake it is also a Mooncake Store over TCP on loopback:

    make test-store ARGS=--co                                        once, for the environment
    .venv-store/bin/python -m tests.remote.alone .venv-store/bin/python -m benchmarks.remote.ttft --mooncake
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.output import stdout
from runner import needle
from runner.demo.shared import MAX_NEW_TOKENS, Engine
from tests.remote.alone import is_alone
from tests.remote.mooncake_cluster import HOST, PORT, Cluster

WHAT = ("cold", "device hit", "host hit", "store hit", "after a restart", "decode elsewhere")
MOST = 0.9
"""Of a prompt's tokens: so many come from the tier that a row is about."""


class Rounds:
    """Servers on one remote, and what was measured."""

    def __init__(self, store: str, folder: Path, tokens: int, console: Any) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {what: [] for what in WHAT}
        self.wrong = 0
        self._store, self._folder, self._tokens, self._status = store, folder, tokens, console
        # A third more than one prompt on the device, and room for all of a round in the host.
        mib = tokens * 512 / 2**20
        self._memory = (f"{int(mib * 1.45)}MiB", f"{int(mib * 8)}MiB")
        self._seed = 1000
        self._started = 0

    def round(self) -> None:
        """Each of ``WHAT`` once at least."""
        a, b, c, d = (self._prompt() for _ in range(4))
        with ExitStack() as stack:
            one = self._engine(stack)
            self._ask("cold", one, a, "")
            self._ask("device hit", one, a, "device")
            self._ask("cold", one, b, "")
            self._ask("cold", one, c, "")
            self._ask("host hit", one, a, "host")
            one.wait_until_stored()
            one.kill()
            one = self._engine(stack)
            self._ask("after a restart", one, a, "store")
            self._ask("store hit", one, b, "store")
            self._ask("store hit", one, c, "store")
            two = self._engine(stack)
            one.complete(d.text, 1)
            one.wait_until_stored()
            self._ask("decode elsewhere", two, d, "store")

    def _prompt(self) -> needle.NeedlePrompt:
        self._seed += 1
        return needle.make_prompt(self._tokens, seed=self._seed)

    def _engine(self, stack: ExitStack) -> Engine:
        self._started += 1
        name = f"engine {self._started}"
        self._status.update(f"{self._store}: starting {name}")
        return stack.enter_context(
            Engine(name, self._store, self._folder / f"{name}.log", self._tokens, memory=self._memory)
        )

    def _ask(self, what: str, of: Engine, prompt: needle.NeedlePrompt, tier: str) -> None:
        self._status.update(f"{self._store}: {what}, {of.name}")
        load = os.getloadavg()[0]
        text, ttft_s, cached = of.complete(prompt.text, MAX_NEW_TOKENS)
        self.wrong += text.strip() != prompt.answer.rstrip(" .")
        is_right = cached.get(tier, 0) >= MOST * self._tokens if tier else not any(cached.values())
        self.rows[what].append({"ttft_s": ttft_s, "cached": cached, "missed": not is_right, "load": load})

    def figures(self) -> dict[str, Any]:
        """By what was asked: the median of the times, and how many missed."""
        found: dict[str, Any] = {"wrong texts": self.wrong}
        for what, rows in self.rows.items():
            times = [row["ttft_s"] for row in rows if not row["missed"]]
            found[what] = {
                "median_s": statistics.median(times) if times else None,
                "least_s": min(times, default=None),
                "count": len(times),
                "missed": sum(row["missed"] for row in rows),
                "requests": rows,
            }
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=90_112, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mooncake", action="store_true", help="also with a Mooncake Store")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the directory is made")
    parser.add_argument("--json", type=Path, help="write the figures with machine and commit here")
    args = parser.parse_args()
    if args.mooncake and not is_alone():
        sys.exit("Mooncake listens on all addresses: run this by `python -m tests.remote.alone`")
    figures: dict[str, Any] = {}
    begun, loads = time.monotonic(), [os.getloadavg()]
    with ExitStack() as stack, Console(stderr=True).status("measuring") as status:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        stores = {"a directory": f"file://{folder / 'store'}"}
        if args.mooncake:
            cluster = Cluster(folder, lease_ms=60_000)
            stack.callback(cluster.close)
            cluster.start_storage(memory_mb=args.rounds * args.tokens * 4 // 1024 + 512)
            stores["Mooncake over loopback"] = f"mooncake://{HOST}:{PORT}"
        for name, uri in stores.items():
            rounds = Rounds(uri, folder, args.tokens, status)
            for _ in range(args.rounds):
                rounds.round()
            figures[name] = rounds.figures()
            loads.append(os.getloadavg())
    settings = {"tokens": args.tokens, "rounds": args.rounds}
    result = {"machine": describe(), "load": loads, "seconds": time.monotonic() - begun, "settings": settings}
    if args.json:
        args.json.write_text(json.dumps(result | {"stores": figures}, indent=1) + "\n", encoding="utf-8")
    _show(args.tokens, figures)
    return sum(of["wrong texts"] for of in figures.values())


def _show(tokens: int, figures: dict[str, Any]) -> None:
    table = Table("TTFT, s", *figures, title=f"a prompt of {tokens:,} tokens, the bundled model on the CPU")
    for what in WHAT:
        cells = []
        for of in figures.values():
            row = of[what]
            missed = f", {row['missed']} missed" if row["missed"] else ""
            cells.append("-" if row["median_s"] is None else f"{row['median_s']:.2f} ({row['count']}{missed})")
        table.add_row(what, *cells)
    stdout().print(table)


if __name__ == "__main__":
    sys.exit(main())
