"""Installs the torch that fits this machine: the CUDA build where there is an NVIDIA driver, else the CPU build.

A torch that is already there is left alone. Without a driver it asks, in this order: pip for a CPU wheel of the pinned
version, which platforms other than Linux and indexes that carry one can answer, and uv, which knows where PyTorch keeps
its CPU wheels.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path


def has_nvidia_driver() -> bool:
    """Whether a CUDA build could run here."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def run(module: str, *args: str) -> bool:
    """Runs a module of this interpreter (pip, uv); True if it succeeded."""
    command = [sys.executable, "-m", module, *args]
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True, help="the version to install")
    version = parser.parse_args().version
    if importlib.util.find_spec("torch") is not None:
        print("torch is installed already")
        return 0
    if has_nvidia_driver() or sys.platform != "linux":
        return 0 if run("pip", "install", f"torch=={version}") else 1
    found = run("pip", "install", "--only-binary=:all:", "--no-deps", f"torch=={version}+cpu") or (
        run("pip", "install", "uv")
        and run("uv", "pip", "install", "--python", sys.executable, "--torch-backend=cpu", f"torch=={version}")
    )
    return 0 if found and run("pip", "install", f"torch=={version}") else 1


if __name__ == "__main__":
    sys.exit(main())
