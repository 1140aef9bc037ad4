"""Fills a virtual environment with Mooncake Store; all else comes from the environment of the Makefile's commands.

    install_store.py VENV .venv 0.3.13.post1       over .venv

What is installed stays, so an interrupted set-up goes on when it is called again. pip's words are in VENV/set-up.log.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from set_up import Failed, Venv

PACKAGE = "mooncake-transfer-engine-non-cuda"
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}
"""What the wheel needs of the system, and Debian's package."""


def lie_over(venv: Venv, base: Path) -> None:
    """Makes the packages of ``base`` visible in ``venv``, its path files too. Raises ``Failed``."""
    folders = [str(folder) for folder in base.absolute().glob("lib/python*/site-packages")]
    if not folders:
        raise Failed(f"there is no virtual environment in {base}")
    (site,) = venv.folder.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
    (site / "_base.pth").write_text("\n".join([*lines, ""]), encoding="utf-8")


def install(venv: Venv, base: Path, version: str) -> None:
    """Raises ``Failed``."""
    if sys.platform != "linux":
        raise Failed(f"{PACKAGE} has wheels for Linux; this is {sys.platform}")
    if not venv.has("pip"):
        make = [str(base / "bin" / "python"), "-m", "venv", str(venv.folder)]
        venv.stage("a virtual environment", [make])
    lie_over(venv, base)
    venv.stage(f"Mooncake Store {version}", [venv.pip("--only-binary=:all:", f"{PACKAGE}=={version}")])
    tried = subprocess.run([venv.python, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        said = tried.stderr.strip().splitlines()[-1]
        fix = [f"apt install {package} (Debian, Ubuntu)" for name, package in LIBRARIES.items() if name in said]
        raise Failed("\n".join([said, *fix]))


def main(folder: str, base: str, version: str) -> int:
    """The exit status."""
    try:
        install(Venv(folder), Path(base), version)
    except (Failed, OSError) as reason:
        print(f"Mooncake cannot be installed in {folder}:\n{reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
