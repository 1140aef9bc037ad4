"""The benchmark for GPUs: what it says without one, and its code on a played driver with everything small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from breadth import breadth, sample
from patience import FOREVER_S
from rich.console import Console

from benchmarks import machine
from benchmarks.gpu import __main__ as command, device_tests, link, reload, sections
from benchmarks.gpu.figures import Budget, Figure, Section
from benchmarks.gpu.rig import layout
from core.fake_cuda import FakeCuda, FakeSums
from kvtier import FullAttention, SlidingWindow
from kvtier.cpu_offload.engines.cuda import link as cuda_link
from kvtier.geometry.spec import GroupSpec


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: run it on a machine without one")
def test_without_a_gpu_it_says_so_and_ends_with_status_2(capsys, tmp_path):
    assert command.main(["--json", str(tmp_path / "gpu.json")]) == 2
    assert "no GPU here: DeviceUnavailable: device 'cuda:0' is not there" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()


@pytest.fixture
def played(monkeypatch):
    """A played GPU, and models of small blocks."""
    cuda = FakeCuda()
    small = {name: GroupSpec(g.name, g.attention, 1, 1, 8, block_tokens=16) for name, g in link.GROUPS.items()}
    monkeypatch.setattr(reload, "GROUPS", small)
    monkeypatch.setattr(link, "GROUPS", small)
    setup = link.Setup(
        cuda,
        "cpu",
        lambda: FakeSums(cuda),
        raw_bytes=1 << 16,
        tokens=16 * 50,
        repeats=2,
        on_device=lambda arena: cuda.device_ranges.append((arena.address, arena.num_bytes)),
    )
    monkeypatch.setattr(link, "on_gpu", lambda: setup)
    monkeypatch.setattr(reload, "on_gpu", lambda: setup)
    monkeypatch.setattr(cuda_link, "MEASURED", 0)
    yield cuda
    assert cuda.problems == []
    assert cuda.registered == {}
    assert cuda.streams == {}


def test_the_whole_run_on_a_played_gpu(played, monkeypatch, tmp_path, capsys):
    """Every section that needs no real GPU runs, one that breaks is reported, and the table comes last."""

    def broken(budget):
        yield Figure("broken", "begun", 1.0, "")
        raise RuntimeError("the link is cut")

    parts = [
        Section("link", link.run, 0.0),
        Section("reload", reload.run, 0.0),
        Section("broken", broken, 0.0),
        Section("late", broken, 1e9),
    ]
    monkeypatch.setattr(command, "SECTIONS", parts)
    monkeypatch.setattr(command, "why_not", lambda: "")
    monkeypatch.setattr(command, "gpu", lambda: {"name": "played"})
    monkeypatch.setattr(command.kernels, "run", lambda _: iter([Figure("kernels", "there already", 3, "kernels")]))
    out = tmp_path / "gpu.json"
    assert command.main(["--json", str(out)]) == 1
    result = json.loads(out.read_text())
    assert result["whole"] is True
    assert {"commit", "cpu", "versions"} <= set(result["machine"])
    assert result["gpu"] == {"name": "played"}
    assert result["sections"] == ["link", "reload", "broken", "late"]
    names = [f["name"] for f in result["figures"]]
    assert names[0] == "there already"
    for model in ("gpt-oss-20b", "Gemma-3-12B", "Llama-4 Scout", "Llama-3.1-8B"):
        for words in link.LAYOUTS:
            assert f"{model} load, {words}" in names
            assert f"{model} store, {words}" in names
        assert f"{model} duplex" in names
    for group in ("gpt-oss-20b window", "Gemma-3-12B window", "Llama-4 Scout chunk"):
        for words in link.LAYOUTS:
            assert f"{group} load, {words}" in names
            assert f"{group} store, {words}" in names
    for model in reload.MODELS:
        assert f"{model}, 800 tokens until they can be used" in names
    assert "broke" in names
    assert "not run: no time is left" in names
    assert "raw duplex, sum" in names
    assert "% of raw" in capsys.readouterr().out


def test_windows_are_measured_in_blocks_of_their_own_size_in_the_memory_that_is_pinned(played, monkeypatch):
    full, window = GroupSpec("full", FullAttention(), 1, 2, 64), GroupSpec("w", SlidingWindow(8), 5, 2, 64)
    monkeypatch.setattr(link, "GROUPS", {"gpt-oss-20b": full, "gpt-oss-20b window": window})
    notes = {f.name: f.note for f in link.run(Budget(1e3))}
    assert notes["gpt-oss-20b load, contiguous"].endswith(" 1 copies, blocks of 8 KiB")
    assert notes["gpt-oss-20b window load, contiguous"].endswith(" 1 copies, blocks of 40 KiB")
    assert notes["gpt-oss-20b window load, fully scattered"].endswith(" 9 copies, blocks of 40 KiB")
    assert 10 * window.block_bytes <= 51 * full.block_bytes < 11 * window.block_bytes


LOOPS = "compiled loops are there after"


def test_what_was_measured_is_kept_whatever_ends_the_run(monkeypatch, tmp_path, capsys):
    """A device that is lost answers nothing any more, and a run may be interrupted or killed."""
    out, seen, lost = tmp_path / "gpu.json", [], []

    def gpu():
        assert not lost, "CUDA error: an illegal memory access was encountered"
        return {"name": "played"}

    def first(budget):
        yield Figure("first", "measured", 1.0, "")
        lost.append(True)

    def second(budget):
        seen.append(json.loads(out.read_text()))
        yield Figure("second", "begun", 2.0, "")
        seen.append(json.loads(out.read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "SECTIONS", [Section("first", first, 0.0), Section("second", second, 0.0)])
    monkeypatch.setattr(command, "why_not", lambda: "")
    monkeypatch.setattr(command, "gpu", gpu)
    monkeypatch.setattr(command.kernels, "run", lambda _: (1 // n for n in [0]))
    with pytest.raises(KeyboardInterrupt):
        command.main(["--json", str(out)])
    seen.append(json.loads(out.read_text()))
    for result, names in zip(seen, (["broke", LOOPS, "measured", "took"], ["begun"], ["begun"]), strict=True):
        assert [f["name"] for f in result["figures"]][-len(names) :] == names
        assert result["gpu"] == {"name": "played"} and result["whole"] is False
    assert "ZeroDivisionError" in seen[0]["figures"][0]["note"]
    assert "begun" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (dvs-builder)",
            "570.86.10",
        ),
        ("NVRM version: something else", None),
        (None, None),
    ],
)
def test_the_drivers_own_version(line, version, tmp_path, monkeypatch):
    told = tmp_path / "version"
    if line is not None:
        told.write_text(line + "\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    monkeypatch.setattr(command, "DRIVER", told)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.driver_version() == version
    asked = tmp_path / "nvidia-smi"
    asked.write_text('#!/bin/sh\n[ "$*" = "--query-gpu=driver_version --format=csv,noheader --id=0" ] && echo 575.1.2')
    asked.chmod(0o755)
    assert command.driver_version() == "575.1.2"


@pytest.mark.parametrize(("contiguous", "low", "high"), [(1.0, 1, 1), (0.5, 400, 600), (0.0, 990, 1000)])
def test_layouts_are_as_contiguous_as_they_say(contiguous, low, high):
    device, host = layout(1000, contiguous)
    for ids in (device, host):
        assert sorted(ids.tolist()) == list(range(1, 1001))
    runs = 1 + int(((np.diff(device) != 1) | (np.diff(host) != 1)).sum())
    assert low <= runs <= high


PROJECT = """[tool.pytest.ini_options]
addopts = "-q --strict-markers"
markers = ["gpu: needs a CUDA device"]
filterwarnings = ["error"]
"""
PASSES = "@pytest.mark.gpu\ndef test_passes(): pass\n"
FAILS = "@pytest.mark.gpu\ndef test_fails(): assert 'and this' == 'is why'\n"
SKIPS = "@pytest.mark.gpu\ndef test_skips(): pytest.skip('needs 2 GPUs')\n"
BREAKS_LATE = """@pytest.fixture
def late():
    yield
    raise RuntimeError
