"""The first request must not wait for a compiler, nor a start for one that has run before."""

from __future__ import annotations

import ast
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from patience import PATIENCE_S

import kvtier
from kvtier.cache import warmup
from kvtier.cache.warmup import COMPILING, UNKEPT, WAITING, warm_up
from kvtier.machine.loops import machine_code
from kvtier.machine.loops.jit import inlined, jit
from kvtier.machine.loops.machine_code import Keeper, lock

WARM_START = """
import sys; sys.path.insert(0, sys.argv[1])
import kvtier
from numba.core import event
class Count(event.Listener):
    starts = 0
    def on_start(self, _): self.starts += 1
    def on_end(self, _): pass
count = Count()
event.register("numba:compile", count)
spec = kvtier.CacheSpec([kvtier.GroupSpec("full", kvtier.FullAttention(), 1, 1, 4)])
with kvtier.KVCache(spec, device="meta", device_bytes="1MiB") as cache:
    assert cache.warmup_s > 0
print(count.starts, "torch" in sys.modules)
from core.loops import loops
print([name for name, loop in loops() if len(loop.signatures) != 1])
print(len(loops()) - kvtier.warm_up().loops)
"""


def test_a_warm_start_compiles_nothing_says_nothing_imports_no_torch_and_reaches_every_loop() -> None:
    warm_up()
    root = __file__.rsplit("/core/", 1)[0]
    run = subprocess.run([sys.executable, "-c", WARM_START, root], capture_output=True, text=True, check=True)
    assert (run.stdout.split("\n")[:3], run.stderr) == (["0 False", "[]", "0"], "")


def test_it_says_what_came_of_it_once_and_for_all() -> None:
    report = kvtier.warm_up()
    assert report is warm_up() and report.seconds > 0 and report.loops == len(machine_code.keepers())
    assert report.to_dict()["kept"] is report.kept


