"""Fills the virtual environment of the Makefile's commands: a line per stage here, pip's words in VENV/set-up.log.

    set_up.py VENV torch 2.13.0              makes VENV, and installs the torch that fits this machine
    set_up.py VENV install TITLE ARG...      pip install ARG...
    set_up.py VENV extra TITLE NAME          what an extra of pyproject.toml names, without kvtier and its requirements

What is installed stays, so a set-up that was interrupted goes on when it is called again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

TAIL_LINES = 12
"""So much of the log is shown if a stage fails."""

ADVICE = {
    "A package index was not reached. Set-up needs a network, or pip's settings for an index or a folder of wheels "
    "that it can reach (PIP_INDEX_URL, PIP_FIND_LINKS).": (
        "NewConnectionError",
        "NameResolutionError",
        "ConnectTimeoutError",
        "ProxyError",
        "Max retries exceeded",
    ),
    "This Python cannot make virtual environments. Install its venv (Debian, Ubuntu: apt install python3-venv), or "
    "name another Python: make PYTHON=...": ("ensurepip", "No module named venv"),
}
"""What to do, by words that tell the reason in the log."""


class Failed(Exception):
    """A stage failed; the message is what to show."""


class Venv:
    """A virtual environment, and the log of what was done to it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.python = str(self.folder / "bin" / "python")
        self.log = self.folder / "set-up.log"
        self.folder.mkdir(parents=True, exist_ok=True)

    options = ("--disable-pip-version-check", "--no-input", "--progress-bar=off")
    """Of pip's commands."""

    def pip(self, *arguments: str) -> list[str]:
        """A command: ``pip install`` of these."""
        return [self.python, "-m", "pip", "install", *self.options, *arguments]

    def has(self, package: str) -> bool:
        """Whether a package is installed. Its metadata come last: half a package is not installed."""
        code = f"import importlib.metadata as m; m.version({package!r})"
        if not Path(self.python).exists():
            return False
        return subprocess.run([self.python, "-c", code], capture_output=True, check=False).returncode == 0

    def stage(self, title: str, *ways: list[list[str]], if_none: str = "failed") -> None:
        """Goes the first of some ways that works; each is a list of commands. ``Failed`` if none does.

        Prints one line: the title, and the seconds that it took, or ``if_none``.
        """
        print(f"{self.folder}: {title} ... ", end="", flush=True)
        begin = time.monotonic()
        with self.log.open("a+", encoding="utf-8", errors="replace") as log:
            start = log.seek(0, 2)

            def succeeds(command: list[str]) -> bool:
                print("+", *command, file=log, flush=True)
                done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
                return done.returncode == 0

            if any(all(succeeds(command) for command in way) for way in ways):
                print(f"{time.monotonic() - begin:.0f} s")
                return
            print(if_none, flush=True)
            log.seek(start)
            said = log.read()
        advice = [text for text, words in ADVICE.items() if any(word in said for word in words)]
        raise Failed("\n".join([*said.splitlines()[-TAIL_LINES:], f"All of it: {self.log}", *advice]))


def has_driver() -> bool:
    """Whether there is an NVIDIA driver."""
    return bool(shutil.which("nvidia-smi")) or Path("/proc/driver/nvidia/version").exists()


def make_venv(venv: Venv) -> None:
    """Makes the environment, unless it is there."""
    if not venv.has("pip"):
        make = [sys.executable, "-m", "venv", str(venv.folder)]
        venv.stage(f"a virtual environment, Python {sys.version.split()[0]}", [make])


def install_extra(venv: Venv, title: str, name: str) -> None:
    """What an extra names. It names no other extra."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    make_venv(venv)
    venv.stage(title, [venv.pip(*project["optional-dependencies"][name])])


def install_torch(venv: Venv, version: str, on_cpu: bool = False) -> None:
    """The CUDA build if there is an NVIDIA driver (unless ``on_cpu``), else the CPU build: from pip's index if that has
    one, or by uv, which knows where PyTorch keeps its CPU wheels. Without either, what pip takes by itself: it runs on
    a CPU too.
    """
    make_venv(venv)
    if venv.has("torch"):
        return
    title, default = f"torch {version}", venv.pip(f"torch=={version}")
    if sys.platform == "linux" and (on_cpu or not has_driver()):
        uv = [venv.python, "-m", "uv", "pip", "install", "--python", venv.python, "--torch-backend=cpu"]
        of_index = venv.pip("--only-binary=:all:", f"torch=={version}+cpu")
        of_pytorch = [venv.pip("uv"), [*uv, "--no-deps", f"torch=={version}"], default]
        try:
            venv.stage(f"{title}, CPU build", [of_index], of_pytorch, if_none="not at any index that can be reached")
            return
        except Failed:
            title += ", the default build instead, which can be gigabytes larger"
    venv.stage(title, [default])


def main(folder: str, what: str, *arguments: str) -> int:
    """Does one thing to the environment; the exit status."""
    try:
        venv = Venv(folder)
        if what == "torch":
            install_torch(venv, *arguments)
        elif what == "extra":
            install_extra(venv, *arguments)
        else:
            venv.stage(arguments[0], [venv.pip(*arguments[1:])])
    except Failed as reason:
        print(reason, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"The virtual environment cannot be made: {error}. Name another folder: make VENV=...", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
