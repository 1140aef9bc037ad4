"""``pytest -m gpu`` as a section: how many passed, and how long it took."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.figures import Budget, Figure

ROOT = Path(__file__).resolve().parents[2]
MOST_S = 240.0


def run(budget: Budget) -> Iterator[Figure]:
    """In a process of its own, so that a test that breaks the device breaks nothing else; prints what fails."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests"]
    begun, limit = time.perf_counter(), min(MOST_S, budget.left_s)
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
        text = ran.stdout
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace") + f"\nended after {limit:.0f} s\n1 failed"
    yield from figures(text, time.perf_counter() - begun)


def figures(text: str, seconds: float) -> Iterator[Figure]:
    """From pytest's output."""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", text)}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    passed = counts.get("passed", 0)
    if failed or not passed:
        print(text[-6000:], file=sys.stderr)
    yield Figure("tests", "device tests that pass", passed, "tests", at_least=1)
    yield Figure("tests", "device tests that fail", failed, "tests", at_most=0, note=f"{seconds:.0f} s")
