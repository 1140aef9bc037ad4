"""``python -m benchmarks.micro.against REV``: every row of the table here and at an earlier commit, in turns.

Each commit runs its own benchmark in its own process, so that rows may change with what they measure; rows that only
one of them has are left out. Rounds alternate, since a machine's speed drifts. A row counts as slower if its ratio is
above one in every round, and above ``1 + tolerance`` in the middle one. Exit status 1 if any is. (dynamo#6353, #4774:
time to first token grew tenfold between releases, and nobody saw it.)
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.output import stdout

Figures = dict[tuple[str, str], float]
"""(name, shape) -> median of one run."""


@dataclass(frozen=True)
class Change:
    """One row's ratios, after / before, one per round."""

    name: str
    shape: str
    before: float
    after: float
    ratios: tuple[float, ...]

    def is_slower(self, tolerance: float) -> bool:
        """Whether all rounds agree that it is, and it is worth a word."""
        return min(self.ratios) > 1.0 and statistics.median(self.ratios) > 1.0 + tolerance


def changes(before: Sequence[Figures], after: Sequence[Figures]) -> list[Change]:
    """Of the rows that both have in every round; ``before[i]`` and ``after[i]`` are of round i."""
    common = [row for row in after[0] if all(row in figures for figures in (*before, *after))]
    found = []
    for row in common:
        old, new = [figures[row] for figures in before], [figures[row] for figures in after]
        ratios = tuple(n / o for n, o in zip(new, old, strict=True))
        found.append(Change(*row, statistics.median(old), statistics.median(new), ratios))
    return found


def table(found: Sequence[Change], revision: str, tolerance: float) -> Table:
    """For people."""
    shown = Table("work", "shape", revision, "here", "here / there", "least", "most")
    for change in found:
        middle = statistics.median(change.ratios)
        cells = [f"{change.before:,.3g}", f"{change.after:,.3g}", f"{middle:.2f}"]
        cells += [f"{min(change.ratios):.2f}", f"{max(change.ratios):.2f}"]
        shown.add_row(change.name, change.shape, *cells, style="red" if change.is_slower(tolerance) else None)
    return shown


def check_out(repository: Path, revision: str, folder: Path) -> None:
    """The files of ``revision`` in ``folder``. Raises CalledProcessError where git does not know it."""
    run = subprocess.run(["git", "archive", revision], cwd=repository, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(run.stdout)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)  # since 3.11.4
        archive.extractall(folder)


def measure(folder: Path, only: str, **environment: str) -> Figures:
    """Runs the benchmark that lies in ``folder`` on the library beside it."""
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.micro", "--only", only, "--json", str(figures)]
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPATH": path, **environment}
        subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    return {(row["name"], row["shape"]): row["median"] for row in rows}


def main(arguments: Sequence[str] | None = None, repository: Path = Path(__file__).parents[2]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="the earlier commit")
    parser.add_argument("--only", default="", help="rows whose name or shape contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.15, help="a row may be slower by this share (0.15)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    console, before, after = Console(stderr=True), list[Figures](), list[Figures]()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as compiled:
        try:
            check_out(repository, options.revision, Path(folder))
        except subprocess.CalledProcessError as error:
            parser.error(f"git archive {options.revision}: {error.stderr.decode().strip()}")
        for k in range(options.rounds):
            with console.status(f"round {k + 1} of {options.rounds}"):
                before.append(measure(Path(folder), options.only, XDG_CACHE_HOME=compiled))
                after.append(measure(repository, options.only))
    found = changes(before, after)
    if not found:
        parser.error(f"the two have no row in common whose name or shape contains {options.only!r}")
    stdout().print(table(found, options.revision, options.tolerance))
    slower = [change for change in found if change.is_slower(options.tolerance)]
    stdout().print(f"{len(slower)} of {len(found)} rows slower by more than {options.tolerance:.0%}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
