"""Where the kernels' tests run in Triton's interpreter: wherever no driver can be loaded, whatever else is there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("driver", [True, False])
def test_kernels_are_interpreted_where_the_driver_does_not_load(driver: bool, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    if driver:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        (tmp_path / "libcuda.so.1").symlink_to(next(path for path in loaded if Path(path).name.startswith("libc.so")))
        environment["LD_LIBRARY_PATH"] = str(tmp_path)
    else:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            pass
        else:
            pytest.skip("there is a CUDA driver here: run it on a machine without one")
    code = "import conftest, os; print(os.environ.get('TRITON_INTERPRET'))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["None" if driver else "1"]