@pytest.mark.gpu
def test_breaks_late(late): pass
"""
WARNS = "@pytest.mark.gpu\ndef test_warns(): __import__('warnings').warn('{}')\n"
ELSEWHERE = "def test_without_a_device(): assert False\n"
CRASHES = "@pytest.mark.gpu\ndef test_crashes(): __import__('os')._exit(0)\n"
HANGS = "@pytest.mark.gpu\ndef test_hangs(): __import__('time').sleep(600)\n"


@pytest.mark.parametrize(
    ("tests", "passed", "failed", "skipped"),
    [
        ([PASSES, PASSES.replace("passes", "too"), ELSEWHERE], 2, 0, 0),
        ([PASSES, SKIPS], 1, 0, 1),
        ([PASSES, FAILS], 1, 1, 0),
        pytest.param([PASSES, BREAKS_LATE], 1, 1, 0, marks=breadth),
        ([PASSES, "this is no Python"], 0, 1, 0),
        ([PASSES, CRASHES], 0, 1, 0),
        pytest.param([ELSEWHERE], 0, 1, 0, marks=breadth),
        pytest.param([SKIPS], 0, 0, 1, marks=breadth),
        pytest.param([PASSES, WARNS.format("of a driver, say")], 2, 0, 0, marks=breadth),
        ([PASSES, WARNS.format("Triton cannot compile for cuda:0")], 1, 1, 0),
    ],
    ids=["pass", "skip", "fail", "teardown", "syntax", "crash", "none", "only skipped", "warning", "our own warning"],
)
def test_device_tests_are_counted(tests, passed, failed, skipped, tmp_path, capsys, monkeypatch):
    """By a pytest that runs with this project's options, in which no counts are printed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # to load all plugins takes longer than the tests
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text("import pytest\n" + "".join(tests))
    ran = device_tests.device_tests(tmp_path, FOREVER_S, ["tests/test_some.py"])
    assert (ran.passed, ran.failed, len(ran.skipped)) == (passed, failed, skipped)
    found = list(device_tests.figures(ran, 1.0))
    assert [f.value for f in found] == [passed, failed]
    assert all(f.ok for f in found) is (passed > 0 and failed == 0)
    assert ("needs 2 GPUs" in found[0].note) is (skipped > 0)
    shown = capsys.readouterr().err
    assert ("pytest ended with status" in shown) is not (passed > 0 and failed == 0)
    assert ("is why" in shown) is (FAILS in tests)