# --- where machine code is kept -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KVTIER_CACHE_DIR": "/k", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/k"),
        ({"KVTIER_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/kvtier"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/kvtier"),
        ({"HOME": "/h"}, "/h/.cache/kvtier"),
        ({"HOME": ""}, "there is no home directory"),
        ({}, "there is no home directory"),
        ({"KVTIER_CACHE_DIR": "k", "HOME": "/h"}, "KVTIER_CACHE_DIR=k is not an absolute path"),
    ],
)
def test_the_folder(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    def home() -> Path:
        if not environment.get("HOME"):
            raise RuntimeError("Could not determine home directory.")
        return Path(environment["HOME"])

    for name in ("KVTIER_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Path, "home", home)
    path, why = machine_code.folder.__wrapped__()
    assert (why or str(path)) == expected


@pytest.fixture
def kept_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Machine code of loops that the test makes goes here, and they are no loops of kvtier."""
    monkeypatch.setattr(machine_code, "folder", lambda: (tmp_path, ""))
    monkeypatch.setattr(machine_code, "_keepers", [])
    return tmp_path


def doubled() -> Any:
    """A new loop, each time of the same code."""

    def double(out: Any, x: Any) -> Any:
        out[0] = 2 * x
        return out[0]

    return jit(double)


def run(loop: Any) -> Keeper:
    assert loop(np.zeros(1, np.int64), 21) == 42
    return machine_code._keepers[-1]


def test_code_is_used_by_another_process_and_where_nothing_can_be_written(
    kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(doubled()).compiled == 1
    os.utime(__file__)  # sources are told apart by what they say, not by their times
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    keeper = run(doubled())
    assert (keeper.compiled, keeper.problem, keeper.is_kept()) == (0, "", True)


def test_code_that_cannot_be_kept_runs_and_says_why(kept_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", refuse)
    keeper = run(doubled())
    assert keeper.compiled == 1 and not keeper.is_kept()
    assert keeper.problem.endswith("cannot be written (Read-only file system)")
    assert not [path for path in kept_in.rglob("*") if path.is_file()]


def test_a_file_that_was_cut_short_is_made_anew(kept_in: Path) -> None:
    run(doubled())
    (file,) = kept_in.glob("*/*")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert not machine_code._keepers[-1].is_kept(), "a start that compiles it would say nothing"
    assert run(doubled()).compiled == 1
    assert run(doubled()).compiled == 0


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(30, "Read-only file system")


def test_the_bounds_check_and_the_cpu_have_code_of_their_own(kept_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(doubled())
    monkeypatch.setattr(numba.core.config, "BOUNDSCHECK", not numba.core.config.BOUNDSCHECK)
    machine_code._folder_of.cache_clear()
    assert run(doubled()).compiled == 1
    machine_code._folder_of.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(machine_code, "_keepers", [])
    monkeypatch.setattr(machine_code, "folder", lambda: (kept_in, ""))
    monkeypatch.setattr(machine_code, "_cpu", lambda _: "another")
    assert run(doubled()).compiled == 1


def test_what_nobody_has_used_for_long_is_removed_and_nothing_else(kept_in: Path) -> None:
    run(doubled())
    machine_code._keepers[-1].module = "kvtier.made_here"
    (used,) = kept_in.iterdir()
    old, foreign = kept_in / ("0" * 20), kept_in / "notes"
    for path in (old, foreign):
        path.mkdir()
    for path in (used, old, foreign):
        os.utime(path, (1, 1))
    machine_code.clear_up(kept_in)
    assert {*kept_in.iterdir()} == {used, foreign}


# --- one compiles, others wait --------------------------------------------------------------------


def test_a_second_process_waits_until_the_first_lets_go(tmp_path: Path) -> None:
    first, waited = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT), []
    fcntl.flock(first, fcntl.LOCK_EX)

    def wait() -> None:
        waited.append(True)
        os.close(first)

    with lock(tmp_path, wait):
        pass
    with lock(tmp_path, wait):
        pass
    assert waited == [True]


def test_a_process_that_was_killed_keeps_nobody_waiting(tmp_path: Path) -> None:
    code = f"import fcntl, time; f = open({str(tmp_path / 'lock')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1)"
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", f"{code}; import sys; sys.stdout.flush(); time.sleep(999)"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"1\n"
        with lock(tmp_path, lambda: holder.send_signal(signal.SIGKILL)):
            assert holder.wait() == -signal.SIGKILL


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "WAIT_S", 0.1)
    with lock(tmp_path, lambda: None), lock(tmp_path, lambda: None):
        pass
    with lock(tmp_path / "missing", lambda: None):
        pass


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process whose first cache is still to come."""
    monkeypatch.setattr(warmup, "_done", None)


def test_a_second_thread_waits_for_the_warm_up_of_the_first(monkeypatch: pytest.MonkeyPatch, starting: None) -> None:
    begun, goes_on, found = threading.Event(), threading.Event(), []

    def run() -> None:
        found.append(warm_up().seconds)  # a toy cache
        begun.set()
        assert goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(warmup, "_run", run)
    threads = [threading.Thread(target=lambda: found.append(warm_up())) for _ in range(2)]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    threads[1].start()
    threads[1].join(0.1)
    assert found == [0.0] and threads[1].is_alive()
    goes_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 3 and found[1] is found[2]


# --- what is said ---------------------------------------------------------------------------------


def compile_one() -> None:
    """As a loop does that is not kept."""
    assert Keeper.before_compiling is not None
    Keeper.before_compiling()
    assert Keeper.before_compiling is None


@pytest.mark.parametrize(
    ("missing", "written", "expected"),
    [
        (True, True, [COMPILING % (50, "{root}")]),
        (False, True, []),
        (True, False, [UNKEPT % (50, "{root} cannot be written (Not a directory)", "KVTIER_CACHE_DIR")]),
    ],
)
def test_the_notice_says_what_is_done_and_where_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    starting: None,
    missing: bool,
    written: bool,
    expected: list[str],
) -> None:
    root = tmp_path / "file" / "folder"
    if not written:
        root.parent.touch()
    monkeypatch.setattr(warmup, "folder", lambda: (root, ""))
    monkeypatch.setattr(warmup, "_run", compile_one)
    monkeypatch.setattr(Keeper, "is_kept", lambda self: not missing)
    monkeypatch.setattr(warmup, "keepers", lambda: machine_code.keepers()[:1] * 50)
    with caplog.at_level(logging.WARNING, "kvtier.cache.warmup"):
        warm_up()
    assert caplog.messages == [text.format(root=root) for text in expected]


def test_who_waits_says_so_and_compiles_nothing_that_is_there_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, starting: None
) -> None:
    first = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(first, fcntl.LOCK_EX)
    monkeypatch.setattr(warmup, "folder", lambda: (tmp_path, ""))
    monkeypatch.setattr(warmup, "_run", compile_one)
    monkeypatch.setattr(Keeper, "is_kept", lambda self: True)
    monkeypatch.setattr("time.sleep", lambda _: os.close(first))
    warm_up()
    assert caplog.messages == [WAITING % tmp_path]


def test_a_warm_up_that_fails_is_done_again(monkeypatch: pytest.MonkeyPatch, starting: None) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "_run", fail)
    with pytest.raises(KeyboardInterrupt):
        warm_up()
    monkeypatch.setattr(warmup, "_run", lambda: None)
    assert warm_up().seconds > 0 and Keeper.before_compiling is None


# --- functions that are compiled as parts of loops ------------------------------------------------


def test_parts_are_compiled_once_for_constants_and_widths_and_never_for_python(kept_in: Path) -> None:
    @inlined
    def add(out: Any, x: Any, y: Any) -> Any:
        out[0] += x
        return out[0] + y

    @jit
    def loop(out: Any, small: Any, wide: Any) -> Any:
        return add(out, small[0], 1) + add(out, wide[0], 2) + add(out, 3, wide[0])

    part: Any = add
    out = np.zeros(1, np.int64)
    assert loop(out, np.array([5], np.int32), np.array([2**40])) == 6 + (2**40 + 7) + (2**41 + 8)
    assert len(part.signatures) == 1
    assert part(out, 1, 2) == 2**40 + 11  # Python's own


def test_the_imports_that_a_loop_is_kept_by_are_those_that_python_sees() -> None:
    root = machine_code.PACKAGE
    files, imports = machine_code._imports(root)
    for name, path in files.items():
        seen = set[str]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvtier":
                module = (node.module or "").removeprefix("kvtier").lstrip(".")
                seen |= {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
        assert imports[name] == seen & files.keys(), name
