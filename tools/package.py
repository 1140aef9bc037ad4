"""Builds kvtier's sdist and wheel into a folder, and looks at them as an index would.

``package.py FOLDER``, in a venv with what the extra "release" names.
Prints a line a step, and all that a step said if it fails. If kvtier is installed in the venv, what it needs must be
there and fit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent


def step(title: str, *arguments: str) -> str:
    """Runs a module of the environment, and returns what it said; exits if it fails."""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{title}: failed\n{done.stdout}{done.stderr}")
    print(f"{title}: {time.monotonic() - begin:.1f} s", flush=True)
    return done.stdout


def unmet() -> list[str]:
    """What pip finds missing or unfit for kvtier. Other packages may be installed without all of their needs."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line.startswith("kvtier ")]


def main(folder: str) -> int:
    """Builds into ``folder``, emptied before; the exit status."""
    made = Path(folder).resolve()
    shutil.rmtree(made, ignore_errors=True)
    step("sdist, and the wheel from it", "build", "--no-isolation", "--outdir", str(made), str(ROOT))
    files = sorted(map(str, made.iterdir()))
    step("twine check", "twine", "check", "--strict", *files)
    wheels = [file for file in files if file.endswith(".whl")]
    # W009: runner is a package beside kvtier, by choice (docs/adr/0035).
    step("check-wheel-contents", "check_wheel_contents", "--ignore", "W009", *wheels)
    try:
        version("kvtier")
    except PackageNotFoundError:
        print("pip check: kvtier is not installed here")
    else:
        if problems := unmet():
            sys.exit("\n".join(["pip check: failed", *problems]))
        print("pip check: kvtier has what it needs")
    print(*files, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
