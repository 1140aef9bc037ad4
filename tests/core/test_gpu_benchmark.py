"""The benchmark for GPUs: what it says without one, and its code on a played driver with everything small."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import device_tests, link, reload, sections
from benchmarks.gpu.figures import Budget, Figure, Section
from benchmarks.gpu.rig import layout
from core.fake_cuda import FakeCuda, FakeSums
from kvtier.cpu_offload.engines import cuda_link
from kvtier.spec import GroupSpec


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
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
    monkeypatch.setattr(command.kernels, "run", lambda: iter([Figure("kernels", "there already", 3, "kernels")]))
    out = tmp_path / "gpu.json"
    assert command.main(["--json", str(out)]) == 1
    result = json.loads(out.read_text())
    assert {"commit", "cpu", "versions"} <= set(result["machine"])
    assert result["gpu"] == {"name": "played"}
    names = [f["name"] for f in result["figures"]]
    assert names[0] == "there already"
    for model in ("gpt-oss-20b", "Gemma-3-12B", "Llama-4 Scout", "Llama-3.1-8B"):
        for words in link.LAYOUTS:
            assert f"{model} load, {words}" in names
            assert f"{model} store, {words}" in names
        assert f"{model} duplex" in names
    for model in reload.MODELS:
        assert f"{model}, 800 tokens until they can be used" in names
    assert "broke" in names
    assert "not run: no time is left" in names
    assert "raw duplex, sum" in names
    assert "% of raw" in capsys.readouterr().out


@pytest.mark.parametrize(("contiguous", "low", "high"), [(1.0, 1, 1), (0.5, 400, 600), (0.0, 990, 1000)])
def test_layouts_are_as_contiguous_as_they_say(contiguous, low, high):
    device, host = layout(1000, contiguous)
    for ids in (device, host):
        assert sorted(ids.tolist()) == list(range(1, 1001))
    runs = 1 + int(((np.diff(device) != 1) | (np.diff(host) != 1)).sum())
    assert low <= runs <= high


@pytest.mark.parametrize(
    ("text", "passed", "failed"),
    [("41 passed, 3 skipped in 2.1s", 41, 0), ("1 failed, 40 passed", 40, 1), ("2 failed, 3 errors", 0, 5), ("", 0, 0)],
)
def test_device_tests_are_counted(text, passed, failed, capsys):
    found = list(device_tests.figures(text, 1.0))
    assert [f.value for f in found] == [passed, failed]
    assert all(f.ok for f in found) is (passed > 0 and failed == 0)
    assert bool(capsys.readouterr().err) is not (passed > 0 and failed == 0)


def test_a_run_keeps_to_its_time(monkeypatch):
    monkeypatch.setattr(command, "SECTIONS", [Section("any", lambda b: iter([Figure("a", "b", 1.0, "")]), 5.0)])
    assert [f.ok for f in command.measure("", Budget(1.0), Console(quiet=True))] == [False]
    assert [f.name for f in command.measure("", Budget(100.0), Console(quiet=True))] == ["b", "took"]
    assert command.measure("other", Budget(100.0), Console(quiet=True)) == []


def test_what_the_sections_need_fits_into_8_minutes():
    assert sum(section.needs_s for section in sections.SECTIONS) <= command.MOST_S < 480.0
    assert [section.name for section in sections.SECTIONS][::5] == ["device tests", "main job"]


def test_notes_are_shown_as_they_are(monkeypatch, capsys):
    """rich takes brackets for markup: it drops [gpu], and [/tmp] is an error to it."""
    figure = Figure("any", "of [3/9]", 1.0, "", note="pip install 'kvtier[gpu]' [/tmp]")
    monkeypatch.setattr(command, "SECTIONS", [Section("any", lambda budget: iter([figure]), 0.0)])
    assert [f.name for f in command.measure("", Budget(9.0), Console(stderr=True))] == ["of [3/9]", "took"]
    Console(width=200).print(command.table([figure]))
    shown = capsys.readouterr().out
    assert "of [3/9]" in shown and "'kvtier[gpu]' [/tmp]" in shown


def test_sections_leave_later_ones_the_time_that_they_need(monkeypatch):
    left = []

    def section(name, needs_s):
        return Section(name, lambda budget: iter([left.append(round(budget.left_s))][:0]), needs_s)

    monkeypatch.setattr(command, "SECTIONS", [section("first", 10.0), section("never", 1e9), section("last", 30.0)])
    found = command.measure("", Budget(100.0), Console(quiet=True))
    assert left == [70, 100]
    assert [f.name for f in found] == ["took", "not run: no time is left", "took"]
