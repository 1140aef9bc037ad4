"""Plants each mutation in a copy of the repository and runs the tests there: ``python -m tests.planted``.

A mutation is *caught* if a test fails, SURVIVED if none does, *broken* if the mutated copy cannot even be imported or
its tests not be collected, *hung* if a time limit ended it. Only mutations that say so may be caught by hanging.
First the unmutated copy passes the same modules; the exit status is 0 only if every mutation is caught. Tests run as
`make test-all` runs them; with ``--lane quick``, as `make test` does.

With ``--sampled N`` it plants N small changes drawn by ``--seed`` instead (``sampled``). Then all but those that
survive count as noticed.

One folder per job is used again and again: a file's time of modification follows from its content, so that byte code
and machine code of what a mutation does not touch are still good.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from .mutation import Mutation
from .mutations import MUTATIONS
from .sampled import Sampled, draw
from .structure import Code

Planted = Mutation | Sampled

ROOT = Path(__file__).resolve().parents[2]
CORE = ("tests/core", "tests/regressions", "tests/field", "tests/model")
LANES = ("quick", "all")
NO_IMPORT = 90
RUN_LIMIT_S, COMPILE_LIMIT_S = 1200, 120
TEST_LIMIT_S, SLOWER = 60.0, 3.0
"""A test with a mutation may take three times as long as the slowest one without, and this at least."""
BASELINE_LIMIT_S, BASELINE_TEST_LIMIT_S = 7200, 600.0
"""All modules that any mutation names, one after the other, on whatever machine this is."""
WITH_LOOPS = ("gpu_pool", "pools")
"""Packages whose constants go into compiled loops of other modules."""

# ``python -c`` puts the working directory first on sys.path; a copy that is not the one imported would prove nothing.
INSIDE = f"""
import pathlib, sys
try:
    import kvtier, kvtier.testing
    from kvtier import *  # each name imports its module
except Exception as problem:
    print("cannot import kvtier:", repr(problem)); sys.exit({NO_IMPORT})
assert pathlib.Path(kvtier.__file__).resolve().parents[1] == pathlib.Path.cwd().resolve(), kvtier.__file__
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Result:
    """How a run ended: "passed", "failed", "hung", "crashed" or "broken"; which test failed, and what was printed."""

    end: str
    by: str = ""
    output: str = ""

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest test."""
        found = re.search(r"^(\d+\.\d+)s call ", self.output, re.MULTILINE)
        return float(found[1]) if found else 0.0


class Copy:
    """A copy of the repository in a folder of its own."""

    def __init__(self, job: int, lane: str = "all") -> None:
        self._lane = lane
        tag = f"{zlib.crc32(str(ROOT).encode()):08x}"
        self.folder = Path(tempfile.gettempdir()) / f"kvtier-planted-{os.getuid()}-{tag}-{job}"
        self.folder.mkdir(exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"another run is using {self.folder}")
        self.tree = self.folder / "tree"
        self._process: subprocess.Popen[bytes] | None = None
        wanted = {path: (ROOT / path).read_bytes() for path in _repository_files()}
        if self.tree.exists():
            for old in [p for p in self.tree.rglob("*") if p.is_file() and p.suffix != ".pyc"]:
                if old.relative_to(self.tree) not in wanted:
                    old.unlink()
        for path, content in wanted.items():
            self._write(path, content)

    def _write(self, path: Path, content: bytes) -> None:
        file = self.tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        stamp = 1_000_000_000 + zlib.crc32(content) % 100_000_000
        os.utime(file, (stamp, stamp))

    @contextmanager
    def planted(self, mutation: Planted, code: Code) -> Iterator[None]:
        """The copy has the mutation, until it has not."""
        texts = mutation.apply(code)
        try:
            for file, text in texts.items():
                self._write(Path(file), text.encode())
            loops = "kvtier.machine.loops.jit"
            if any(loops in text or Path(file).parent.name in WITH_LOOPS for file, text in texts.items()):
                self.compile()
            yield
        finally:
            for file in texts:
                self._write(Path(file), code.texts[file].encode())

    def test(self, arguments: Sequence[str], test_limit_s: float, limit_s: float = RUN_LIMIT_S) -> Result:
        """Runs pytest in the copy, up to the first test that fails."""
        options = ["-x", "-q", "-rfE", "--tb=line", "--durations=1", "-p", "no:cacheprovider"]
        status, output = self._run(INSIDE, [*options, f"--timeout={test_limit_s}", *arguments], limit_s)
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        by = found[1] if found else ""
        if status is None or re.search(r"Timeout \(?>|\+ Timeout \+", output):
            return Result("hung", by, output)
        if status < 0:
            return Result("crashed", by, output)
        return Result({0: "passed", 1: "failed"}.get(status, "broken"), by, output)

    def compile(self, limit_s: float = COMPILE_LIMIT_S) -> None:
        """Compiles the loops, so that no test's time goes into that. Whether they are sound is for the tests to say."""
        self._run("from kvtier.cache.warmup import warm_up; warm_up()", [], limit_s)

    def _run(self, code: str, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Python in the copy: its exit status, None if the time limit ended it, and what it printed."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVTIER", "PYTEST", "PYTHON"))}
        environment |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "COLUMNS": "500"}  # nothing is cut off
        environment["KVTIER_TESTS"] = self._lane
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                cwd=self.tree,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = None
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                self.stop()
            out.seek(0)
            return status, out.read()

    def stop(self) -> None:
        """Ends the tests that are running here, if any."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _repository_files() -> list[Path]:
    """What a copy consists of: all that git knows or would add, or else the folders that tests need."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        tops = [ROOT / name for name in ("kvtier", "runner", "tests", "docs", "benchmarks")]
        files = [*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *(p for top in tops for p in top.rglob("*"))]
        paths = [p.relative_to(ROOT) for p in files if "__pycache__" not in p.parts]
    return [path for path in paths if (ROOT / path).is_file()]