@breadth
@pytest.mark.parametrize(
    "interrupts", sample([signal.default_int_handler, signal.SIG_IGN], [signal.SIG_IGN]), ids=["heeded", "ignored"]
)
def test_device_tests_that_hang_are_ended(tmp_path, interrupts):
    """Also where this process was started in the background, by a shell that has it ignore interrupts."""
    before = signal.signal(signal.SIGINT, interrupts)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text("import pytest\n" + PASSES + HANGS)
    try:
        for limit_s in (2.5, 10.0, 40.0, 160.0):  # most of which pytest may take to begin on a busy machine
            ran = device_tests.device_tests(tmp_path, limit_s, ["tests"])
            if ran.passed:
                break
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.passed, ran.failed) == (1, 1) and f"ended after {limit_s:.0f} s" in ran.text


@breadth
def test_a_device_test_that_hangs_is_named_and_ended_before_the_others_have_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(device_tests, "TEST_S", 2)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text("import pytest\n" + HANGS)
    ran = device_tests.device_tests(tmp_path, FOREVER_S, ["tests"])
    assert ran.failed == 1 and "in test_hangs" in ran.text


def measured(chosen, budget, console=None):
    figures = []
    command.measure(chosen, budget, figures, console or Console(quiet=True), lambda: None)
    return figures


def test_a_run_keeps_to_its_time():
    chosen = [Section("any", lambda b: iter([Figure("a", "b", 1.0, "")]), 5.0)]
    assert [f.ok for f in measured(chosen, Budget(1.0))] == [False]
    assert [f.name for f in measured(chosen, Budget(100.0))] == ["b", "took"]


def test_sections_that_do_not_exist_are_no_success(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "copying"])
    assert ended.value.code == 2
    assert "no section's name contains 'copying': device tests, link" in capsys.readouterr().err


def test_every_file_with_tests_for_a_gpu_is_run_and_races_come_last():
    tests = device_tests.ROOT / "tests"
    marked = {str(f.relative_to(tests.parent)) for f in tests.rglob("test_*.py") if "pytest.mark.gpu" in f.read_text()}
    marked |= {str(f.relative_to(tests.parent)) for f in tests.glob("gpu/test_*.py")}
    assert set(device_tests.FILES) == marked - {"tests/core/test_gpu_benchmark.py"}
    assert device_tests.FILES[-1] == "tests/gpu/test_order.py"


def test_loops_are_compiled_once_for_the_run_and_for_its_tests():
    """tests/conftest.py has them check bounds, unless it is told otherwise before."""
    code = "import os, sys, benchmarks.gpu; print(os.environ['NUMBA_BOUNDSCHECK'], 'numba' in sys.modules)"
    for given, said in (({}, "0 False"), ({"NUMBA_BOUNDSCHECK": "1"}, "1 False")):
        others = {name: value for name, value in os.environ.items() if name != "NUMBA_BOUNDSCHECK"}
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=device_tests.ROOT, env=others | given, capture_output=True, text=True
        )
        assert ran.stdout.strip() == said


def test_the_commit_of_a_copy_without_git_is_what_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_COMMIT", "0123456789ab")
    assert machine.commit() != "0123456789ab"
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    assert machine.commit() == "0123456789ab"
    monkeypatch.delenv("KVTIER_COMMIT")
    assert machine.commit() == "unknown"


def test_what_the_sections_need_fits_into_8_minutes():
    assert sum(section.needs_s for section in sections.SECTIONS) <= command.MOST_S < 480.0
    assert [section.name for section in sections.SECTIONS][::7] == ["device tests", "main job"]


def test_notes_are_shown_as_they_are(capsys):
    """rich takes brackets for markup: it drops [gpu], and [/tmp] is an error to it."""
    figure = Figure("any", "of [3/9]", 1.0, "", note="pip install 'kvtier[gpu]' [/tmp]")
    chosen = [Section("any", lambda budget: iter([figure]), 0.0)]
    assert [f.name for f in measured(chosen, Budget(9.0), Console(stderr=True))] == ["of [3/9]", "took"]
    Console(width=200).print(command.table([figure]))
    shown = capsys.readouterr().out
    assert "of [3/9]" in shown and "'kvtier[gpu]' [/tmp]" in shown


def test_sections_leave_later_ones_the_time_that_they_need(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.figures.time", SimpleNamespace(monotonic=lambda: 0.0))  # it stands still
    left = []

    def section(name, needs_s):
        return Section(name, lambda budget: iter([left.append(round(budget.left_s))][:0]), needs_s)

    found = measured([section("first", 10.0), section("never", 1e9), section("last", 30.0)], Budget(100.0))
    assert left == [70, 100]
    assert [f.name for f in found] == ["took", "not run: no time is left", "took"]
