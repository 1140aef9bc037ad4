"""``kvtier demo`` on the GPU, in a process of its own: what came of it, and how long it took."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import Budget, Figure

ROOT = Path(__file__).resolve().parents[2]
DTYPE = "bfloat16"
"""The bundled model's own is float32, which FlashInfer has no kernels for."""
OPTIONS = ("--device", "cuda:0", "--dtype", DTYPE)
SECTION = "main job"


def run(budget: Budget, options: Sequence[str] = OPTIONS) -> Iterator[Figure]:
    """The demo as its users run it; what it prints on stderr goes to ours if it fails."""
    command = [sys.executable, "-m", "runner.cli", "demo", "--json", *options]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, budget.left_s), check=False
        )
    except subprocess.TimeoutExpired as late:
        yield Figure(
            SECTION, "kvtier demo ends in time", 0.0, "", at_least=1.0, note=f"ended after {late.timeout:.0f} s"
        )
        return
    try:
        report = json.loads(ran.stdout)
    except ValueError:
        print(ran.stderr[-6000:], file=sys.stderr)
        said = ran.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        note = f"status {ran.returncode}: {said[0]}"[:300]
        yield Figure(SECTION, "kvtier demo ends well", 0.0, "", at_least=1.0, note=note)
        return
    yield from figures(report)


def figures(report: dict[str, Any]) -> Iterator[Figure]:
    """From the demo's report."""
    served, attention = report["requests"], report["stats"]["attention"]
    what = f"{len(served)} requests of {served[0]['tokens']:,} tokens"
    note = f"{report['model']} in {report['dtype']}, {attention['backend']} attention ({attention['reason']})"
    yield Figure(SECTION, f"{what}, answered rightly and equally", float(report["ok"]), "", at_least=1.0, note=note)
    for violation in report["violations"]:
        yield Figure(SECTION, "violation", 1.0, "", at_most=0.0, note=violation)
    yield Figure(SECTION, f"{what}, all", report["wall_s"], "s", note=f"{report['load_s']:.1f} s to load the model")
    for i, request in enumerate(served):
        tokens = ", ".join(f"{request[f'{source}_tokens']:,} {source}" for source in ("device", "host", "computed"))
        yield Figure(
            SECTION, f"request {i + 1}, {request['prompt']}, first token", 1e3 * request["ttft_s"], "ms", note=tokens
        )