class Run:
    """All mutations that were asked for, over some jobs."""

    def __init__(self, mutations: Sequence[Planted], code: Code, quick: bool) -> None:
        self._mutations = mutations
        self._code = code
        self._quick = quick
        self._queue: SimpleQueue[Planted] = SimpleQueue()
        for mutation in mutations:
            self._queue.put(mutation)
        self._sound: set[str] = set()  # modules that the unmutated copy has passed
        self._test_limit_s = TEST_LIMIT_S
        self._print = threading.Lock()
        self.verdicts: Counter[str] = Counter()

    def baseline(self, copies: Sequence[Copy]) -> bool:
        """Whether unmutated copies pass every module that a mutation names, each its share; else nothing means
        anything."""
        modules = list(dict.fromkeys(module for mutation in self._mutations for module in mutation.tests))
        begin, results = time.monotonic(), list[Result]()

        def run(copy: Copy, share: Sequence[str]) -> None:
            copy.compile(BASELINE_TEST_LIMIT_S)
            results.append(copy.test(share, BASELINE_TEST_LIMIT_S, BASELINE_LIMIT_S) if share else Result("passed"))

        _all(run, [(copy, modules[i :: len(copies)]) for i, copy in enumerate(copies)])
        bad = [result for result in results if result.end != "passed"]
        end = bad[0].end if bad else "passed"
        print(f"unmutated: {end} ({len(modules)} modules, {time.monotonic() - begin:.0f} s)", flush=True)
        for result in bad:
            print(result.by, result.output[-4000:], sep="\n")
        self._sound |= set(modules)
        self._test_limit_s = max(TEST_LIMIT_S, SLOWER * max(result.slowest_s for result in results))
        return not bad

    def work(self, copy: Copy) -> None:
        """Takes mutations until there are none left."""
        while True:
            try:
                mutation = self._queue.get_nowait()
            except Empty:
                return
            begin = time.monotonic()
            verdict, by = self._judge(copy, mutation)
            with self._print:
                print(f"{verdict:<9} {time.monotonic() - begin:6.1f} s  {mutation.name:<44} {by}", flush=True)
                self.verdicts[verdict] += 1

    def _judge(self, copy: Copy, mutation: Planted) -> tuple[str, str]:
        with copy.planted(mutation, self._code):
            result = copy.test(mutation.tests, self._test_limit_s)
            if result.end == "passed" and not self._quick:
                others = [*CORE, *(f"--ignore={module}" for module in mutation.tests)]
                result = copy.test(others, self._test_limit_s)
        if result.end == "passed":
            return "SURVIVED", mutation.breaks
        if result.end == "hung":
            return ("caught" if mutation.hangs else "hung"), f"{result.by} (time limit)"
        if result.end == "crashed":
            return "broken", "(the interpreter crashes)"
        if result.end == "broken":
            return "broken", result.output.strip().splitlines()[-1][:200] if result.output.strip() else ""
        module = result.by.split("::")[0]
        if module not in self._sound:
            if copy.test([module], self._test_limit_s).end != "passed":
                return "broken", f"{module} fails without the mutation as well"
            self._sound.add(module)
        return "caught", result.by


def _all(work: Callable[..., None], each: Sequence[tuple[Any, ...]]) -> None:
    """Does ``work`` for each of these arguments, all at the same time."""
    threads = [threading.Thread(target=work, args=arguments, daemon=True) for arguments in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested at the same time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutations only")
    parser.add_argument("--quick", action="store_true", help="run only the modules that a mutation names")
    parser.add_argument("--lane", choices=LANES, default="all", help="how much the tests try")
    parser.add_argument("--sampled", type=int, metavar="N", help="N changes drawn by chance, and how many are noticed")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--list", action="store_true", help="name the mutations and run nothing")
    parser.add_argument("--clean", action="store_true", help="remove the copies, and the machine code kept with them")
    options = parser.parse_args()
    unknown = set(options.only or ()) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no mutation {', '.join(sorted(unknown))}; see --list")
    code = Code.below(ROOT)
    chosen: list[Planted] = [mutation for mutation in MUTATIONS if not options.only or mutation.name in options.only]
    if options.sampled:
        chosen = [*draw(code, ROOT, options.sampled, options.seed)]
    for mutation in chosen:
        mutation.apply(code)  # raises where its place is gone
        if options.list:
            print(f"{mutation.name:<44} {mutation.invariants:<14} {mutation.breaks}")
    if options.list:
        return 0
    begin, copies = time.monotonic(), [Copy(job, options.lane) for job in range(max(1, options.jobs))]
    run = Run(chosen, code, options.quick)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not run.baseline(copies):
            return 1
        _all(run.work, [(copy,) for copy in copies])
    except KeyboardInterrupt:
        for copy in copies:
            copy.stop()
        return 1
    good = len(chosen) - run.verdicts["SURVIVED"] if options.sampled else run.verdicts["caught"]
    word = "noticed" if options.sampled else "caught"
    print(f"{good} of {len(chosen)} {word} in {time.monotonic() - begin:.0f} s")
    if options.clean:
        for copy in copies:
            shutil.rmtree(copy.folder)
    return 1 if good < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
