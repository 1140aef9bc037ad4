"""Mutation testing of the bookkeeping: changes the code in small ways, one at a time, and sees whether a test fails.

    pip install -e '.[dev,mutation]'
    python tools/mutation.py --sample 120 --seed 0        # draws, runs and reports; stopped, it goes on where it was
    python tools/mutation.py --sample 120 --minutes 30    # stops after the mutant under way at that time
    python tools/mutation.py --count                      # only counts the mutants
    python tools/mutation.py --survivors                  # the diffs of what no test noticed

cosmic-ray makes the mutants. All of them would take days, because a mutant in a compiled loop costs a compilation and
a mutant that nobody notices costs the whole run. So a sample is drawn by seed, half of it from each of two strata:
``plain`` modules, which are quick, and ``loops``, whose change has loops compiled anew. The order of the sample is
random, so a run that was stopped early is still a sample; the score weighs the strata by their size.

Mutants that cannot change what the code does are left out, by rule (``IDLE_OPERATORS``, ``idle_spans``) and before the
sample is drawn. Everything happens in a copy of the working tree below ``build/``; no file of this one is changed.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutation"
TREE, CACHE, SESSION = WORK / "tree", WORK / "cache", WORK / "session.sqlite"
PASSED = WORK / "passed"
"""Written when the tests have passed without a mutant: lists the machine code to keep."""

PACKAGES = ("kvtier/coordinator", "kvtier/gpu_pool")
CONSTANTS = {"pool_state"}
"""Modules that have no compiled loops, but what goes into many."""

FIRST = ("scheduler", "match", "step", "block_pool", "lifecycle", "stores", "connector", "anchors", "verify", "waiting")
"""Files of tests/core that find most for their time; after them everything else, the slow and unrelated last."""
LAST = ("core/test_fuzz", "core/test_cache", "core/test_engines", "core/test_warmup", "field/test_matrix")
PLACES = ("tests/core", "tests/regressions", "tests/model/test_streams.py", "tests/field")
TEST_TIMEOUT_S, RUN_TIMEOUT_S = 120, 900

IDLE_OPERATORS = re.compile(
    r"core/ReplaceComparisonOperator_(Is_Eq|IsNot_NotEq)$"  # on None, enums and objects without __eq__: the same
)
IDLE_DECORATORS = {"jit", "inlined"}  # without them the same loop runs, only slower
IDLE_FUNCTIONS = {"__repr__", "touch_slots", "_read_ahead"}  # texts for people; reading ahead, which changes nothing


# --- mutants --------------------------------------------------------------------------------------


def idle_spans(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Parts of a source in which no change can matter: (line, column) of begin and end.

    Annotations (nobody evaluates them), bodies of ``if TYPE_CHECKING``, f-strings and arguments of AssertionError
    (texts for people), ``IDLE_FUNCTIONS``, and the decorators that compile.
    """
    for node in ast.walk(ast.parse(source)):
        parts: list[Any] = []
        match node:
            case ast.arg(annotation=annotation) if annotation is not None:
                parts = [annotation]
            case ast.AnnAssign(annotation=annotation):
                parts = [annotation]
            case ast.FunctionDef(name=name) if name in IDLE_FUNCTIONS:
                parts = [node]
            case ast.FunctionDef(returns=returns, decorator_list=decorators):
                parts = [returns] if returns is not None else []
                parts += [d for d in decorators if isinstance(d, ast.Name) and d.id in IDLE_DECORATORS]
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                parts = [node]
            case ast.JoinedStr() | ast.Call(func=ast.Name(id="AssertionError")):
                parts = [node]
        for part in parts:
            yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def is_idle(spec: MutationSpec, spans: list[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
    """Whether the mutant cannot behave differently, by rule."""
    at = spec.start_pos
    if "RemoveDecorator" in spec.operator_name:
        at = (at[0], at[1] + 1)  # past the @
    return bool(IDLE_OPERATORS.match(spec.operator_name)) or any(begin <= at < end for begin, end in spans)


def stratum(spec: MutationSpec) -> str:
    """``loops`` or ``plain``."""
    return "loops" if _has_loops(spec.module_path) else "plain"


@cache
def _has_loops(module: Path) -> bool:
    return module.stem in CONSTANTS or "kvtier._jit" in (ROOT / module).read_text()


def mutants(db: WorkDB) -> tuple[dict[str, list[WorkItem]], Counter[str]]:
    """All mutants by stratum, in a fixed order, and how many idle ones were left out of each."""
    found: dict[str, list[WorkItem]] = {"plain": [], "loops": []}
    idle: Counter[str] = Counter()
    items = sorted(db.work_items, key=lambda i: (str(spec_of(i).module_path), spec_of(i).operator_name, at(i)))
    spans: dict[Path, Any] = {}
    for item in items:
        spec = spec_of(item)
        if spec.module_path not in spans:
            spans[spec.module_path] = list(idle_spans(spec.module_path.read_text(encoding="utf-8")))
        if is_idle(spec, spans[spec.module_path]):
            idle[stratum(spec)] += 1
        else:
            found[stratum(spec)].append(item)
    return found, idle


def spec_of(item: WorkItem) -> MutationSpec:
    """The one change of a mutant."""
    return item.mutations[0]


def at(item: WorkItem) -> int:
    """Which of the operator's places in the module."""
    return int(spec_of(item).occurrence)


def draw(found: dict[str, list[WorkItem]], sample: int, seed: int) -> list[WorkItem]:
    """``sample`` mutants, half from each stratum, in random order; the same for the same code and seed."""
    rng = random.Random(seed)
    drawn = [i for name in sorted(found) for i in rng.sample(found[name], min(len(found[name]), sample // 2))]
    rng.shuffle(drawn)
    return drawn


# --- running --------------------------------------------------------------------------------------


def copy_tree() -> None:
    """The working tree as git sees it, below build/: mutants are written there."""
    shutil.rmtree(TREE, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)


def command(module: str) -> str:
    """The test run for a mutant in ``module``: its own test file first; it ends at the first failure."""

    def rank(path: str) -> tuple[int, int]:
        name = Path(path).stem.removeprefix("test_")
        own = name in (module, {"pool_loops": "block_pool", "pool_state": "block_pool", "exports": "step"}.get(module))
        late = any(path.endswith(f"{last}.py") for last in LAST)
        return (0 if own else 1 if name in FIRST else 3 if late else 2), FIRST.index(name) if name in FIRST else 0

    files = [p for place in PLACES for p in ([place] if place.endswith(".py") else sorted(tests_in(place)))]
    options = f"-x -q -p no:cacheprovider --timeout {TEST_TIMEOUT_S} --timeout-method thread"
    return shlex.join([sys.executable, "-m", "pytest", *shlex.split(options), *sorted(files, key=rank)])


def tests_in(folder: str) -> list[str]:
    return [path.as_posix() for path in Path(folder).glob("test_*.py")]


def tidy(keep: set[str]) -> None:
    """Removes the machine code of a mutant."""
    for folder in (CACHE / "kvtier").glob("*"):
        if folder.name not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def run(db: WorkDB, drawn: list[WorkItem], minutes: float) -> None:
    """Runs what has no result yet, for at most so long."""
    begin, done = time.monotonic(), {job for job, _ in db.results}
    if not PASSED.exists():
        outcome, output = run_tests(command(""), RUN_TIMEOUT_S)
        if outcome is not TestOutcome.SURVIVED:
            raise SystemExit(f"the tests fail without a mutant:\n{output}")
        print(f"without a mutant all tests pass, in {time.monotonic() - begin:.0f} s", flush=True)
        PASSED.write_text("\n".join(folder.name for folder in (CACHE / "kvtier").glob("*")), encoding="utf-8")
    keep = set(PASSED.read_text(encoding="utf-8").split())
    for k, item in enumerate(drawn, 1):
        if item.job_id in done:
            continue
        if time.monotonic() - begin > 60 * minutes:
            break
        since, spec = time.monotonic(), spec_of(item)
        result = mutate_and_test(item.mutations, command(spec.module_path.stem), RUN_TIMEOUT_S)
        db.set_result(item.job_id, result)
        tidy(keep)
        line = f"{k}/{len(drawn)} {verdict(result)} in {time.monotonic() - since:.0f} s: {label(spec)}"
        print(line, flush=True)


def label(spec: MutationSpec) -> str:
    """Where a mutant is, and which operator made it."""
    return f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name.removeprefix('core/')} #{spec.occurrence}"


# --- report ---------------------------------------------------------------------------------------

VERDICTS = ("killed", "broke", "timeout", "survived")


def verdict(result: WorkResult) -> str:
    """One of ``VERDICTS``.

    killed: a test failed; broke: the module did not import or compile, or the interpreter crashed (a compiled loop
    wrote past its arrays); timeout: a test ran too long; survived: nobody noticed.
    """
    text = result.output or ""
    if result.worker_outcome is not WorkerOutcome.NORMAL:
        raise SystemExit(f"a mutant could not be run:\n{text}")
    if result.test_outcome is TestOutcome.SURVIVED:
        return "survived"
    if text == "timeout" or re.search(r"^\++ Timeout \++$", text, re.MULTILINE):
        return "timeout"
    failed = re.search(r"^FAILED |^ERROR tests/\S+::", text, re.MULTILINE)  # neither: the run ended before a report
    return "killed" if failed and "numba.core.errors" not in text else "broke"


def report(db: WorkDB, found: dict[str, list[WorkItem]], idle: Counter[str], drawn: list[WorkItem]) -> None:
    """The table, and the score with its standard error.

    Score: of all mutants, those that a test run notices, in whatever way. Strata are weighted by their size; the
    error is that of a stratified sample without replacement.
    """
    results = dict(db.results)
    total, score, variance = sum(map(len, found.values())), 0.0, 0.0
    print(f"\n{'':8}{'mutants':>9}{'idle':>7}{'run':>6}" + "".join(f"{v:>14}" for v in VERDICTS) + f"{'score':>9}")
    by_module: dict[str, Counter[str]] = {}
    for name in sorted(found):
        items = [i for i in drawn if stratum(spec_of(i)) == name and i.job_id in results]
        seen = Counter(verdict(results[i.job_id]) for i in items)
        for i in items:
            by_module.setdefault(str(spec_of(i).module_path), Counter())[verdict(results[i.job_id])] += 1
        n, size = len(items), len(found[name])
        share = 1 - seen["survived"] / n if n else math.nan
        score += size / total * share
        # (k + 1) / (n + 2) within the error only: a stratum without survivors is not known exactly
        p = (n - seen["survived"] + 1) / (n + 2)
        variance += (size / total) ** 2 * p * (1 - p) / max(1, n) * (1 - n / size)
        line = f"{name:8}{size:9}{idle[name]:7}{n:6}" + "".join(f"{seen[v]:14}" for v in VERDICTS)
        print(f"{line}{100 * share:8.1f}%")
    print(f"\nscore, weighted by size: {100 * score:.1f} % +- {100 * math.sqrt(variance):.1f} (one standard error)\n")
    for module, seen in sorted(by_module.items()):
        print(f"{module:36}" + ", ".join(f"{seen[v]} {v}" for v in VERDICTS if seen[v]))
    print("\nsurvived:")
    for item in drawn:
        if item.job_id in results and verdict(results[item.job_id]) == "survived":
            print(f"  {label(spec_of(item))}")


def survivors(db: WorkDB, drawn: list[WorkItem]) -> None:
    """Prints what each survivor changes."""
    results = dict(db.results)
    for item in drawn:
        if item.job_id in results and verdict(results[item.job_id]) == "survived":
            lines = (results[item.job_id].diff or "").splitlines()
            changes = [line for line in lines if line[:1] in "+-@" and line[:3] not in ("+++", "---")]
            print("\n".join([label(spec_of(item)), *changes, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=120, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long")
    parser.add_argument("--count", action="store_true", help="only count")
    parser.add_argument("--survivors", action="store_true", help="only show what survived so far")
    parser.add_argument("--again", action="store_true", help="forget earlier results, take the code as it is now")
    options = parser.parse_args()
    fresh = options.again or not SESSION.exists()
    if fresh:
        SESSION.unlink(missing_ok=True)
        PASSED.unlink(missing_ok=True)
        WORK.mkdir(parents=True, exist_ok=True)
        copy_tree()
    os.chdir(TREE)
    os.environ |= {"XDG_CACHE_HOME": str(CACHE), "KVTIER_TESTS": "all"}
    with use_db(SESSION) as db:
        if fresh:
            init([p for package in PACKAGES for p in sorted(Path(package).glob("*.py"))], db, {})
        found, idle = mutants(db)
        drawn = draw(found, options.sample, options.seed)
        if options.survivors:
            survivors(db, drawn)
            return
        if not options.count:
            run(db, drawn, options.minutes)
        report(db, found, idle, drawn)


if __name__ == "__main__":
    main()
