"""``kvtier doctor``: what is here, what is missing, and whether a small cache works."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier import warm_up
from runner.cli import main
from runner.commands import installation
from runner.commands.installation import Extra

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def kept_loops() -> None:
    """Without them the doctor tries no cache: it would compile for a minute."""
    warm_up()


def report(capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_all_is_well_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    assert found["ok"] and found["problems"] == []
    for name in ("kvtier", "torch", "numba", "numpy"):
        assert found["packages"][name], name
    assert found["packages"]["torch"].startswith(importlib.metadata.version("torch").split("+")[0])
    assert set(found["packages"]) >= {"transformers", "cupy", "flashinfer", "triton", "vllm", "rich"}
    assert {"serve", "events", "remote"} <= found["extras"].keys()
    assert found["loops"]["folder"] and found["loops"]["bytes"] > 0 and found["loops"]["kept"]
    assert found["memory"]["device_bytes"] > 0 and found["memory"]["host_bytes"] > 0
    smoke = found["smoke"]
    assert smoke["ok"] and smoke["hit_tokens"] > 0 and smoke["violations"] == []


def test_people_are_told_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    for part in ("kvtier 0.", "torch", "compiled loops", "by default", "a small cache on the CPU", "All is well."):
        assert part in told, part


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = installation.version_of

    def without(name: str) -> str | None:
        return None if name in ("fastapi", "rich", "transformers") else versions(name)

    monkeypatch.setattr(installation, "version_of", without)
    assert main(["doctor"]) == 0, "an extra that is not there is no fault"
    told = capsys.readouterr().out
    assert "pip install 'kvtier[serve]'" in told and "lacks fastapi" in told
    assert report(capsys)["extras"]["serve"]["missing"] == ["fastapi", "rich", "transformers"]


def test_a_cache_that_finds_nothing_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "serve_twice", lambda: (0, []))
    assert "found nothing" in report(capsys, 1)["problems"][0]
    monkeypatch.setattr(installation, "serve_twice", lambda: 1 / 0)
    assert "ZeroDivisionError" in report(capsys, 1)["problems"][0]


def test_a_cupy_of_another_cuda_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvtier.machine.device.resolve_device", lambda _: "cuda:0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(installation, "cupy_problem", lambda: "torch was built for CUDA 13.0, but CuPy for CUDA 12")
    assert report(capsys, 1)["problems"] == ["torch was built for CUDA 13.0, but CuPy for CUDA 12"]


@pytest.mark.parametrize("absent", [["rich", "transformers", "fastapi", "huggingface_hub"], ["torch"]], ids="-".join)
def test_it_runs_without_what_it_looks_for(absent: list[str]) -> None:
    code = f"""if True:
        import sys
        for name in {absent!r}:
            sys.modules[name] = None
        from runner.cli import main
        sys.exit(main(["doctor"]))
    """
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ
    )
    assert ran.returncode == int("torch" in absent) and "Traceback" not in ran.stderr, ran.stderr
    assert all(f"{name} " in ran.stdout for name in ("kvtier", "numba", "vllm"))
    if "torch" in absent:
        assert "torch cannot be imported" in ran.stdout
    else:
        assert "pip install 'kvtier[engine]'" in ran.stdout and "rich" in ran.stdout


def test_loops_that_are_not_compiled_are_not_compiled_now(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvtier", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"KVTIER_CACHE_DIR": str(tmp_path)},
    )
    found = json.loads(ran.stdout)
    assert ran.returncode == 0 and not found["loops"]["kept"]
    assert "kvtier warmup" in found["smoke"]["skipped"]
    assert not [*tmp_path.rglob("*")]


def test_all_loops_are_looked_for() -> None:
    code = f"""if True:
        import importlib
        from kvtier.machine.loops.machine_code import keepers
        for module in {installation._WITH_LOOPS!r}:
            importlib.import_module("kvtier." + module)
        before = len(keepers())
        from kvtier import warm_up
        print(before, warm_up().loops)
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    before, loops = ran.stdout.split()
    assert before == loops, ran.stderr


REQUIRES = [
    "numpy<3,>=2.0",
    "aiohttp<4,>=3.11; extra == 'bench'",
    "kvtier[gpu-cuda12]; extra == 'gpu'",
    'cupy-cuda12x>=14; extra == "gpu-cuda12"',
    "uvicorn[standard]>=0.34; extra == 'serve'",
]


def test_extras_are_read_from_what_the_package_says_of_itself() -> None:
    assert installation.extras_of(REQUIRES) == (
        ["numpy"],
        {"bench": ["aiohttp"], "gpu": ["cupy-cuda12x"], "gpu-cuda12": ["cupy-cuda12x"], "serve": ["uvicorn"]},
    )
    assert Extra(["a"], ["a"]).missing == ["a"]
