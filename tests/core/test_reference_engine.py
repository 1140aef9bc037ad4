"""The reference engine is found whatever else is called ``runner``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
import runner
from kvtier.machine import reference_engine

HERE = str(Path(kvtier.__file__).parents[1])


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with somebody else's ``runner.py``."""
    (tmp_path / "runner.py").write_text("raise SystemExit('the wrong runner')\n")
    return tmp_path


def python(*arguments: str, cwd: Path, path: str = HERE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )


def test_its_names_are_those_of_the_package() -> None:
    assert [name for name in runner.__all__ if getattr(kvtier, name) is not getattr(runner, name)] == []
    assert kvtier.needle is runner.needle
    assert {*runner.__all__, "needle"} <= {*dir(kvtier)}


def test_a_module_of_its_name_beside_a_script_does_not_matter(beside: Path) -> None:
    (beside / "script.py").write_text(
        "from kvtier import SamplingParams\nprint(SamplingParams.__module__, SamplingParams(n=2).n)\n"
    )
    done = python("script.py", cwd=beside)
    assert (done.stdout, done.stderr) == ("runner.sampling.params 2\n", "")


def test_nor_if_it_comes_first_on_the_path_of_the_command(beside: Path) -> None:
    done = python("-m", "kvtier", "--version", cwd=beside, path=os.pathsep.join([".", HERE]))
    assert done.stdout.startswith("kvtier "), done.stderr


def test_its_modules_run_in_new_processes(beside: Path) -> None:
    done = python(*reference_engine.as_main("runner.cli", "--help"), cwd=beside)
    assert done.stdout.startswith("usage: kvtier"), done.stderr


def test_another_module_of_its_name_in_the_process_is_named(beside: Path) -> None:
    (beside / "runner.py").write_text("MINE = True\n")
    (beside / "script.py").write_text(
        "import runner, kvtier\n"
        "try:\n    kvtier.LLM\nexcept ImportError as problem:\n    print(problem)\n"
        "print(runner.MINE, kvtier.KVCache.__name__)\n"
    )
    done = python("script.py", cwd=beside)
    assert f"another module called runner ({beside / 'runner.py'})" in done.stdout, done.stderr
    assert done.stdout.endswith("True KVCache\n")


def test_an_installation_without_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reference_engine, "PLACE", tmp_path / "runner" / "__init__.py")
    monkeypatch.delitem(sys.modules, "runner")
    with pytest.raises(ImportError, match="reference engine is not installed"):
        reference_engine.load()


def test_importing_the_library_imports_no_engine() -> None:
    done = python("-c", "import sys, kvtier; kvtier.KVCache; print('runner' in sys.modules)", cwd=Path(HERE))
    assert done.stdout == "False\n", done.stderr
