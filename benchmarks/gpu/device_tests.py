"""``pytest -m gpu`` as a section: how many passed, and how long it took."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.figures import Budget, Figure

_HARMLESS = {"properties", "system-out", "system-err"}
"""Of a test's parts in a report."""
WARNINGS = ("-W", "default", "-W", "error:Triton cannot compile")
"""Elsewhere any warning is an error; on a GPU there are packages, drivers and code of theirs that nobody here has heard
warn. That torch does the work of a kernel is no success, though."""
ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tests/served/test_graphs.py",
    "tests/served/test_pooled.py",
    "tests/attention/test_flashinfer_gpu.py",
    "tests/families/test_half_precision.py",
    "tests/attention/test_reference.py",
    "tests/kernels/test_words.py",
    "tests/gpu/test_copies.py",
    "tests/gpu/test_host_tier.py",
    "tests/gpu/test_memory.py",
    "tests/gpu/test_order.py",
)
"""Those with tests marked gpu, the most telling first: collecting the others would take minutes."""
MOST_S = 400.0
LATE = -1000
"""The status of a run that was ended."""
REPORT_S = 10.0
"""For a run that has been ended to say what had passed by then."""
PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))
"""
"""What runs in the background may have been told to ignore interrupts, and hands that down."""
TEST_S = 120
"""Of one test; the process of one that takes longer is ended, and says where it was."""


@dataclass(frozen=True)
class Ran:
    """What came of a run of tests. ``failed`` is at least 1 unless pytest ended well and left a report."""

    passed: int
    failed: int
    skipped: tuple[str, ...]
    """Why, a reason a test."""
    text: str


def run(budget: Budget) -> Iterator[Figure]:
    """In a process of its own, so that a test that breaks the device breaks nothing else; prints what fails."""
    begun = time.perf_counter()
    found = device_tests(ROOT, max(1.0, min(MOST_S, budget.left_s) - REPORT_S), FILES)
    yield from figures(found, time.perf_counter() - begun)


def device_tests(folder: Path, limit_s: float, files: Sequence[str]) -> Ran:
    """Runs the tests marked gpu of ``files`` in ``folder``; pytest's report counts them, not what it says.

    A run that the limit ends is asked to report first; one that crashes leaves no report: nothing of it has passed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        options = ["-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        limit = [f"--timeout={TEST_S}", "--timeout-method=thread"]  # a signal does not end a call into the driver
        command = [sys.executable, "-c", PYTEST, *options, *limit, *WARNINGS, *files]
        status, text = _ended(command, folder, limit_s)
        whole = report.exists()
        cases = list(ElementTree.parse(report).iter("testcase")) if whole else []
    if status == LATE:
        cases = cases[:-1]  # that of the test that was not done looks like one that has passed
    failed = sum(len(case.findall("failure")) + len(case.findall("error")) for case in cases)
    skipped = tuple(str(skip.get("message")) for case in cases for skip in case.findall("skipped"))
    passed = sum(len(case) == 0 or {part.tag for part in case} <= _HARMLESS for case in cases)
    text += f"\npytest ended with status {status}"
    return Ran(passed, max(failed, int(status != 0 or not whole)), skipped, text)


def _ended(command: Sequence[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Its status and what it said; ``LATE`` if it was not done in time."""
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with subprocess.Popen(command, cwd=folder, **piped) as run:
        try:
            text = run.communicate(timeout=limit_s)[0]
            return run.returncode, text
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                run.communicate(timeout=REPORT_S)
            run.kill()
            return LATE, f"{run.communicate()[0]}\nended after {limit_s:.0f} s"
        except BaseException:
            run.kill()
            raise


def figures(ran: Ran, seconds: float) -> Iterator[Figure]:
    """What passed and what failed; why tests were skipped is a note."""
    if ran.failed or not ran.passed:
        print(ran.text[-6000:], file=sys.stderr)
    reasons = "; ".join(f"{count} skipped: {reason}" for reason, count in Counter(ran.skipped).most_common())
    yield Figure("tests", "device tests that pass", ran.passed, "tests", at_least=1, note=reasons[:300])
    yield Figure("tests", "device tests that fail", ran.failed, "tests", at_most=0, note=f"{seconds:.0f} s")
